// The row kernels of the sampler, over vectors of sixteen floats.
//
// Owns loops over rows. It must not know tokens' parameters. Exponentials are the sequence of operations of
// exact_math.py, none of them fused, and masses are integers: so every instruction set, and numpy, gives the same.
#pragma once

#include "row_kernels.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

constexpr float kMassUnit = 1099511627776.0f;  // 2^40
constexpr float kLowest = -__builtin_inff();

OCTAVO_INLINE int at_most(int value, int limit) { return value < limit ? value : limit; }

OCTAVO_INLINE uint32_t mask_at_least(Vec a, Vec b) {
#if defined(OCTAVO_AVX512)
    return _mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_GE_OQ);
#else
    uint32_t mask = 0;
    unroll<kParts>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
#if defined(OCTAVO_AVX2)
        mask |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.part[i], b.part[i], _CMP_GE_OQ)) << (i * kPartLanes);
#else
        const Ints is_true = a.part[i] >= b.part[i];
        for (int lane = 0; lane < kPartLanes; ++lane) mask |= (uint32_t)(is_true[lane] & 1) << (i * kPartLanes + lane);
#endif
    });
    return mask;
#endif
}

// Writes the lanes that `mask` names, one after the other; may write sixteen values.
OCTAVO_INLINE void compress(float* to, Vec values, uint32_t mask) {
#if defined(OCTAVO_AVX512)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)mask, values.part[0]));
#else
    alignas(64) float lanes[kLanes];
    store(lanes, values);
    for (; mask; mask &= mask - 1) *to++ = lanes[__builtin_ctz(mask)];
#endif
}

OCTAVO_INLINE void compress_ids(int* to, int first_id, uint32_t mask) {
#if defined(OCTAVO_AVX512)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(first_id));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)mask, ids));
#else
    for (; mask; mask &= mask - 1) *to++ = first_id + __builtin_ctz(mask);
#endif
}

// Sixteen values, those beyond `count` being `filler`.
OCTAVO_INLINE Vec load_some(const float* from, int count, float filler) {
    if (count >= kLanes) return load(from);
    alignas(64) float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? from[i] : filler;
    return load(lanes);
}

OCTAVO_INLINE Vec scores_of(Vec values, Scale scale) {
    return (values - splat(scale.greatest)) * splat(scale.inverse_temperature);
}

// e^x for x of at most 0, at least 2^-100.
OCTAVO_INLINE Vec exp_of(Vec x) {
    constexpr float kRounder = 12582912.0f;
    x = max(x * splat(1.44269504f), splat(-100.0f));
    const Vec shifted = x + splat(kRounder);
    const Vec fraction = x - (shifted - splat(kRounder));
    Vec p = splat(1.5403530e-4f);
    p = p * fraction + splat(1.3333558e-3f);
    p = p * fraction + splat(9.6181291e-3f);
    p = p * fraction + splat(5.5504109e-2f);
    p = p * fraction + splat(2.4022651e-1f);
    p = p * fraction + splat(6.9314718e-1f);
    p = p * fraction + splat(1.0f);
    const uint32_t offset = bit_cast<uint32_t>(kRounder) - 127u;
    OCTAVO_PARTS(p.part[i] * bit_cast<Part>((bit_cast<Bits>(shifted.part[i]) - offset) << 23));
}

#if defined(OCTAVO_AVX512)
struct Masses {
    __m512i sums = _mm512_setzero_si512();

    OCTAVO_INLINE void add(Vec weights) {
        const __m512 scaled = _mm512_mul_ps(weights.part[0], _mm512_set1_ps(kMassUnit));
        const __m512i low = _mm512_cvttps_epi64(_mm512_castps512_ps256(scaled));
        const __m512i high = _mm512_cvttps_epi64(_mm512_extractf32x8_ps(scaled, 1));
        sums = _mm512_add_epi64(sums, _mm512_add_epi64(low, high));
    }
    OCTAVO_INLINE void add_some(Vec weights, uint32_t mask) {
        add(Vec{{_mm512_maskz_mov_ps((__mmask16)mask, weights.part[0])}});
    }
    OCTAVO_INLINE int64_t total() const { return _mm512_reduce_add_epi64(sums); }
};
#else
struct Masses {
    int64_t sum = 0;

    OCTAVO_INLINE void add(Vec weights) {
        alignas(64) float lanes[kLanes];
        store(lanes, weights);
        for (int i = 0; i < kLanes; ++i) sum += (int64_t)(lanes[i] * kMassUnit);
    }
    OCTAVO_INLINE void add_some(Vec weights, uint32_t mask) {
        alignas(64) float lanes[kLanes];
        store(lanes, weights);
        for (; mask; mask &= mask - 1) sum += (int64_t)(lanes[__builtin_ctz(mask)] * kMassUnit);
    }
    OCTAVO_INLINE int64_t total() const { return sum; }
};
#endif

bool scan(const float* values, int count, float* maxima) {
    Vec differences = zero();
    for (int first = 0; first < count; first += kChunk) {
        Vec greatest = splat(kLowest);
        const int end = at_most(count - first, kChunk);
        for (int i = 0; i < end; i += kLanes) {
            const Vec loaded = load_some(values + first + i, end - i, values[first]);
            greatest = max(loaded, greatest);
            // A value that is not finite gives a difference that is not a number.
            differences = differences + (loaded - loaded);
        }
        maxima[first / kChunk] = max_of(greatest);
    }
    return sum_of(differences) == 0.0f;
}

int count_greater(const float* values, int count, float value) {
    int num_not_greater = 0;
    for (int i = 0; i < count; i += kLanes)
        num_not_greater += __builtin_popcount(mask_at_least(splat(value), load_some(values + i, count - i, value)));
    return (count + kLanes - 1) / kLanes * kLanes - num_not_greater;
}

int64_t weigh(const float* values, int count, const float* maxima, Scale scale, float least, float* weights) {
    // Its exponential is less than a unit, and so is that of all below.
    constexpr float kMassless = -28.0f;
    Masses masses;
    for (int i = 0; i < count; i += kLanes) {
        if (maxima && !weights && i % kChunk == 0 &&
            (maxima[i / kChunk] - scale.greatest) * scale.inverse_temperature < kMassless) {
            i += kChunk - kLanes;
            continue;
        }
        const Vec scores = scores_of(load_some(values + i, count - i, kLowest), scale);
        const uint32_t mask = mask_at_least(scores, splat(least));
        const Vec each = exp_of(scores);
        if (mask == 0xffffu)
            masses.add(each);
        else
            masses.add_some(each, mask);
        if (!weights) continue;
        alignas(64) float lanes[kLanes];
        store(lanes, each);
        if (mask == 0xffffu && count - i >= kLanes) {
            store(weights + i, each);
        } else {
            for (int lane = 0; lane < at_most(count - i, kLanes); ++lane)
                weights[i + lane] = mask >> lane & 1 ? lanes[lane] : 0.0f;
        }
    }
    return masses.total();
}

int collect(const float* values, int count, const float* maxima, Scale scale, float least, int limit, int* ids,
            float* scores) {
    int found = 0;
    for (int first = 0; first < count; first += kChunk) {
        if (maxima && !((maxima[first / kChunk] - scale.greatest) * scale.inverse_temperature >= least)) continue;
        const int end = at_most(count - first, kChunk);
        for (int i = 0; i < end; i += kLanes) {
            const Vec each = scores_of(load_some(values + first + i, end - i, kLowest), scale);
            uint32_t mask = mask_at_least(each, splat(least));
            // What is beyond the row counts as the lowest score, which may be wanted.
            if (end - i < kLanes) mask &= (1u << (end - i)) - 1;
            if (!mask) continue;
            compress(scores + found, each, mask);
            compress_ids(ids + found, first + i, mask);
            found += __builtin_popcount(mask);
            if (found > limit) return found;
        }
    }
    return found;
}

int divide(const float* weights, int count, float pivot, float* upper, float* lower, int64_t* upper_mass) {
    Masses masses;
    int num_upper = 0, num_lower = 0;
    for (int i = 0; i < count; i += kLanes) {
        const Vec each = load_some(weights + i, count - i, 0.0f);
        const uint32_t present = count - i < kLanes ? (1u << (count - i)) - 1 : 0xffffu;
        const uint32_t mask = mask_at_least(each, splat(pivot)) & present;
        compress(upper + num_upper, each, mask);
        compress(lower + num_lower, each, ~mask & present);
        num_upper += __builtin_popcount(mask);
        num_lower += __builtin_popcount(~mask & present);
        masses.add_some(each, mask);
    }
    *upper_mass = masses.total();
    return num_upper;
}

#if defined(OCTAVO_AVX512)
struct Products {
    __m512i high, low;
};

OCTAVO_INLINE Products multiply_words(__m512i words, uint32_t by) {
    const __m512i factor = _mm512_set1_epi32((int)by);
    const __m512i even = _mm512_mul_epu32(words, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), factor);
    return {_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd),
            _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32))};
}

void random_words(const DrawKey& key, const uint32_t* first_words, uint32_t domain, RandomWords* to) {
    __m512i c0 = _mm512_loadu_si512(first_words), c1 = _mm512_set1_epi32((int)key.position);
    __m512i c2 = _mm512_set1_epi32((int)key.choice), c3 = _mm512_set1_epi32((int)domain);
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; ++round) {
        const Products first = multiply_words(c0, 0xD2511F53u), second = multiply_words(c2, 0xCD9E8D57u);
        c0 = _mm512_xor_si512(_mm512_xor_si512(second.high, c1), _mm512_set1_epi32((int)k0));
        c1 = second.low;
        c2 = _mm512_xor_si512(_mm512_xor_si512(first.high, c3), _mm512_set1_epi32((int)k1));
        c3 = first.low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    // Each group of four lanes holds four blocks; after the transposition each vector has one block of each group.
    const __m512i low01 = _mm512_unpacklo_epi32(c0, c1), high01 = _mm512_unpackhi_epi32(c0, c1);
    const __m512i low23 = _mm512_unpacklo_epi32(c2, c3), high23 = _mm512_unpackhi_epi32(c2, c3);
    const __m512i blocks[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                               _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
    unroll<4>([&](auto index) __attribute__((always_inline)) {
        constexpr int i = decltype(index)::value;
        _mm_storeu_si128((__m128i*)to->words[i], _mm512_extracti32x4_epi32(blocks[i], 0));
        _mm_storeu_si128((__m128i*)to->words[4 + i], _mm512_extracti32x4_epi32(blocks[i], 1));
        _mm_storeu_si128((__m128i*)to->words[8 + i], _mm512_extracti32x4_epi32(blocks[i], 2));
        _mm_storeu_si128((__m128i*)to->words[12 + i], _mm512_extracti32x4_epi32(blocks[i], 3));
    });
}
#else
void random_words(const DrawKey& key, const uint32_t* first_words, uint32_t domain, RandomWords* to) {
    uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
        c0[i] = first_words[i];
        c1[i] = key.position;
        c2[i] = key.choice;
        c3[i] = domain;
    }
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int round = 0; round < 10; ++round) {
        for (int i = 0; i < kBlocks; ++i) {
            const uint64_t product0 = (uint64_t)c0[i] * 0xD2511F53u, product2 = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(product2 >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)product2;
            c2[i] = (uint32_t)(product0 >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)product0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < kBlocks; ++i) {
        to->words[i][0] = c0[i];
        to->words[i][1] = c1[i];
        to->words[i][2] = c2[i];
        to->words[i][3] = c3[i];
    }
}
#endif

int sift(const float* values, int first, int count, Scale scale, Thresholds least, float factor,
         const uint8_t* coarse_bytes, int* ids) {
    int found = 0;
    for (int i = 0; i < count; i += kLanes) {
        const Vec scores = scores_of(load_some(values + first + i, count - i, kLowest), scale);
        const Vec weights = exp_of(scores);
        alignas(64) float gaps[kLanes] = {};
        for (int lane = 0; lane < at_most(count - i, kLanes); ++lane)
            gaps[lane] = (float)(255 - coarse_bytes[i + lane]) * (1.0f / 256.0f);
        uint32_t mask = mask_at_least(weights * splat(factor), load(gaps));
        mask &= mask_at_least(scores, splat(least.score)) & mask_at_least(weights, splat(least.weight));
        if (count - i < kLanes) mask &= (1u << (count - i)) - 1;
        for (; mask; mask &= mask - 1) ids[found++] = first + i + __builtin_ctz(mask);
    }
    return found;
}

constexpr RowKernels row_kernels_of(const char* name) {
    return {name, scan, count_greater, weigh, collect, divide, random_words, sift};
}

}  // namespace
}  // namespace octavo
