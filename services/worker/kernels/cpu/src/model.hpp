// A model that owns its packed weights, its threads and the memory of its steps.
//
// Owns which rows of a weight lie where in its panels, checks of what is handed over, and the division of a batch into tiles of queries. It must not know
// Python.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective.hpp"
#include "memory.hpp"
#include "packing.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace octavo {

struct Values {
    const float* data;
    int64_t count;
};

// What an attention has beside its weights; values without data are what the model lacks.
struct AttentionDetails {
    Values query_bias, key_bias, value_bias, output_bias;
    Values query_norm, key_norm;
    Values norm_after;
    int rotation;
    int window;
    float softmax_scale;
};

// Rotary positions of one or more kinds: [num_rotations][head_dim / 2] frequencies and [num_rotations] amplitudes.
struct Rotations {
    Values frequencies, amplitudes;
};

// The arrays of a step as they are handed over.
struct StepArrays {
    int64_t num_tokens;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slot_mapping;
    int64_t num_sequences;
    const int64_t* num_queries;
    const int32_t* block_tables;
    int64_t max_blocks;
    int64_t num_sampled_rows;
    const int64_t* sampled_rows;
    float* logits;
    uint8_t* is_finite;
};

// Returns what this processor can run, the fastest first.
std::vector<const Kernels*> supported_kernels();

// Maps rows [num_rows][num_inputs] by a weight [num_columns][num_inputs] of this type into `to`
// [num_rows][num_columns], as a step does with one of its weights.
void multiply_rows(ValueType type, const Matrix& weight, const Matrix& rows, float* to, int num_threads,
                   const std::string& kernels);

class NativeModel {
   public:
    // `type` is that of the weights.
    NativeModel(const Shape& shape, ValueType type, const Rotations& rotations, int num_threads, const std::string& kernels);

    void set_embedding(Matrix weight, float scale);
    void add_attention(Values norm, Matrix query, Matrix key, Matrix value, Matrix output,
                       const AttentionDetails& details);
    void add_feed_forward(Values norm, Matrix gate, Matrix up, Matrix down, Activation activation, Values norm_after);
    // The head gives the logits of `count` tokens from `first` on. Without a weight it is these rows of the embedding,
    // of which `first` must begin a panel.
    void set_head(Values norm, const Matrix* weight, int64_t first, int64_t count);
    // Takes the cache of each attention in turn; the memory must outlive the model's steps.
    void bind_cache(const std::vector<bf16*>& layers, int64_t num_blocks);
    // Makes this model a part of one: each operation's result and the logits are put together with those of the other
    // ranks, which must run the same steps. The collective must outlive the steps.
    void join(Collective* collective);

    void run(const StepArrays& arrays);
    // Computes the logits [num_rows][vocab_size] of rows of the last step.
    void run_head(const int64_t* rows, int64_t num_rows, float* logits);

    // Bytes a second, the best of so many rounds in each order of asking for memory.
    double read_bandwidth(size_t num_bytes, int num_rounds);
    // The same over the packed weights, of which at most `max_bytes` are read: it needs no memory of its own.
    double weight_bandwidth(size_t max_bytes, int num_rounds);
    double multiply_rate(ValueType type, int num_rounds);     // operations a second

    // The threads of the steps, for work between two of them.
    Pool& pool();
    const Shape& shape() const { return model_.shape; }
    size_t weight_bytes() const { return weight_bytes_; }
    const char* kernels() const { return kernels_.name; }

   private:
    Panels pack(const Columns& columns, int64_t num_inputs);
    void add(const Operation& operation);
    const float* keep(Values values, int64_t count, int64_t padded);
    const float* keep_optional(Values values, int64_t count, int64_t padded);
    const float* keep_first_bias(const AttentionDetails& details);
    void check_step(const StepArrays& arrays) const;
    void make_tiles(const StepArrays& arrays);
    void reserve(int64_t num_tokens, int64_t num_sampled_rows);
    void lay_out_workspace(size_t rows);

    Model model_{};
    const Kernels& kernels_;
    const ValueType type_;
    const int num_threads_;
    std::vector<Operation> operations_;
    Arena weights_;
    size_t weight_bytes_ = 0;
    int max_inner_ = 0;
    int max_inputs_ = 0;
    int max_panels_of_operations_ = 0;
    int64_t num_blocks_ = 0;
    Collective* collective_ = nullptr;
    bool has_head_norms_ = false, has_norms_after_ = false;
    int64_t num_rows_of_last_step_ = 0;
    std::unique_ptr<Pool> pool_;
    std::vector<QueryTile> tiles_;
    Workspace workspace_{};
    // All of the workspace in one piece, so that it lies in huge pages though its parts are small.
    Buffer workspace_memory_;
    size_t workspace_rows_ = 0;
};

}  // namespace octavo
