// What a step consists of: a model as a list of operations over packed weights, a batch, and memory to work in.
//
// Owns the plain structures that all units share. They hold no code that a unit could compile for its own processor.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

using bf16 = uint16_t;

constexpr int kPanelColumns = 32;
constexpr int kTileTokens = 16;  // tokens of the KV cache that are scored together
constexpr int kMaxRowsAtOnce = 32;  // rows that a kernel may read together, whether they exist or not
constexpr int kChunkTiles = 16;  // tiles between two corrections of the softmax
constexpr int kRowsTogether = 16;  // of queries in attention
// Scores are computed for up to eight tiles at once; of the last ones some may lie beyond a chunk.
constexpr int kScoreSlack = 8 * kTileTokens;

constexpr int kRotatedInputs = 64;  // inputs that an int8 weight mixes, and the multiple to which its rows are padded

enum class ValueType { kBfloat16, kInt8 };

// A weight in panels of 32 columns: [num_panels] of [num_groups][32] groups of inputs, so that a group of sixteen
// columns is one vector. A group has 4 bytes. In bfloat16 it is a pair of inputs. In int8 it is a quad of rotated inputs
// with 128 added, and the panel's 32 scales (float) follow the groups: column = scale * (values - 128).
struct Panels {
    const char* data;
    int num_panels;
    int num_groups;
    ptrdiff_t panel_bytes;
    ValueType type;
};

// What follows the values of a row of rotated int8 values: row = scale * values.
struct RowScale {
    float scale;
    int32_t sum;  // of the values
};
constexpr int kQuantizedRowEnd = 64;  // bytes for it, so that rows are aligned

enum class OperationKind { kAttention, kFeedForward };

enum class Activation { kSilu, kGeluTanh };

// Pointers to what a model lacks are null. Biases are in the order of their panels' columns.
struct Operation {
    OperationKind kind;
    const float* norm;
    Panels first;   // attention: queries, keys and values; feed-forward: gates and ups, sixteen of each to a panel
    Panels second;  // back into the residual stream
    const float* second_bias;
    const float* norm_after;  // of what is added to the residual stream
    // Feed-forward.
    Activation activation;
    // Attention.
    const float* first_bias;
    const float* query_norm;  // [head_dim], of each head before it is rotated; with it there is a key_norm
    const float* key_norm;
    int rotation;  // which of the model's
    int window;    // how many of the last tokens a token sees, itself included; none when it is 0
    float softmax_scale;
    // [num_blocks][block_size / 16][num_kv_heads] tiles of keys [head_dim / 2][16][2] and then values
    // [8][head_dim][2].
    bf16* cache;
};

struct Shape {
    int hidden_size;
    int hidden_stride;  // padded to whole panels; the padding holds zeros
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int vocab_size;
    int block_size;
    float rms_norm_eps;
};

struct Model {
    Shape shape;
    const Operation* operations;
    int num_operations;
    Panels embedding;
    float embedding_scale;  // of what comes in, not of a head with the same weight
    const float* final_norm;
    Panels head;
    int head_first;  // the token of its first column
    int head_count;  // tokens whose logits it gives: the vocabulary, or a rank's share of it
    int num_rotations;
    const float* frequencies;  // [num_rotations][head_dim / 2]
    const float* amplitudes;   // [num_rotations]: what cosines and sines are multiplied by
};

// Queries of one sequence that lie in one tile of positions, so that all see the same number of tiles.
struct QueryTile {
    int sequence;
    int first_row;
    int num_queries;
    int first_position;
};

struct Batch {
    int num_tokens;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slot_mapping;
    const int32_t* block_tables;  // [num_sequences][max_blocks]
    int max_blocks;
    const QueryTile* tiles;
    int num_tiles;
    const int64_t* sampled_rows;
    int num_sampled_rows;
    float* logits;        // [num_sampled_rows][vocab_size]
    uint8_t* is_finite;   // [num_tokens]
};

struct Workspace {
    float* hidden;     // [num_tokens][hidden_stride]: the residual stream
    bf16* normed;      // [num_tokens][hidden_stride]
    bf16* queries;     // [num_tokens][num_heads * head_dim]
    bf16* attended;    // the same
    bf16* inner;       // [num_tokens][inner stride of the operation]
    char* quantized;   // [num_tokens][stride of the weight]: the inputs of an int8 weight and their scale
    float* rotation;   // [num_rotations][num_tokens][2][head_dim / 2]: cosines and sines
    float* heads;      // [num_tokens][num_heads + num_kv_heads][head_dim]: queries and keys before they are normed
    float* produced;   // [num_tokens][hidden_stride]: what an operation adds, before it is normed
    char* scratch;     // [num_threads][scratch_stride]
    size_t scratch_stride;
    size_t inputs_offset;  // where in its scratch a thread keeps inputs that it makes for itself
};

// A part of a step: some items that may be computed in any order, when all items before them are done. Items are counted
// on from phase to phase and from step to step.
struct Phase {
    uint64_t first, end;
    int64_t started;  // when this thread came here, on the team's clock
};

struct Range {
    int first, end;
};

// How many items of a phase threads begin with: a share each of whole grains, one behind the other.
struct Shares {
    uint64_t num_items;
    int grain, num_threads;

    uint64_t first_of(int thread) const {
        const uint64_t num_grains = (num_items + (uint64_t)grain - 1) / (uint64_t)grain;
        const uint64_t first = num_grains * (uint64_t)thread / (uint64_t)num_threads * (uint64_t)grain;
        return first < num_items ? first : num_items;
    }

    // Where the share ends that this item is in.
    int end_beyond(int item) const {
        int thread = 1;
        while (thread < num_threads && first_of(thread) <= (uint64_t)item) ++thread;
        return (int)first_of(thread);
    }
};

// Memory that a thread will read, and fetches into its second-level cache while it waits for others.
struct Ahead {
    const char *from = nullptr, *end = nullptr;

    void ask_for_some() {
        constexpr int kLinesAtOnce = 8, kLineBytes = 64;
        for (int line = 0; line < kLinesAtOnce && from < end; ++line, from += kLineBytes)
            __builtin_prefetch(from, 0, 2);
    }
};

// Threads that run a step together. A phase ends when its items are done, whoever did them: while the system runs
// something else in the place of one thread, the others take all items that it has not claimed, and after a while
// compute those that it has. Each result is written once, by the thread that takes the item.
class Team {
   public:
    virtual ~Team() = default;
    virtual int num_threads() const = 0;
    // The number of the first item of the work that is under way.
    virtual uint64_t first_item() const = 0;
    virtual int64_t now() const = 0;
    // Returns some of the phase's items that nobody has claimed, counted from its first and more than one where `grain`
    // says so and there are many; none when there are none left. Each thread has a share of the items, the same in
    // phases of like items, and comes to those of others when its own are claimed.
    virtual Range claim(const Phase& phase, int thread, int grain) = 0;
    virtual bool is_taken(const Phase& phase, int item) const = 0;
    // Whether the caller writes the results of an item: of all who have computed them one does.
    virtual bool take(const Phase& phase, int item) = 0;
    // Says that the results of `count` taken items are written.
    virtual void finish(int thread, int count) = 0;
    virtual bool is_over(const Phase& phase) const = 0;
    // Waits as long as others may well need; whether the phase is over.
    virtual bool wait_for_others(const Phase& phase, Ahead& ahead) const = 0;
    // Returns when the phase is over.
    virtual void wait(const Phase& phase) const = 0;
};

class Collective;

struct Step {
    const Model* model;
    const Batch* batch;
    const Workspace* workspace;
    Team* team;
    Collective* collective = nullptr;  // where ranks meet that hold a part of the model each
};

// What one instruction set offers.
struct Kernels {
    const char* name;
    void (*run_step)(const Step& step, int thread);
    // The end of a step alone, for other rows of the same batch.
    void (*run_head)(const Step& step, int thread);
    // Maps the rows of the batch, of `stride` values, by one weight into `to` [num_tokens][num_columns].
    void (*multiply_rows)(const Step& step, int thread, const Panels& weight, const bf16* rows, int stride, float* to,
                          int num_columns);
    // Reads memory once; the sum keeps the compiler from leaving the reads out.
    float (*read_memory)(const char* from, size_t num_bytes, bool over_pages);
    // Multiplies values of this type without touching memory; returns how many operations that were.
    double (*multiply_in_registers)(ValueType type, int num_rounds, float* sink);
};

const Kernels& portable_kernels();
#if defined(OCTAVO_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace octavo
