// What the sampler computes over a whole row of logits, for the instruction set that is there.
//
// Owns the interface only. It holds no code that a unit could compile for its own processor.
#pragma once

#include <stdint.h>

namespace octavo {

constexpr int kChunk = 64;             // tokens whose greatest logit is kept
constexpr int kTokensPerBlock = 16;    // tokens whose coarse bytes come from one block of random words
constexpr int kBlocks = 16;            // blocks that are computed together

// Scores are (logit - greatest) * inverse_temperature.
struct Scale {
    float greatest;
    float inverse_temperature;
};

// Tokens below either are left out.
struct Thresholds {
    float score;
    float weight;
};

// Four words for each of sixteen counters: the bytes of a block lie one after the other.
struct RandomWords {
    uint32_t words[kBlocks][4];
};

struct DrawKey {
    uint32_t seed_low, seed_high, choice, position;
};

struct RowKernels {
    const char* name;
    // Writes the greatest value of each chunk; returns whether all values are finite.
    bool (*scan)(const float* values, int count, float* maxima);
    // Returns how many values are greater.
    int (*count_greater)(const float* values, int count, float value);
    // Writes the exponential of each score of at least `least`, and 0 for the others, if `weights` is given; returns
    // their sum in units of 2^-40. Chunks that have no mass are passed over if `maxima` is given and `weights` is not.
    int64_t (*weigh)(const float* values, int count, const float* maxima, Scale scale, float least, float* weights);
    // Writes ids and scores of those whose score is at least `least`, until there are more than `limit`; returns how
    // many; may write sixteen more. Chunks whose greatest value is too small are passed over if `maxima` is given.
    int (*collect)(const float* values, int count, const float* maxima, Scale scale, float least, int limit, int* ids,
                   float* scores);
    // Divides weights into those of at least `pivot` and those below; returns how many go to `upper`, and their sum
    // in units of 2^-40.
    int (*divide)(const float* weights, int count, float pivot, float* upper, float* lower, int64_t* upper_mass);
    // Philox4x32-10 with the counters (first_words[i], position, choice, domain).
    void (*random_words)(const DrawKey& key, const uint32_t* first_words, uint32_t domain, RandomWords* to);
    // Writes the ids from `first` on, at most 256, that may win: (255 - coarse byte) / 256 <= weight * factor.
    int (*sift)(const float* values, int first, int count, Scale scale, Thresholds least, float factor,
                const uint8_t* coarse_bytes, int* ids);
};

const RowKernels& portable_row_kernels();
#if defined(OCTAVO_X86)
const RowKernels& avx2_row_kernels();
const RowKernels& avx512_row_kernels();
#endif

}  // namespace octavo
