// One step of a model: embedding, attention and feed-forward operations, and the head.
//
// Owns the order of the computation and how it is divided among threads. It must not know sampling or where a batch
// came from. Each row's result is a fixed sequence of operations that depends on nothing but its sequence's tokens:
// sums over inputs run in the order of the inputs, attention runs over tiles of sixteen positions and corrects its
// softmax every sixteen tiles, both counted from the sequence's first token.
#pragma once

#include "attention.hpp"
#include "parts.hpp"
#include "plan.hpp"
#include "products.hpp"
#include "simd.hpp"

extern "C" {
float cosf(float);
float sinf(float);
}

namespace octavo {
namespace {

// ---- Rows ----------------------------------------------------------------------------------------------------------

void embed_bfloat16(const Panels& table, int64_t token_id, float* hidden) {
    const char* from = table.data + token_id / kPanelColumns * table.panel_bytes + token_id % kPanelColumns * 4;
    for (int pair = 0; pair < table.num_groups; ++pair) {
        const uint32_t bits = load_as<uint32_t>(from + (ptrdiff_t)pair * kPanelColumns * 4);
        hidden[2 * pair] = bit_cast<float>(bits << 16);
        hidden[2 * pair + 1] = bit_cast<float>(bits & 0xffff0000u);
    }
}

// Rotates a row of the table back: the rotation is its own inverse.
void embed_int8(const Panels& table, int64_t token_id, const Shape& shape, float* hidden) {
    constexpr int kGroups = kRotatedInputs / 4;
    const int panel = (int)(token_id / kPanelColumns), column = (int)(token_id % kPanelColumns);
    const float scale = scales_of(table, panel)[column] * kRotationScale;
    const char* from = table.data + panel * table.panel_bytes + column * 4;
    for (int first = 0; first < shape.hidden_stride; first += kRotatedInputs) {
        alignas(64) float values[kRotatedInputs];
        for (int group = 0; group < kGroups; ++group)
            for (int i = 0; i < 4; ++i)
                values[4 * group + i] =
                    (float)((uint8_t)from[(ptrdiff_t)(first / 4 + group) * kPanelColumns * 4 + i] - 128) * scale;
        Block block;
        for (int i = 0; i < kRotatedInputs / kLanes; ++i) block[i] = load(values + i * kLanes);
        rotate(block);
        for (int i = 0; i < kRotatedInputs / kLanes; ++i) store(values + i * kLanes, block[i]);
        const int count = at_most(shape.hidden_size - first, kRotatedInputs);
        for (int i = 0; i < at_most(shape.hidden_stride - first, kRotatedInputs); ++i)
            hidden[first + i] = i < count ? values[i] : 0.0f;
    }
}

void embed_row(const Model& model, int64_t token_id, float* hidden) {
    if (model.embedding.type == ValueType::kInt8)
        embed_int8(model.embedding, token_id, model.shape, hidden);
    else
        embed_bfloat16(model.embedding, token_id, hidden);
    if (model.embedding_scale != 1.0f)
        for (int i = 0; i < model.shape.hidden_stride; ++i) hidden[i] *= model.embedding_scale;
}

void rotation_of(const Model& model, int rotation, int64_t position, float* cosines) {
    const int half = model.shape.head_dim / 2;
    const float* frequencies = model.frequencies + (ptrdiff_t)rotation * half;
    const float amplitude = model.amplitudes[rotation];
    for (int i = 0; i < half; ++i) {
        const float angle = (float)position * frequencies[i];
        cosines[i] = cosf(angle) * amplitude;
        cosines[half + i] = sinf(angle) * amplitude;
    }
}

// What `size` values, which may be followed by zeros up to `stride`, are multiplied by to be normed.
OCTAVO_INLINE Vec norm_scale_of(const float* from, int size, int stride, float eps) {
    Vec squares = zero();
    for (int i = 0; i < stride; i += kLanes) {
        const Vec values = load(from + i);
        squares = fma(values, values, squares);
    }
    return splat(1.0f / __builtin_sqrtf(sum_of(squares) / (float)size + eps));
}

// Rounds rows of `stride` bfloat16 values that a thread has to itself, for a weight that is int8.
void quantize_rows(const Step& step, int thread, const Panels& weight, const bf16* rows, int stride, Range range) {
    if (weight.type != ValueType::kInt8) return;
    const Workspace& work = *step.workspace;
    float* rotated = (float*)(work.scratch + thread * work.scratch_stride);
    for (int row = range.first; row < range.end; ++row)
        quantize_row(rows + (ptrdiff_t)row * stride, stride, num_inputs_of(weight), rotated,
                     work.quantized + row * quantized_stride(weight));
}

// The same for all rows of a step, when all threads are done with them and before any goes on.
void share_quantized_rows(const Step& step, int thread, const Panels& weight, const bf16* rows, int stride) {
    if (weight.type != ValueType::kInt8) return;
    quantize_rows(step, thread, weight, rows, stride,
                  share_of(step.batch->num_tokens, thread, step.team->num_threads()));
    step.team->barrier();
}

void norm_row(const Shape& shape, const float* hidden, const float* weight, bf16* normed) {
    const Vec scale = norm_scale_of(hidden, shape.hidden_size, shape.hidden_stride, shape.rms_norm_eps);
    for (int i = 0; i < shape.hidden_stride; i += kLanes)
        store_bf16(normed + i, load(hidden + i) * scale * load(weight + i));
}

// Normalizes rows as inputs of the weight `next`.
void norm_rows(const Step& step, int thread, const float* weight, const Panels& next) {
    const Shape& shape = step.model->shape;
    const Range rows = share_of(step.batch->num_tokens, thread, step.team->num_threads());
    for (int row = rows.first; row < rows.end; ++row) {
        const ptrdiff_t offset = (ptrdiff_t)row * shape.hidden_stride;
        norm_row(shape, step.workspace->hidden + offset, weight, step.workspace->normed + offset);
    }
    quantize_rows(step, thread, next, step.workspace->normed, shape.hidden_stride, rows);
}

// Adds what an operation produced to the residual stream. Each thread has the rows that it norms next.
void add_normed_rows(const Step& step, int thread, const float* weight) {
    const Shape& shape = step.model->shape;
    const Range rows = share_of(step.batch->num_tokens, thread, step.team->num_threads());
    for (int row = rows.first; row < rows.end; ++row) {
        const float* produced = step.workspace->produced + (ptrdiff_t)row * shape.hidden_stride;
        float* hidden = step.workspace->hidden + (ptrdiff_t)row * shape.hidden_stride;
        const Vec scale = norm_scale_of(produced, shape.hidden_size, shape.hidden_stride, shape.rms_norm_eps);
        for (int i = 0; i < shape.hidden_stride; i += kLanes)
            store(hidden + i, load(hidden + i) + load(produced + i) * scale * load(weight + i));
    }
}

// ---- Epilogues -----------------------------------------------------------------------------------------------------

// Rotates queries and keys, keeps queries for the step and writes keys and values into the cache. Queries and keys
// that are normed first wait until their heads are complete.
struct WriteHeads {
    const Step& step;
    const Operation& operation;

    OCTAVO_INLINE void operator()(int row, int panel, Vec left, Vec right) const {
        const Shape& shape = step.model->shape;
        const int panels_per_head = shape.head_dim / kPanelColumns, half = shape.head_dim / 2;
        const int head = panel / panels_per_head, part = panel % panels_per_head;
        if (operation.first_bias) {
            left = left + load(operation.first_bias + panel * kPanelColumns);
            right = right + load(operation.first_bias + panel * kPanelColumns + kLanes);
        }
        if (head >= shape.num_heads + shape.num_kv_heads) {
            write_values(row, head - shape.num_heads - shape.num_kv_heads, part * kPanelColumns, left, right);
            return;
        }
        if (!operation.query_norm) return write_rotated(row, head, part, left, right);
        float* waiting = head_at(row, head) + part * kLanes;
        store(waiting, left);
        store(waiting + half, right);
    }

    // Takes a head that waited.
    OCTAVO_INLINE void norm_head(int row, int head) const {
        const Shape& shape = step.model->shape;
        const int half = shape.head_dim / 2;
        const float* from = head_at(row, head);
        const float* weight = head < shape.num_heads ? operation.query_norm : operation.key_norm;
        const Vec scale = norm_scale_of(from, shape.head_dim, shape.head_dim, shape.rms_norm_eps);
        for (int i = 0; i < half; i += kLanes)
            write_rotated(row, head, i / kLanes, load(from + i) * scale * load(weight + i),
                          load(from + half + i) * scale * load(weight + half + i));
    }

    OCTAVO_INLINE float* head_at(int row, int head) const {
        const Shape& shape = step.model->shape;
        return step.workspace->heads +
               ((ptrdiff_t)row * (shape.num_heads + shape.num_kv_heads) + head) * shape.head_dim;
    }

    OCTAVO_INLINE void write_rotated(int row, int head, int part, Vec left, Vec right) const {
        const Shape& shape = step.model->shape;
        const int half = shape.head_dim / 2;
        const float* cosines =
            step.workspace->rotation +
            ((ptrdiff_t)operation.rotation * step.batch->num_tokens + row) * shape.head_dim + part * kLanes;
        const Vec cosine = load(cosines), sine = load(cosines + half);
        const Vec low = left * cosine - right * sine, high = right * cosine + left * sine;
        const int first = part * kLanes;
        if (head < shape.num_heads) {
            bf16* query = step.workspace->queries + ((ptrdiff_t)row * shape.num_heads + head) * shape.head_dim;
            store_bf16(query + first, low);
            store_bf16(query + half + first, high);
        } else {
            write_keys(row, head - shape.num_heads, first, low);
            write_keys(row, head - shape.num_heads, half + first, high);
        }
    }

    OCTAVO_INLINE bf16* tile(int64_t slot, int kv_head) const {
        const Shape& shape = step.model->shape;
        return operation.cache + (slot / kTileTokens * shape.num_kv_heads + kv_head) * 2 * kTileTokens * shape.head_dim;
    }

    OCTAVO_INLINE void write_keys(int row, int kv_head, int first, Vec keys) const {
        const int64_t slot = step.batch->slot_mapping[row];
        bf16* to = tile(slot, kv_head) + first * kTileTokens + slot % kTileTokens * 2;
        alignas(64) bf16 rounded[kLanes];
        store_bf16(rounded, keys);
        for (int i = 0; i < kLanes; i += 2) __builtin_memcpy(to + i * kTileTokens, rounded + i, 4);
    }

    OCTAVO_INLINE void write_values(int row, int kv_head, int first, Vec left, Vec right) const {
        const int64_t slot = step.batch->slot_mapping[row];
        const int head_dim = step.model->shape.head_dim, token = (int)(slot % kTileTokens);
        bf16* to = tile(slot, kv_head) + kTileTokens * head_dim + (token / 2 * head_dim + first) * 2 + token % 2;
        alignas(64) bf16 rounded[2 * kLanes];
        store_bf16(rounded, left);
        store_bf16(rounded + kLanes, right);
        for (int i = 0; i < 2 * kLanes; ++i) to[2 * i] = rounded[i];
    }
};

// Writes what an operation produces, added to `residual` unless that is null.
struct WriteProduced {
    const float* residual;
    float* produced;
    int stride;
    const float* bias;

    OCTAVO_INLINE void operator()(int row, int panel, Vec left, Vec right) const {
        const ptrdiff_t first = (ptrdiff_t)row * stride + panel * kPanelColumns;
        if (bias) {
            left = left + load(bias + panel * kPanelColumns);
            right = right + load(bias + panel * kPanelColumns + kLanes);
        }
        if (residual) {
            left = load(residual + first) + left;
            right = load(residual + first + kLanes) + right;
        }
        store(produced + first, left);
        store(produced + first + kLanes, right);
    }
};

struct WriteGated {
    bf16* inner;
    int stride;
    Activation activation;

    OCTAVO_INLINE void operator()(int row, int panel, Vec gate, Vec up) const {
        const Vec opened = activation == Activation::kSilu ? silu(gate) : gelu_tanh(gate);
        store_bf16(inner + (ptrdiff_t)row * stride + panel * kLanes, opened * up);
    }
};

struct WriteColumns {
    float* rows;
    int num_columns;
    int stride;

    OCTAVO_INLINE void operator()(int row, int panel, Vec left, Vec right) const {
        const int first = panel * kPanelColumns, count = at_most(num_columns - first, kPanelColumns);
        float* to = rows + (ptrdiff_t)row * stride + first;
        if (count == kPanelColumns) {
            store(to, left);
            store(to + kLanes, right);
            return;
        }
        alignas(64) float columns[kPanelColumns];
        store(columns, left);
        store(columns + kLanes, right);
        for (int i = 0; i < count; ++i) to[i] = columns[i];
    }
};

// ---- The step ------------------------------------------------------------------------------------------------------

void begin_rows(const Step& step, int thread) {
    const Model& model = *step.model;
    const Range rows = share_of(step.batch->num_tokens, thread, step.team->num_threads());
    for (int row = rows.first; row < rows.end; ++row) {
        embed_row(model, step.batch->token_ids[row],
                  step.workspace->hidden + (ptrdiff_t)row * model.shape.hidden_stride);
        for (int rotation = 0; rotation < model.num_rotations; ++rotation)
            rotation_of(model, rotation, step.batch->positions[row],
                        step.workspace->rotation +
                            ((ptrdiff_t)rotation * step.batch->num_tokens + row) * model.shape.head_dim);
    }
}

// Heads, not rows, are divided, because a single row has several.
void norm_heads(const Step& step, int thread, const Operation& operation) {
    const Shape& shape = step.model->shape;
    const int heads_per_row = shape.num_heads + shape.num_kv_heads;
    const Range heads = share_of(step.batch->num_tokens * heads_per_row, thread, step.team->num_threads());
    const WriteHeads write{step, operation};
    for (int index = heads.first; index < heads.end; ++index)
        write.norm_head(index / heads_per_row, index % heads_per_row);
}

void run_operation(const Step& step, int index, int thread) {
    const Operation& operation = step.model->operations[index];
    const Shape& shape = step.model->shape;
    const Workspace& work = *step.workspace;
    const int phase = 3 * index, num_tokens = step.batch->num_tokens;
    float* produced = operation.norm_after ? work.produced : work.hidden;
    const float* residual = operation.norm_after ? nullptr : work.hidden;
    // What a rank produces is a part of a sum.
    const WriteProduced write = step.collective ? WriteProduced{nullptr, step.collective->part_to_write(),
                                                                shape.hidden_stride, operation.second_bias}
                                                : WriteProduced{residual, produced, shape.hidden_stride,
                                                                operation.second_bias};
    norm_rows(step, thread, operation.norm, operation.first);
    step.team->barrier();
    if (operation.kind == OperationKind::kAttention) {
        multiply(step, phase, thread, operation.first, work.normed, shape.hidden_stride, num_tokens,
                 WriteHeads{step, operation});
        step.team->barrier();
        if (operation.query_norm) {
            norm_heads(step, thread, operation);
            step.team->barrier();
        }
        attend(step, phase + 1, thread, operation);
        step.team->barrier();
        const int heads_stride = shape.num_heads * shape.head_dim;
        share_quantized_rows(step, thread, operation.second, work.attended, heads_stride);
        multiply(step, phase + 2, thread, operation.second, work.attended, heads_stride, num_tokens, write);
    } else {
        const int inner_stride = operation.first.num_panels * kLanes;
        multiply(step, phase, thread, operation.first, work.normed, shape.hidden_stride, num_tokens,
                 WriteGated{work.inner, inner_stride, operation.activation});
        step.team->barrier();
        share_quantized_rows(step, thread, operation.second, work.inner, inner_stride);
        multiply(step, phase + 2, thread, operation.second, work.inner, inner_stride, num_tokens, write);
    }
    if (step.collective)
        add_parts(step, thread, residual, produced);
    else
        step.team->barrier();
    if (operation.norm_after) add_normed_rows(step, thread, operation.norm_after);
}

// Looking at every row, not only at those that are sampled, finds a fault in the step in which it is cached.
void end_rows(const Step& step, int thread) {
    const Shape& shape = step.model->shape;
    const int num_threads = step.team->num_threads();
    const Range rows = share_of(step.batch->num_tokens, thread, num_threads);
    for (int row = rows.first; row < rows.end; ++row) {
        Vec total = zero();
        const float* hidden = step.workspace->hidden + (ptrdiff_t)row * shape.hidden_stride;
        // A value that is not finite gives a difference that is not a number.
        for (int i = 0; i < shape.hidden_stride; i += kLanes) total = total + (load(hidden + i) - load(hidden + i));
        step.batch->is_finite[row] = sum_of(total) == 0.0f;
    }
}

// The logits of the batch's rows to sample, from the residual stream.
void run_head(const Step& step, int thread) {
    const Model& model = *step.model;
    const Shape& shape = model.shape;
    const Range sampled = share_of(step.batch->num_sampled_rows, thread, step.team->num_threads());
    for (int index = sampled.first; index < sampled.end; ++index)
        norm_row(shape, step.workspace->hidden + step.batch->sampled_rows[index] * shape.hidden_stride,
                 model.final_norm, step.workspace->normed + (ptrdiff_t)index * shape.hidden_stride);
    quantize_rows(step, thread, model.head, step.workspace->normed, shape.hidden_stride, sampled);
    step.team->barrier();
    if (step.batch->num_sampled_rows)
        multiply(step, 3 * model.num_operations, thread, model.head, step.workspace->normed, shape.hidden_stride,
                 step.batch->num_sampled_rows,
                 WriteColumns{step.batch->logits + model.head_first, model.head_count, shape.vocab_size});
    end_products();
    // All ranks write their columns into the same rows.
    if (step.collective) meet_ranks(step, thread);
}

void run_step(const Step& step, int thread) {
    const Model& model = *step.model;
    begin_rows(step, thread);
    step.team->barrier();
    for (int index = 0; index < model.num_operations && !is_broken(step); ++index) run_operation(step, index, thread);
    // A row to sample may have been finished by another thread than the one that norms it.
    if (step.collective || (model.num_operations && model.operations[model.num_operations - 1].norm_after))
        step.team->barrier();
    end_rows(step, thread);
    run_head(step, thread);
}

void multiply_all_rows(const Step& step, int thread, const Panels& weight, const bf16* rows, int stride, float* to,
                       int num_columns) {
    share_quantized_rows(step, thread, weight, rows, stride);
    multiply(step, 0, thread, weight, rows, stride, step.batch->num_tokens, WriteColumns{to, num_columns, num_columns});
    end_products();
}

// ---- Probes --------------------------------------------------------------------------------------------------------

float read_memory(const char* from, size_t num_bytes) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    for (size_t offset = 0; offset + 256 <= num_bytes; offset += 256)
        unroll<4>([&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            prefetch(from + offset + 64 * i + 4096);
            sums[i] = sums[i] + load((const float*)(from + offset + 64 * i));
        });
    return sum_of(sums[0] + sums[1] + sums[2] + sums[3]);
}

#if defined(OCTAVO_AMX)
template <class Groups>
double multiply_groups_in_registers(int num_rounds, float* sink) {
    alignas(64) float sums[kTileRows * kLanes];
    begin_products();
    unroll<8>([&](auto tile) __attribute__((always_inline)) { clear_tile<decltype(tile)::value>(); });
    for (int round = 0; round < num_rounds; ++round) {
        add_tile_products<Groups, 0, 4, 6>();
        add_tile_products<Groups, 1, 4, 7>();
        add_tile_products<Groups, 2, 5, 6>();
        add_tile_products<Groups, 3, 5, 7>();
    }
    store_tile<0>(sums, kTileLineBytes);
    end_products();
    *sink = sums[0];
    return 2.0 * kSumTiles * kTileRows * kLanes * kTileGroups * Groups::kInputs * num_rounds;
}
#else
template <class Groups>
double multiply_groups_in_registers(int num_rounds, float* sink) {
    constexpr int kColumns = kIsWide ? 2 : 1;
    typename Groups::Sum sums[kMaxRows][kColumns];
    alignas(64) const bf16 ones[2 * kLanes] = {0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
    unroll<kMaxRows>([&](auto row) __attribute__((always_inline)) {
        unroll<kColumns>([&](auto column) __attribute__((always_inline)) {
            sums[decltype(row)::value][decltype(column)::value] = {};
        });
    });
    const typename Groups::Columns columns = Groups::load((const char*)ones);
    const typename Groups::Input input = Groups::splat((const char*)ones);
    for (int round = 0; round < num_rounds; ++round)
        unroll<kMaxRows>([&](auto row) __attribute__((always_inline)) {
            unroll<kColumns>([&](auto column) __attribute__((always_inline)) {
                Groups::add(sums[decltype(row)::value][decltype(column)::value], columns, input);
            });
        });
    // Constant indices again: an array that a loop runs over would live in memory.
    float total = 0.0f;
    unroll<kMaxRows>([&](auto row) __attribute__((always_inline)) {
        unroll<kColumns>([&](auto column) __attribute__((always_inline)) {
            total += (float)sum_of(sums[decltype(row)::value][decltype(column)::value]);
        });
    });
    *sink = total;
    return 2.0 * Groups::kInputs * kLanes * kMaxRows * kColumns * num_rounds;
}
#endif

double multiply_in_registers(ValueType type, int num_rounds, float* sink) {
    return type == ValueType::kInt8 ? multiply_groups_in_registers<Int8Quads>(num_rounds, sink)
                                    : multiply_groups_in_registers<Bfloat16Pairs>(num_rounds, sink);
}

constexpr Kernels kernels_of(const char* name) {
    return {name, run_step, run_head, multiply_all_rows, read_memory, multiply_in_registers};
}

}  // namespace
}  // namespace octavo
