// Vectors of sixteen floats and the products of pairs of bfloat16 values, for the instruction set of this unit.
//
// Owns what differs between processors. It must not know models. Everything here has internal linkage: units that
// are compiled for different processors must not share inline functions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

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

#define OCTAVO_PARTS(expression)                                                        \
    Vec result;                                                                         \
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
OCTAVO_INLINE Vec max(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
OCTAVO_INLINE Vec min(Vec a, Vec b) { OCTAVO_PARTS(a.part[i] < b.part[i] ? a.part[i] : b.part[i]); }

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

// The lanes are added in a fixed order.
OCTAVO_INLINE float sum_of(Vec v) {
    alignas(64) float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

OCTAVO_INLINE float max_of(Vec v) {
    alignas(64) float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

// 2^x for x up to 126, with a relative error below 2e-7; below -126 it is 2^-126.
OCTAVO_INLINE Vec exp2_of(Vec x) {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits.
    x = min(splat(126.0f), max(splat(-126.0f), x));
    const Vec shifted = x + splat(kRounder);
    const Vec fraction = x - (shifted - splat(kRounder));
    Vec p = splat(1.5403530e-4f);
    p = fma(p, fraction, splat(1.3333558e-3f));
    p = fma(p, fraction, splat(9.6181291e-3f));
    p = fma(p, fraction, splat(5.5504109e-2f));
    p = fma(p, fraction, splat(2.4022651e-1f));
    p = fma(p, fraction, splat(6.9314718e-1f));
    p = fma(p, fraction, splat(1.0f));
    const uint32_t offset = bit_cast<uint32_t>(kRounder) - 127u;
    OCTAVO_PARTS(p.part[i] * bit_cast<Part>((bit_cast<Bits>(shifted.part[i]) - offset) << 23));
}

OCTAVO_INLINE Vec silu(Vec x) {
    return x / (splat(1.0f) + exp2_of(x * splat(-1.44269504f)));
}

// The approximation x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2.
OCTAVO_INLINE Vec gelu_tanh(Vec x) {
    const Vec exponent = x * fma(x * x, splat(-0.10294324f), splat(-2.30220820f));  // -2 u log2(e)
    return x / (splat(1.0f) + exp2_of(exponent));
}

// Sixteen columns of two inputs each, and the two inputs of one row in all lanes.
#if defined(OCTAVO_AVX512)
using Pairs = __m512bh;
using Input = __m512bh;

OCTAVO_INLINE Pairs load_pairs(const char* from) { return (__m512bh)_mm512_load_si512(from); }
OCTAVO_INLINE Input splat_input(const bf16* from) {
    return (__m512bh)_mm512_set1_epi32(load_as<int32_t>(from));
}
OCTAVO_INLINE void add_products(Vec& sum, Pairs pairs, Input input) {
    sum.part[0] = _mm512_dpbf16_ps(sum.part[0], pairs, input);
}
#else
struct Pairs {
    Vec even, odd;
};
struct Input {
    Part even, odd;
};

OCTAVO_INLINE Pairs load_pairs(const char* from) {
    Pairs pairs;
    unroll<kParts>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        const Bits bits = load_as<Bits>(from + i * kPartBytes);
        pairs.even.part[i] = bit_cast<Part>(bits << 16);
        pairs.odd.part[i] = bit_cast<Part>(bits & 0xffff0000u);
    });
    return pairs;
}
OCTAVO_INLINE Input splat_input(const bf16* from) {
    const uint32_t bits = load_as<uint32_t>(from);
    return {Part{} + bit_cast<float>(bits << 16), Part{} + bit_cast<float>(bits & 0xffff0000u)};
}
OCTAVO_INLINE void add_products(Vec& sum, const Pairs& pairs, const Input& input) {
    unroll<kParts>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        sum.part[i] = fma_part(pairs.even.part[i], input.even, sum.part[i]);
        sum.part[i] = fma_part(pairs.odd.part[i], input.odd, sum.part[i]);
    });
}
#endif

OCTAVO_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// Adds the products of ROWS rows with COLUMNS vectors of columns. Each sum runs over the pairs in their order, so
// that it does not depend on how many rows or columns are computed together.
template <int ROWS, int COLUMNS, bool PREFETCH>
OCTAVO_INLINE void accumulate(Vec (&sums)[ROWS][COLUMNS], const bf16* rows, ptrdiff_t row_stride,
                              const char* const (&columns)[COLUMNS], ptrdiff_t pair_stride, int num_pairs,
                              ptrdiff_t prefetch_distance) {
    for (int pair = 0; pair < num_pairs; ++pair) {
        Pairs loaded[COLUMNS];
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int j = decltype(column)::value;
            const char* from = columns[j] + pair * pair_stride;
            loaded[j] = load_pairs(from);
            if constexpr (PREFETCH) prefetch(from + prefetch_distance);
        });
        unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
            constexpr int i = decltype(row)::value;
            const Input input = splat_input(rows + i * row_stride + 2 * pair);
            unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
                constexpr int j = decltype(column)::value;
                add_products(sums[i][j], loaded[j], input);
            });
        });
    }
}

// How many vectors of columns to compute at once: enough independent sums to hide the latency of a product.
constexpr int columns_at_once(int rows) { return !kIsWide ? 1 : rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }

// Writes the sums to `to` [ROWS][COLUMNS]; not inlined, so that one copy serves all who multiply.
template <int ROWS, int COLUMNS, bool PREFETCH>
__attribute__((noinline)) void products(Vec* to, const bf16* rows, ptrdiff_t row_stride,
                                        const char* const (&columns)[COLUMNS], ptrdiff_t pair_stride, int num_pairs,
                                        ptrdiff_t prefetch_distance) {
    Vec sums[ROWS][COLUMNS];
    unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            sums[decltype(row)::value][decltype(column)::value] = zero();
        });
    });
    accumulate<ROWS, COLUMNS, PREFETCH>(sums, rows, row_stride, columns, pair_stride, num_pairs, prefetch_distance);
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

// Calls f(first_row, Int<rows>{}) for tiles of at most kMaxRows rows and of nearly equal size.
template <class F>
OCTAVO_INLINE void for_each_tile(int num_rows, F&& f) {
    const int num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
    int first = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int rows = num_rows / num_tiles + (tile < num_rows % num_tiles);
        with_rows_up_to<kMaxRows>(rows, [&](auto size) __attribute__((always_inline)) { f(first, size); });
        first += rows;
    }
}

}  // namespace
}  // namespace octavo
