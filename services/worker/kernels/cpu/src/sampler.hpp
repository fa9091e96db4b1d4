// Chooses tokens for rows of logits: the same as row_sampler.py's reference, to the last bit.
//
// Owns the order of edits, filters and draw, and how rows are divided among threads. It must not know Python or whose
// rows they are. Every decision rests on comparisons, integers, or sequences of single IEEE operations.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pool.hpp"
#include "row_kernels.hpp"

namespace octavo {

enum RowStatus : uint8_t { kSampled = 0, kNotNumbers = 1, kNoTokenLeft = 2 };

// What is changed in one row, in this order: masks, bans, biases, penalties.
struct Edits {
    const int32_t* masks;  // [num_masks][words of a mask]: bit i of word j allows token 32 j + i
    int64_t num_masks;
    const int64_t* banned_ids;
    int64_t num_banned;
    const int64_t* bias_ids;
    const float* biases;
    int64_t num_biases;
    double repetition, presence, frequency;
    const int32_t* history;  // tokens seen: prompt, then output
    int64_t history_length;
    int64_t num_prompt_tokens;
};

struct RowSettings {
    float inverse_temperature;  // 0 takes the most likely token
    int64_t top_k;
    double top_p;
    float least_score;
    DrawKey key;
    const Edits* edits;  // or null
};

// Where a row's log-probabilities go; `num_alternatives` below 0 wants none.
struct Measured {
    int64_t num_alternatives;
    float* logprob;
    int64_t* rank;
    int64_t* alternative_ids;
    float* alternative_logprobs;
};

// Returns what this processor can run, the fastest first.
std::vector<const RowKernels*> supported_row_kernels();

class Sampler {
   public:
    // With a pool of its own if `pool` is null; else the pool must live as long. Without a name the fastest kernels.
    Sampler(int vocab_size, int num_threads, Pool* pool, const std::string& kernels);
    ~Sampler();

    // Calls with row numbers; `settings` and `measured` have an entry for each row.
    void sample(const float* logits, int64_t num_rows, const RowSettings* settings, const Measured* measured,
                int64_t* token_ids, uint8_t* statuses);
    // Measures one given token of each row; `is_finite` says which rows could be measured.
    void measure(const float* logits, int64_t num_rows, const int64_t* token_ids, const Measured* measured,
                 uint8_t* is_finite);

    int vocab_size() const { return vocab_size_; }

   private:
    struct Thread;

    template <class Work>
    void for_each_row(int64_t num_rows, const Work& work);
    uint8_t sample_row(Thread& thread, const float* logits, const RowSettings& row, const Measured& measured,
                       int64_t* token_id) const;
    int64_t draw(Thread& thread, const float* logits, const RowSettings& row, Scale scale, int best_id) const;
    int64_t draw_from_all(Thread& thread, const float* logits, const RowSettings& row, Scale scale, Thresholds least,
                          int best_id) const;
    int64_t draw_from(const RowSettings& row, const int* ids, const float* scores, int count) const;
    void measure_row(Thread& thread, const float* logits, int64_t token_id, const Measured& measured) const;
    bool edit(Thread& thread, const float* logits, const Edits& edits) const;
    float least_weight(Thread& thread, const float* weights, int count, int64_t total, double top_p) const;
    float kth_score(Thread& thread, const float* logits, Scale scale, float least, int64_t k, int* num_found) const;

    const RowKernels& kernels_;
    const int vocab_size_;
    const int num_chunks_;
    std::unique_ptr<Pool> own_pool_;
    Pool* pool_;
    std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace octavo
