// Rows of activations in int8, and what becomes of the sums that they give.
//
// Owns the rotation and the rounding of rows and the scales of sums. It must not know how weights are packed or sums
// are computed. Before a row is rounded its inputs are rotated, 64 at a time, by a Hadamard matrix: that spreads a large
// value over its neighbours, so that one scale fits the whole row (Ashkboos et al., QuaRot, 2024, section 4). Weights are
// rotated the same way when they are packed, and the two rotations cancel in the product.
#pragma once

#include "plan.hpp"
#include "products_common.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

constexpr float kLargestInt8 = 127.0f;
// Butterflies of sums and differences give eight times the rotation of 64 values.
constexpr float kRotationScale = 0.125f;

template <int DISTANCE, int... LANES>
OCTAVO_INLINE Part lanes_at_distance(Part part, Sequence<LANES...>) {
    return Part{part[LANES ^ DISTANCE]...};
}

template <int DISTANCE, int... LANES>
OCTAVO_INLINE Part signs_at_distance(Sequence<LANES...>) {
    return Part{(LANES & DISTANCE ? -1.0f : 1.0f)...};
}

// Replaces each pair of lanes DISTANCE apart by its sum and its difference.
template <int DISTANCE>
OCTAVO_INLINE Vec butterfly(Vec v) {
    using Lanes = typename MakeSequence<kPartLanes>::type;
    if constexpr (DISTANCE < kPartLanes) {
        // Multiplied by one or minus one a value stays exact, so that this is a sum or a difference on any processor.
        OCTAVO_PARTS(fma_part(v.part[i], signs_at_distance<DISTANCE>(Lanes{}),
                              lanes_at_distance<DISTANCE>(v.part[i], Lanes{})));
    } else {
        constexpr int kOther = DISTANCE / kPartLanes;
        OCTAVO_PARTS(i & kOther ? v.part[i ^ kOther] - v.part[i] : v.part[i] + v.part[i ^ kOther]);
    }
}

using Block = Vec[kRotatedInputs / kLanes];

OCTAVO_INLINE void rotate(Block& block) {
    static_assert(kRotatedInputs == 4 * kLanes);
    for (Vec& v : block) v = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v))));
    const Vec a = block[0] + block[1], b = block[0] - block[1], c = block[2] + block[3], d = block[2] - block[3];
    block[0] = a + c;
    block[1] = b + d;
    block[2] = a - c;
    block[3] = b - d;
}

constexpr int32_t kInfinityBits = 0x7f800000, kNotANumberBits = 0x7fc00000;

// Bits of absolute values are in the order of the values, and above them all are those of what is not a finite number.
OCTAVO_INLINE IntVec larger(IntVec absolute_bits, Vec values) {
    OCTAVO_PARTS_OF(IntVec, [](Ints a, Ints b) __attribute__((always_inline)) { return a > b ? a : b; }(
                                absolute_bits.part[i], bit_cast<Ints>(values.part[i]) & 0x7fffffff));
}

OCTAVO_INLINE int32_t largest_of(IntVec v) {
    int32_t largest = 0;
    for (const Ints& part : v.part)
        for (int lane = 0; lane < kPartLanes; ++lane) largest = part[lane] > largest ? part[lane] : largest;
    return largest;
}

// Wraps.
OCTAVO_INLINE uint32_t sum_of(IntVec v) {
    uint32_t sum = 0;
    for (const Ints& part : v.part)
        for (int lane = 0; lane < kPartLanes; ++lane) sum += (uint32_t)part[lane];
    return sum;
}

// Stores the low byte of each lane. Where there are instructions for it they are named: the compiler takes lanes one by
// one (GCC 12).
OCTAVO_INLINE void store_bytes(char* to, IntVec v) {
#if defined(OCTAVO_AVX512)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v.part[0]));
#elif defined(OCTAVO_AVX2)
    const __m256i low_bytes = _mm256_set1_epi32(0x0c080400);
    for (int i = 0; i < kParts; ++i) {
        const __m256i bytes = _mm256_shuffle_epi8((__m256i)v.part[i], low_bytes);
        const int32_t halves[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
        __builtin_memcpy(to + i * kPartLanes, halves, sizeof(halves));
    }
#else
    for (int i = 0; i < kLanes; ++i) to[i] = (char)v.part[i / kPartLanes][i % kPartLanes];
#endif
}

// Writes num_inputs int8 values and their RowScale; inputs beyond the num_values that there are count as zeros.
// `rotated` has room for num_inputs. Where a value is not a finite number the scale is none, and so is all that the row
// is multiplied to.
void quantize_row(InputRow values, int num_values, int num_inputs, float* rotated, InputRow to) {
    IntVec largest{};
    for (int first = 0; first < num_inputs; first += kRotatedInputs) {
        Block block;
        unroll<kRotatedInputs / kLanes>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            const int input = first + i * kLanes;
            block[i] = input < num_values ? load_bf16(values.value(input)) : zero();
        });
        rotate(block);
        for (int i = 0; i < kRotatedInputs / kLanes; ++i) {
            largest = larger(largest, block[i]);
            store(rotated + first + i * kLanes, block[i]);
        }
    }
    constexpr float kSmallest = 1e-30f;  // of what has an inverse; rows below it are zeros
    const int32_t largest_bits = largest_of(largest);
    const float maximum = bit_cast<float>(largest_bits < kInfinityBits ? largest_bits : kNotANumberBits);
    const Vec inverse = splat(maximum > kSmallest ? kLargestInt8 / maximum : 0.0f);
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    IntVec sum{};
    for (int input = 0; input < num_inputs; input += kLanes) {
        const Vec shifted = load(rotated + input) * inverse + splat(kRounder);
        IntVec bits;
        unroll<kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            bits.part[i] = bit_cast<Ints>(shifted.part[i]);
            sum.part[i] = (Ints)((Bits)sum.part[i] + (Bits)bits.part[i]);
        });
        store_bytes(to.at(input), bits);
    }
    // Sums of bits wrap, and what was added to each comes off again.
    const uint32_t values_sum = sum_of(sum) - (uint32_t)num_inputs * bit_cast<uint32_t>(kRounder);
    const RowScale end = {maximum * (kRotationScale / kLargestInt8), (int32_t)values_sum};
    __builtin_memcpy(to.at(num_inputs), &end, sizeof(end));
}

constexpr int num_inputs_of(const Panels& int8_weight) { return 4 * int8_weight.num_groups; }
constexpr ptrdiff_t quantized_stride(const Panels& int8_weight) {
    return num_inputs_of(int8_weight) + kQuantizedRowEnd;
}

OCTAVO_INLINE const float* scales_of(const Panels& int8_weight, int panel) {
    return (const float*)(int8_weight.data + (panel + 1) * int8_weight.panel_bytes) - kPanelColumns;
}

// Turns sums of int8 products into what the values stand for.
template <class Epilogue>
struct Scaled {
    const Panels& weight;
    Inputs inputs;
    Epilogue next;

    template <class Next>
    struct OfPanel {
        const char* rows;
        ptrdiff_t stride;
        int num_inputs;
        Vec left_columns, right_columns;
        Next next;

        OCTAVO_INLINE void operator()(int row, IntVec left, IntVec right) const {
            const RowScale scale = load_as<RowScale>(input_row(rows, row, stride).at(num_inputs));
            next(row, scaled(left, scale, left_columns), scaled(right, scale, right_columns));
        }
    };

    OCTAVO_INLINE auto of_panel(int panel) const {
        const float* columns = scales_of(weight, panel);
        return OfPanel<decltype(next.of_panel(panel))>{inputs.data,   inputs.stride,          num_inputs_of(weight),
                                                       load(columns), load(columns + kLanes), next.of_panel(panel)};
    }

    static OCTAVO_INLINE Vec scaled(const IntVec& sums, RowScale row, Vec columns) {
        // The weight's values have 128 added. Where the scale is none the sum may be anything.
        const int32_t offset = (int32_t)(128u * (uint32_t)row.sum);
        OCTAVO_PARTS(__builtin_convertvector(sums.part[i] - offset, Part) * (columns.part[i] * row.scale));
    }
};

// Epilogues before the inputs are known.
template <class Epilogue>
struct ScaledLater {
    Epilogue next;

    OCTAVO_INLINE Scaled<Epilogue> with(const Panels& weight, const Inputs& inputs) const {
        return {weight, inputs, next};
    }
};

template <class Epilogue>
struct AsItIs {
    Epilogue next;

    OCTAVO_INLINE Epilogue with(const Panels&, const Inputs&) const { return next; }
};

}  // namespace
}  // namespace octavo
