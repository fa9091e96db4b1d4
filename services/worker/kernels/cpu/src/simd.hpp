// Vectors of sixteen floats and the products of pairs of bfloat16 values and of quads of int8 values, for the
// instruction set of this unit.
//
// Owns what differs between processors. It must not know models. Everything here has internal linkage: units that
// are compiled for different processors must not share inline functions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
#include <immintrin.h>
#endif

// A build that checks every access sets it to plain `inline`.
#if !defined(OCTAVO_INLINE)
#define OCTAVO_INLINE inline __attribute__((always_inline))
#endif

namespace octavo {
namespace {

using bf16 = uint16_t;

constexpr int kLanes = 16;

#if defined(OCTAVO_AVX512)
constexpr int kPartBytes = 64;
// Registers bound the tile: rows times columns of accumulators, and what is loaded beside them.
constexpr int kMaxRows = 12;
constexpr bool kIsWide = true;
#elif defined(OCTAVO_AVX2)
constexpr int kPartBytes = 32;
constexpr int kMaxRows = 4;
constexpr bool kIsWide = false;
#else
constexpr int kPartBytes = 16;
constexpr int kMaxRows = 2;
constexpr bool kIsWide = false;
#endif

constexpr int kParts = 64 / kPartBytes;
constexpr int kPartLanes = kLanes / kParts;

typedef float Part __attribute__((vector_size(kPartBytes)));
typedef uint32_t Bits __attribute__((vector_size(kPartBytes)));
typedef int32_t Ints __attribute__((vector_size(kPartBytes)));
typedef uint16_t Halves __attribute__((vector_size(kPartBytes / 2)));

template <int N>
struct Int {
    static constexpr int value = N;
};

template <int... I>
struct Sequence {};
template <int N, int... I>
struct MakeSequence : MakeSequence<N - 1, N - 1, I...> {};
template <int... I>
struct MakeSequence<0, I...> {
    using type = Sequence<I...>;
};

template <class F, int... I>
OCTAVO_INLINE void unroll(F&& f, Sequence<I...>) {
    (f(Int<I>{}), ...);
}

// Calls f(Int<0>{}), …, f(Int<N - 1>{}): constant indices let the compiler keep arrays of vectors in registers.
template <int N, class F>
OCTAVO_INLINE void unroll(F&& f) {
    unroll(f, typename MakeSequence<N>::type{});
}

struct Vec {
    Part part[kParts];
};

struct IntVec {
    Ints part[kParts];
};

#define OCTAVO_PARTS(expression) OCTAVO_PARTS_OF(Vec, expression)
#define OCTAVO_PARTS_OF(Type, expression)                                               \
    Type result;                                                                        \
    unroll<kParts>([&](auto index) __attribute__((always_inline)) {                     \
        constexpr int i = decltype(index)::value;                                       \
        result.part[i] = (expression);                                                  \
    });                                                                                 \
    return result

template <class To, class From>
OCTAVO_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

template <class T>
OCTAVO_INLINE T load_as(const void* address) {
    T value;
    __builtin_memcpy(&value, address, sizeof(T));
    return value;
}

OCTAVO_INLINE Vec splat(float value) { OCTAVO_PARTS(Part{} + value); }
OCTAVO_INLINE Vec zero() { OCTAVO_PARTS(Part{}); }
OCTAVO_INLINE Vec load(const float* from) { OCTAVO_PARTS(load_as<Part>(from + i * kPartLanes)); }
OCTAVO_INLINE Vec operator+(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] + b.part[i]); }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] - b.part[i]); }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] * b.part[i]); }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] / b.part[i]); }

// Where b is not a number, so is the result.
#if defined(OCTAVO_AVX512)
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.part[0], b.part[0])}; }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.part[0], b.part[0])}; }
#else
OCTAVO_INLINE Vec max(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] < b.part[i] ? a.part[i] : b.part[i]); }
#endif

OCTAVO_INLINE Part fma_part(Part a, Part b, Part c) {
#if defined(OCTAVO_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(OCTAVO_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { OCTAVO_PARTS(fma_part(a.part[i], b.part[i], c.part[i])); }

OCTAVO_INLINE void store(float* to, Vec v) {
    unroll<kParts>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        __builtin_memcpy(to + i * kPartLanes, &v.part[i], sizeof(Part));
    });
}

OCTAVO_INLINE Vec load_bf16(const bf16* from) {
    OCTAVO_PARTS(
        bit_cast<Part>(__builtin_convertvector(load_as<Halves>(from + i * kPartLanes), Bits) << 16));
}

// Rounds to nearest even; what is not a number stays so.
OCTAVO_INLINE void store_bf16(bf16* to, Vec v) {
#if defined(OCTAVO_AVX512)
    const __m256bh rounded = _mm512_cvtneps_pbh(v.part[0]);
    __builtin_memcpy(to, &rounded, sizeof(rounded));
#else
    unroll<kParts>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        const Bits bits = bit_cast<Bits>(v.part[i]);
        const Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        const Bits quiet = bits | 0x400000u;
        const Bits chosen = v.part[i] == v.part[i] ? rounded : quiet;
        const Halves halves = __builtin_convertvector(chosen >> 16, Halves);
        __builtin_memcpy(to + i * kPartLanes, &halves, sizeof(halves));
    });
#endif
}

// Two vectors one after the other.
OCTAVO_INLINE void store_bf16(bf16* to, Vec left, Vec right) {
#if defined(OCTAVO_AVX512)
    const __m512bh rounded = _mm512_cvtne2ps_pbh(right.part[0], left.part[0]);  // As long as one of the others.
    __builtin_memcpy(to, &rounded, sizeof(rounded));
#else
    store_bf16(to, left);
    store_bf16(to + kLanes, right);
#endif
}

// One vector with four bytes from one value to the next, from `to` or, if `is_odd`, from two bytes behind it on. What
// lies between them stays as it is.
OCTAVO_INLINE void store_bf16_apart(bf16* to, bool is_odd, Vec v) {
#if defined(OCTAVO_AVX512)
    const __m512i words = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v.part[0]));
    _mm512_mask_storeu_epi16(to, is_odd ? 0xaaaaaaaau : 0x55555555u, is_odd ? _mm512_slli_epi32(words, 16) : words);
#else
    alignas(64) bf16 rounded[kLanes];
    store_bf16(rounded, v);
    for (int i = 0; i < kLanes; ++i) to[2 * i + is_odd] = rounded[i];
#endif
}

// The lanes are added in a fixed order.
OCTAVO_INLINE float sum_of(Vec v) {
#if defined(OCTAVO_AVX512)
    return _mm512_reduce_add_ps(v.part[0]);  // Halves, too, each time.
#else
    alignas(64) float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

OCTAVO_INLINE float max_of(Vec v) {
#if defined(OCTAVO_AVX512)
    return _mm512_reduce_max_ps(v.part[0]);
#else
    alignas(64) float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

#if defined(OCTAVO_AVX512)
// Reduces each of sixteen vectors to the lane with its index, halves with halves each time, as `sum_of` does with one:
// what takes 8 instructions for one vector takes 45 for all of them.
template <class Combine>
OCTAVO_INLINE Vec reduced_to_lanes(const Vec (&of)[kLanes], Combine combine) {
    __m512 eighths[8], quarters[4], halves[2];
    // Of two vectors i and i + 4 the sums of eight lanes each, side by side.
    unroll<8>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value, first = i / 2 + i % 2 * 8;
        const __m512 a = of[first].part[0], b = of[first + 4].part[0];
        eighths[i] = combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    });
    unroll<4>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        const __m512 a = eighths[2 * i], b = eighths[2 * i + 1];
        quarters[i] = combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    });
    unroll<2>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        const __m512d a = _mm512_castps_pd(quarters[2 * i]), b = _mm512_castps_pd(quarters[2 * i + 1]);
        halves[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    });
    return {combine(_mm512_shuffle_ps(halves[0], halves[1], 0x88), _mm512_shuffle_ps(halves[0], halves[1], 0xdd))};
}
#else
template <class Reduce>
OCTAVO_INLINE Vec reduced_to_lanes(const Vec (&of)[kLanes], Reduce reduce) {
    alignas(64) float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = reduce(of[i]);
    return load(lanes);
}
#endif

// `sum_of` each of sixteen vectors, in the lane with its index.
OCTAVO_INLINE Vec sums_of(const Vec (&of)[kLanes]) {
#if defined(OCTAVO_AVX512)
    return reduced_to_lanes(of, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_add_ps(a, b); });
#else
    return reduced_to_lanes(of, [](Vec v) { return sum_of(v); });
#endif
}

// `max_of` each.
OCTAVO_INLINE Vec maxima_of(const Vec (&of)[kLanes]) {
#if defined(OCTAVO_AVX512)
    return reduced_to_lanes(of, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); });
#else
    return reduced_to_lanes(of, [](Vec v) { return max_of(v); });
#endif
}

// 2^x for x up to 126, with a relative error below 2e-7; below -126 it is 2^-126 or less.
OCTAVO_INLINE Vec exp2_of(Vec x) {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits.
#if !defined(OCTAVO_AVX512)
    x = min(splat(126.0f), max(splat(-126.0f), x));
#endif
    const Vec shifted = x + splat(kRounder);
    const Vec whole = shifted - splat(kRounder);
    const Vec fraction = x - whole;
    Vec p = splat(1.5403530e-4f);
    p = fma(p, fraction, splat(1.3333558e-3f));
    p = fma(p, fraction, splat(9.6181291e-3f));
    p = fma(p, fraction, splat(5.5504109e-2f));
    p = fma(p, fraction, splat(2.4022651e-1f));
    p = fma(p, fraction, splat(6.9314718e-1f));
    p = fma(p, fraction, splat(1.0f));
#if defined(OCTAVO_AVX512)
    return {_mm512_scalef_ps(p.part[0], whole.part[0])};
#else
    const uint32_t offset = bit_cast<uint32_t>(kRounder) - 127u;
    OCTAVO_PARTS(p.part[i] * bit_cast<Part>((bit_cast<Bits>(shifted.part[i]) - offset) << 23));
#endif
}

// 2^x for what is rounded to bfloat16 afterwards, whose error is a thousand times that of 3e-6 here; less work than the above.
OCTAVO_INLINE Vec exp2_to_be_rounded(Vec x) {
#if defined(OCTAVO_AVX512)
    constexpr int kFractionAboveFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const Vec fraction = {_mm512_reduce_ps(x.part[0], kFractionAboveFloor)};
    Vec p = splat(1.34251544e-2f);
    p = fma(p, fraction, splat(5.22453740e-2f));
    p = fma(p, fraction, splat(2.41278556e-1f));
    p = fma(p, fraction, splat(6.93045155e-1f));
    p = fma(p, fraction, splat(1.0f));
    return {_mm512_scalef_ps(p.part[0], x.part[0])};  // It takes the floor of the exponent.
#else
    return exp2_of(x);
#endif
}

// x / (1 + 2^exponent) with a relative error below 3e-7.
OCTAVO_INLINE Vec opened_by(Vec x, Vec exponent) {
    const Vec divisor = splat(1.0f) + exp2_of(min(splat(126.0f), exponent));
#if defined(OCTAVO_AVX512)
    // A division takes as long as sixteen products. Both instructions are defined to the last bit.
    const Vec guess = {_mm512_rcp14_ps(divisor.part[0])};
    const Vec quotient = guess * x;
    return fma(guess, fma(zero() - quotient, divisor, x), quotient);
#else
    return x / divisor;
#endif
}

OCTAVO_INLINE Vec silu(Vec x) { return opened_by(x, x * splat(-1.44269504f)); }

// The approximation x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2.
OCTAVO_INLINE Vec gelu_tanh(Vec x) {
    const Vec exponent = x * fma(x * x, splat(-0.10294324f), splat(-2.30220820f));  // -2 u log2(e)
    return opened_by(x, exponent);
}

// How values are multiplied: a group of inputs that one instruction takes, 4 bytes, of sixteen columns of a weight
// (`Columns`) and of one row (`Input`, in all lanes).

// Pairs of bfloat16 values, summed in fp32.
struct Bfloat16Pairs {
    static constexpr bool kIsInt8 = false;
    static constexpr int kInputs = 2;
    using Sum = Vec;
#if defined(OCTAVO_AVX512)
    using Columns = __m512bh;
    using Input = __m512bh;

    static OCTAVO_INLINE Columns load(const char* from) { return (__m512bh)_mm512_load_si512(from); }
    static OCTAVO_INLINE Input splat(const char* from) {
        return (__m512bh)_mm512_set1_epi32(load_as<int32_t>(from));
    }
    static OCTAVO_INLINE void add(Vec& sum, Columns columns, Input input) {
        sum.part[0] = _mm512_dpbf16_ps(sum.part[0], columns, input);
    }
#else
    struct Columns {
        Vec even, odd;
    };
    struct Input {
        Part even, odd;
    };

    static OCTAVO_INLINE Columns load(const char* from) {
        Columns columns;
        unroll<kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            const Bits bits = load_as<Bits>(from + i * kPartBytes);
            columns.even.part[i] = bit_cast<Part>(bits << 16);
            columns.odd.part[i] = bit_cast<Part>(bits & 0xffff0000u);
        });
        return columns;
    }
    static OCTAVO_INLINE Input splat(const char* from) {
        const uint32_t bits = load_as<uint32_t>(from);
        return {Part{} + bit_cast<float>(bits << 16), Part{} + bit_cast<float>(bits & 0xffff0000u)};
    }
    static OCTAVO_INLINE void add(Vec& sum, const Columns& columns, const Input& input) {
        unroll<kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            sum.part[i] = fma_part(columns.even.part[i], input.even, sum.part[i]);
            sum.part[i] = fma_part(columns.odd.part[i], input.odd, sum.part[i]);
        });
    }
#endif
};

// Quads of a weight's values with 128 added, unsigned, and of a row's signed values, summed in int32 without loss.
struct Int8Quads {
    static constexpr bool kIsInt8 = true;
    static constexpr int kInputs = 4;
    using Sum = IntVec;
#if defined(OCTAVO_AVX512)
    using Columns = Ints;
    using Input = Ints;

    static OCTAVO_INLINE Columns load(const char* from) { return load_as<Ints>(from); }
    static OCTAVO_INLINE Input splat(const char* from) { return Ints{} + load_as<int32_t>(from); }
    static OCTAVO_INLINE void add(IntVec& sum, Columns columns, Input input) {
        // The compiler keeps sums of the intrinsic in memory (GCC 12).
        asm("vpdpbusd %2, %1, %0" : "+v"(sum.part[0]) : "v"(columns), "v"(input));
    }
#elif defined(OCTAVO_AVX2)
    // Bytes are widened to 16 bits: the products of bytes that this instruction set has are clipped.
    struct Columns {
        IntVec even, odd;
    };
    struct Input {
        __m256i even, odd;
    };

    static OCTAVO_INLINE Columns load(const char* from) {
        Columns columns;
        unroll<kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            const __m256i bytes = _mm256_load_si256((const __m256i*)(from + i * kPartBytes));
            columns.even.part[i] = (Ints)_mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
            columns.odd.part[i] = (Ints)_mm256_srli_epi16(bytes, 8);
        });
        return columns;
    }
    static OCTAVO_INLINE Input splat(const char* from) {
        const __m256i bytes = _mm256_set1_epi32(load_as<int32_t>(from));
        return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
    }
    static OCTAVO_INLINE void add(IntVec& sum, const Columns& columns, const Input& input) {
        unroll<kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            sum.part[i] += (Ints)_mm256_madd_epi16((__m256i)columns.even.part[i], input.even);
            sum.part[i] += (Ints)_mm256_madd_epi16((__m256i)columns.odd.part[i], input.odd);
        });
    }
#else
    struct Columns {
        IntVec bytes[4];
    };
    struct Input {
        int32_t bytes[4];
    };

    static OCTAVO_INLINE Columns load(const char* from) {
        Columns columns;
        unroll<4 * kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value / 4, byte = decltype(index)::value % 4;
            columns.bytes[byte].part[i] = (Ints)(load_as<Bits>(from + i * kPartBytes) >> (8 * byte) & 0xffu);
        });
        return columns;
    }
    static OCTAVO_INLINE Input splat(const char* from) {
        const int8_t* bytes = (const int8_t*)from;
        return {{bytes[0], bytes[1], bytes[2], bytes[3]}};
    }
    static OCTAVO_INLINE void add(IntVec& sum, const Columns& columns, const Input& input) {
        unroll<4 * kParts>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value / 4, byte = decltype(index)::value % 4;
            sum.part[i] += columns.bytes[byte].part[i] * input.bytes[byte];
        });
    }
#endif
};

OCTAVO_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }
OCTAVO_INLINE void prefetch_to_write(const void* address) { __builtin_prefetch(address, 1, 3); }

// Lines one after the other into the first-level cache, unlike `prefetch`.
template <int LINES>
OCTAVO_INLINE void fetch_into_first_level(const char* from, Int<LINES>) {
    unroll<LINES>([&](auto line) __attribute__((always_inline)) {
        __builtin_prefetch(from + decltype(line)::value * 64, 0, 3);
    });
}

// Adds the products of ROWS rows with COLUMNS vectors of columns. Each sum runs over the groups of inputs in their
// order, so that it does not depend on how many rows or columns are computed together. Strides are in bytes.
template <class Groups, int ROWS, int COLUMNS, bool PREFETCH>
OCTAVO_INLINE void accumulate(typename Groups::Sum (&sums)[ROWS][COLUMNS], const char* rows, ptrdiff_t row_stride,
                              const char* const (&columns)[COLUMNS], ptrdiff_t group_stride, int num_groups,
                              ptrdiff_t prefetch_distance) {
    for (int group = 0; group < num_groups; ++group) {
        typename Groups::Columns loaded[COLUMNS];
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int j = decltype(column)::value;
            const char* from = columns[j] + group * group_stride;
            loaded[j] = Groups::load(from);
            if constexpr (PREFETCH) prefetch(from + prefetch_distance);
        });
        unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
            constexpr int i = decltype(row)::value;
            const typename Groups::Input input = Groups::splat(rows + i * row_stride + 4 * group);
            unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
                constexpr int j = decltype(column)::value;
                Groups::add(sums[i][j], loaded[j], input);
            });
        });
    }
}

// How many vectors of columns to compute at once: enough independent sums to hide the latency of a product.
constexpr int columns_at_once(int rows) { return !kIsWide ? 1 : rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }

// Writes the sums to `to` [ROWS][COLUMNS]; not inlined, so that one copy serves all who multiply.
template <class Groups, int ROWS, int COLUMNS, bool PREFETCH>
__attribute__((noinline)) void products(typename Groups::Sum* to, const char* rows, ptrdiff_t row_stride,
                                        const char* const (&columns)[COLUMNS], ptrdiff_t group_stride,
                                        int num_groups, ptrdiff_t prefetch_distance) {
    typename Groups::Sum sums[ROWS][COLUMNS];
    unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            sums[decltype(row)::value][decltype(column)::value] = {};
        });
    });
    accumulate<Groups, ROWS, COLUMNS, PREFETCH>(sums, rows, row_stride, columns, group_stride, num_groups,
                                                prefetch_distance);
    unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int i = decltype(row)::value, j = decltype(column)::value;
            to[i * COLUMNS + j] = sums[i][j];
        });
    });
}

template <int N, class F>
OCTAVO_INLINE void with_rows_up_to(int num_rows, F&& f) {
    if constexpr (N == 1) {
        f(Int<1>{});
    } else {
        if (num_rows == N)
            f(Int<N>{});
        else
            with_rows_up_to<N - 1>(num_rows, f);
    }
}

// Calls f(first_row, Int<rows>{}) for tiles of at most kMaxRows of the rows from `first` on, of nearly equal size.
template <class F>
OCTAVO_INLINE void for_each_tile(int first, int num_rows, F&& f) {
    const int num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int rows = num_rows / num_tiles + (tile < num_rows % num_tiles);
        with_rows_up_to<kMaxRows>(rows, [&](auto size) __attribute__((always_inline)) { f(first, size); });
        first += rows;
    }
}

}  // namespace
}  // namespace octavo
