// One step of a model: embedding, attention and feed-forward operations, and the head.
//
// Owns the order of the computation and its division into phases. It must not know sampling or where a batch came from. Each row's result is a fixed sequence of operations that depends on nothing but its sequence's tokens:
// sums over inputs run in the order of the inputs, attention runs over tiles of sixteen positions and corrects its
// softmax every sixteen tiles, both counted from the sequence's first token.
#pragma once

#include "attention.hpp"
#include "parts.hpp"
#include "phases.hpp"
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

void norm_row(const Shape& shape, const float* hidden, const float* weight, InputRow normed) {
    const Vec scale = norm_scale_of(hidden, shape.hidden_size, shape.hidden_stride, shape.rms_norm_eps);
    for (int i = 0; i < shape.hidden_stride; i += kLanes)
        store_bf16(normed.value(i), load(hidden + i) * scale * load(weight + i));
}

// ---- Inputs of products ---------------------------------------------------------------------------------------------

// As many rows each thread prepares for itself before it multiplies them: it takes less time than to meet the others.
constexpr int kOwnRows = 4;

ptrdiff_t input_stride_of(const Panels& weight, int row_stride) {
    return weight.type == ValueType::kInt8 ? quantized_stride(weight) : row_stride * (ptrdiff_t)sizeof(bf16);
}

float* rotated_scratch(const Workspace& work, int thread) {
    return (float*)(work.scratch + thread * work.scratch_stride);
}

// Maps what rows of the residual stream are when they are normed; `rows` names them, or is null for all in their order.
template <class Epilogue>
void multiply_normed(const Step& step, Walk& walk, const Panels& weight, const float* norm, const int64_t* rows,
                     int num_rows, Epilogue epilogue) {
    const Shape& shape = step.model->shape;
    const Workspace& work = *step.workspace;
    const bool is_int8 = weight.type == ValueType::kInt8;
    const int stride = shape.hidden_stride;
    const ptrdiff_t input_stride = input_stride_of(weight, stride);
    // Makes one row of inputs.
    const auto make_row = [&](int index, bf16* all_normed, char* all_quantized) {
        const ptrdiff_t row = rows ? rows[index] : index;
        const InputRow normed = input_row(all_normed, index, stride * (ptrdiff_t)sizeof(bf16));
        norm_row(shape, work.hidden + row * stride, norm, normed);
        if (is_int8)
            quantize_row(normed, stride, num_inputs_of(weight), rotated_scratch(work, walk.thread),
                         input_row(all_quantized, index, input_stride));
    };
    if (num_rows > kOwnRows) {
        run_short_items(walk, num_rows, [&](int index) { make_row(index, work.normed, work.quantized); });
        const char* inputs = is_int8 ? work.quantized : (const char*)work.normed;
        multiply(walk, weight, [=] { return inputs; }, input_stride, num_rows, epilogue);
        return;
    }
    char* own = work.scratch + walk.thread * work.scratch_stride + work.inputs_offset;
    bf16* normed = (bf16*)own;
    char* quantized = own + kMaxRowsAtOnce * stride * (ptrdiff_t)sizeof(bf16);
    multiply(
        walk, weight,
        [&] {
            for (int index = 0; index < num_rows; ++index) make_row(index, normed, quantized);
            return is_int8 ? (const char*)quantized : own;
        },
        input_stride, num_rows, epilogue);
}

// Maps all rows of a step, which lie in memory as `InputRow` says.
template <class Epilogue>
void multiply_rows_of(const Step& step, Walk& walk, const Panels& weight, const bf16* rows, int stride,
                      Epilogue epilogue) {
    const Workspace& work = *step.workspace;
    const int num_rows = step.batch->num_tokens;
    const ptrdiff_t input_stride = input_stride_of(weight, stride);
    if (weight.type != ValueType::kInt8) {
        multiply(walk, weight, [=] { return (const char*)rows; }, input_stride, num_rows, epilogue);
        return;
    }
    const auto quantize = [&](int row, char* to) {
        quantize_row(input_row(rows, row, stride * (ptrdiff_t)sizeof(bf16)), stride, num_inputs_of(weight),
                     rotated_scratch(work, walk.thread), input_row(to, row, input_stride));
    };
    if (num_rows > kOwnRows) {
        run_short_items(walk, num_rows, [&](int row) { quantize(row, work.quantized); });
        multiply(walk, weight, [&] { return (const char*)work.quantized; }, input_stride, num_rows, epilogue);
        return;
    }
    char* own = work.scratch + walk.thread * work.scratch_stride + work.inputs_offset;
    multiply(
        walk, weight,
        [&] {
            for (int row = 0; row < num_rows; ++row) quantize(row, own);
            return (const char*)own;
        },
        input_stride, num_rows, epilogue);
}

// Adds what an operation produced to the residual stream.
void add_normed_rows(const Step& step, Walk& walk, const float* weight) {
    const Shape& shape = step.model->shape;
    run_short_items(walk, step.batch->num_tokens, [&](int row) {
        const float* produced = step.workspace->produced + (ptrdiff_t)row * shape.hidden_stride;
        float* hidden = step.workspace->hidden + (ptrdiff_t)row * shape.hidden_stride;
        const Vec scale = norm_scale_of(produced, shape.hidden_size, shape.hidden_stride, shape.rms_norm_eps);
        for (int i = 0; i < shape.hidden_stride; i += kLanes)
            store(hidden + i, load(hidden + i) + load(produced + i) * scale * load(weight + i));
    });
}

// ---- Epilogues -----------------------------------------------------------------------------------------------------

// An epilogue's `of_panel(panel)` is a function of a row and what comes out of it, two vectors of the panel's columns. All
// that does not depend on the row it holds as values: what lies in memory would be read again for each row, since the
// compiler cannot know that no row is written over it.

// Sixteen values of the first half of a head and those of the second that they are rotated with.
struct RotatedPart {
    const float* cosines;  // [num_tokens][head_dim], from the part's first value on; the sines half a row further
    int head_dim;

    OCTAVO_INLINE RotatedPart(const Step& step, const Operation& operation, int part)
        : cosines(step.workspace->rotation +
                  (ptrdiff_t)operation.rotation * step.batch->num_tokens * step.model->shape.head_dim + part * kLanes),
          head_dim(step.model->shape.head_dim) {}

    OCTAVO_INLINE void rotate(int row, Vec& left, Vec& right) const {
        const float* of_row = cosines + (ptrdiff_t)row * head_dim;
        const Vec cosine = load(of_row), sine = load(of_row + head_dim / 2);
        const Vec low = left * cosine - right * sine, high = right * cosine + left * sine;
        left = low;
        right = high;
    }
};

// Where the keys and values of a KV head go.
struct CachedHead {
    bf16* tiles;  // of the cache's first slots
    ptrdiff_t tile_stride;
    int head_dim;
    const int64_t* slots;  // of rows
    int last_row;

    OCTAVO_INLINE CachedHead(const Step& step, const Operation& operation, int kv_head)
        : tiles(operation.cache + (ptrdiff_t)kv_head * 2 * kTileTokens * step.model->shape.head_dim),
          tile_stride((ptrdiff_t)step.model->shape.num_kv_heads * 2 * kTileTokens * step.model->shape.head_dim),
          head_dim(step.model->shape.head_dim),
          slots(step.batch->slot_mapping),
          last_row(step.batch->num_tokens - 1) {}

    // Writes sixteen keys of a row, from the `first` on.
    OCTAVO_INLINE void write_keys(int row, int first, Vec keys) const {
        const int64_t slot = slots[row], ahead = slot_ahead(row);
        if (ahead / kTileTokens != slot / kTileTokens)
            for (int i = 0; i < kLanes; i += 2) prefetch_to_write(keys_at(ahead, first) + i * kTileTokens);
        bf16* to = keys_at(slot, first);
        alignas(64) bf16 rounded[kLanes];
        store_bf16(rounded, keys);
        for (int i = 0; i < kLanes; i += 2) __builtin_memcpy(to + i * kTileTokens, rounded + i, 4);
    }

    OCTAVO_INLINE void write_values(int row, int first, Vec left, Vec right) const {
        const int64_t slot = slots[row], ahead = slot_ahead(row);
        if (ahead / kTileTokens != slot / kTileTokens)
            for (int i = 0; i < 2 * kLanes; i += kLanes) prefetch_to_write(values_at(ahead, first) + 2 * i);
        bf16* to = values_at(slot, first);
        store_bf16_apart(to, slot % 2, left);
        store_bf16_apart(to + 2 * kLanes, slot % 2, right);
    }

   private:
    OCTAVO_INLINE bf16* tile(int64_t slot) const { return tiles + slot / kTileTokens * tile_stride; }

    OCTAVO_INLINE bf16* keys_at(int64_t slot, int first) const {
        return tile(slot) + first * kTileTokens + slot % kTileTokens * 2;
    }

    // Of the slot's pair of tokens.
    OCTAVO_INLINE bf16* values_at(int64_t slot, int first) const {
        const int pair = (int)(slot % kTileTokens) / 2;
        return tile(slot) + kTileTokens * head_dim + (pair * head_dim + first) * 2;
    }

    // Rows of a decode step go to a tile each, whose lines are far from any cache: they are fetched some rows before.
    OCTAVO_INLINE int64_t slot_ahead(int row) const {
        constexpr int kRowsAhead = 4;
        return slots[at_most(row + kRowsAhead, last_row)];
    }
};

// Of a head of queries, keys or values; queries have none.
OCTAVO_INLINE int kv_head_of(const Shape& shape, int head) {
    return head < shape.num_heads ? 0 : (head - shape.num_heads) % shape.num_kv_heads;
}

// Rotated queries, which wait for attention, or keys, which go into the cache.
struct RotatedHead {
    RotatedPart part;
    CachedHead cached;
    bf16* queries;  // [num_tokens][query_stride], from the part's first value on; null where the head has keys
    int query_stride;
    int first, half;

    OCTAVO_INLINE RotatedHead(const Step& step, const Operation& operation, int head, int part)
        : part(step, operation, part),
          cached(step, operation, kv_head_of(step.model->shape, head)),
          queries(head < step.model->shape.num_heads
                      ? step.workspace->queries + head * step.model->shape.head_dim + part * kLanes
                      : nullptr),
          query_stride(step.model->shape.num_heads * step.model->shape.head_dim),
          first(part * kLanes),
          half(step.model->shape.head_dim / 2) {}

    OCTAVO_INLINE void write(int row, Vec left, Vec right) const {
        part.rotate(row, left, right);
        if (queries) {
            bf16* to = queries + (ptrdiff_t)row * query_stride;
            store_bf16(to, left);
            store_bf16(to + half, right);
        } else {
            cached.write_keys(row, first, left);
            cached.write_keys(row, half + first, right);
        }
    }
};

// Queries and keys that are normed before they are rotated; they wait until their heads are complete.
OCTAVO_INLINE float* waiting_head(const Step& step, int row, int head) {
    const Shape& shape = step.model->shape;
    return step.workspace->heads + ((ptrdiff_t)row * (shape.num_heads + shape.num_kv_heads) + head) * shape.head_dim;
}

// Rotates queries and keys, keeps queries for the step and writes keys and values into the cache.
struct WriteHeads {
    const Step& step;
    const Operation& operation;

    enum class Kind { kRotated, kWaiting, kValues };

    struct OfPanel {
        Kind kind;
        const float* bias;
        RotatedHead rotated;
        int first_value;
        float* waiting;
        ptrdiff_t waiting_stride;

        OCTAVO_INLINE void operator()(int row, Vec left, Vec right) const {
            if (bias) {
                left = left + load(bias);
                right = right + load(bias + kLanes);
            }
            if (kind == Kind::kRotated) return rotated.write(row, left, right);
            if (kind == Kind::kValues) return rotated.cached.write_values(row, first_value, left, right);
            store(waiting + row * waiting_stride, left);
            store(waiting + row * waiting_stride + rotated.half, right);
        }
    };

    OCTAVO_INLINE OfPanel of_panel(int panel) const {
        const Shape& shape = step.model->shape;
        const int panels_per_head = shape.head_dim / kPanelColumns, heads_per_row = shape.num_heads + shape.num_kv_heads;
        const int head = panel / panels_per_head, part = panel % panels_per_head;
        const Kind kind = head >= heads_per_row ? Kind::kValues
                          : operation.query_norm ? Kind::kWaiting
                                                 : Kind::kRotated;
        return {kind,
                operation.first_bias ? operation.first_bias + panel * kPanelColumns : nullptr,
                RotatedHead(step, operation, head, part),
                part * kPanelColumns,
                kind == Kind::kWaiting ? waiting_head(step, 0, head) + part * kLanes : nullptr,
                (ptrdiff_t)heads_per_row * shape.head_dim};
    }
};

// Takes a head that waited.
void write_normed_head(const Step& step, const Operation& operation, int row, int head) {
    const Shape& shape = step.model->shape;
    const int half = shape.head_dim / 2;
    const float* from = waiting_head(step, row, head);
    const float* weight = head < shape.num_heads ? operation.query_norm : operation.key_norm;
    const Vec scale = norm_scale_of(from, shape.head_dim, shape.head_dim, shape.rms_norm_eps);
    for (int i = 0; i < half; i += kLanes)
        RotatedHead(step, operation, head, i / kLanes)
            .write(row, load(from + i) * scale * load(weight + i),
                   load(from + half + i) * scale * load(weight + half + i));
}

// Lines of many rows that are written far from one another come from another core or from memory: they are fetched while
// the rows before them are written.
constexpr int kRowsWrittenAhead = 16;

// Writes what an operation produces, added to `residual` unless that is null.
struct WriteProduced {
    const float* residual;
    float* produced;
    int stride;
    int last_row;
    const float* bias;

    OCTAVO_INLINE void operator()(int row, Vec left, Vec right) const {
        const ptrdiff_t first = (ptrdiff_t)row * stride;
        float* ahead = produced + (ptrdiff_t)at_most(row + kRowsWrittenAhead, last_row) * stride;
        prefetch_to_write(ahead);
        prefetch_to_write(ahead + kLanes);
        if (bias) {
            left = left + load(bias);
            right = right + load(bias + kLanes);
        }
        if (residual) {
            left = load(residual + first) + left;
            right = load(residual + first + kLanes) + right;
        }
        store(produced + first, left);
        store(produced + first + kLanes, right);
    }

    OCTAVO_INLINE WriteProduced of_panel(int panel) const {
        const int first = panel * kPanelColumns;
        return {residual ? residual + first : nullptr, produced + first, stride, last_row,
                bias ? bias + first : nullptr};
    }
};

struct WriteGated {
    bf16* inner;
    int stride;
    Activation activation;

    struct OfPanel {
        bf16* inner;
        ptrdiff_t row_bytes;
        Activation activation;
        int first;

        OCTAVO_INLINE void operator()(int row, Vec gate, Vec up) const {
            const Vec opened = activation == Activation::kSilu ? silu(gate) : gelu_tanh(gate);
            store_bf16(input_row(inner, row, row_bytes).value(first), opened * up);
        }
    };

    OCTAVO_INLINE OfPanel of_panel(int panel) const {
        return {inner, stride * (ptrdiff_t)sizeof(bf16), activation, panel * kLanes};
    }
};

struct WriteColumns {
    float* rows;
    int num_columns;
    int stride;

    struct OfPanel {
        float* rows;
        int count;
        int stride;

        OCTAVO_INLINE void operator()(int row, Vec left, Vec right) const {
            float* to = rows + (ptrdiff_t)row * stride;
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

    OCTAVO_INLINE OfPanel of_panel(int panel) const {
        const int first = panel * kPanelColumns;
        return {rows + first, at_most(num_columns - first, kPanelColumns), stride};
    }
};

// ---- The step ------------------------------------------------------------------------------------------------------

void begin_rows(const Step& step, Walk& walk) {
    const Model& model = *step.model;
    run_short_items(walk, step.batch->num_tokens, [&](int row) {
        embed_row(model, step.batch->token_ids[row],
                  step.workspace->hidden + (ptrdiff_t)row * model.shape.hidden_stride);
        for (int rotation = 0; rotation < model.num_rotations; ++rotation)
            rotation_of(model, rotation, step.batch->positions[row],
                        step.workspace->rotation +
                            ((ptrdiff_t)rotation * step.batch->num_tokens + row) * model.shape.head_dim);
    });
}

void norm_heads(const Step& step, Walk& walk, const Operation& operation) {
    const Shape& shape = step.model->shape;
    const int heads_per_row = shape.num_heads + shape.num_kv_heads;
    run_short_items(walk, step.batch->num_tokens, [&](int row) {
        for (int head = 0; head < heads_per_row; ++head) write_normed_head(step, operation, row, head);
    });
}

// The first weight that is read after an operation.
const Panels* weight_after(const Step& step, int index) {
    const Model& model = *step.model;
    return index + 1 < model.num_operations ? &model.operations[index + 1].first : &model.head;
}

void run_operation(const Step& step, Walk& walk, const Operation& operation) {
    const Shape& shape = step.model->shape;
    const Workspace& work = *step.workspace;
    const int num_tokens = step.batch->num_tokens, index = (int)(&operation - step.model->operations);
    float* produced = operation.norm_after ? work.produced : work.hidden;
    const float* residual = operation.norm_after ? nullptr : work.hidden;
    // What a rank produces is a part of a sum.
    const WriteProduced write = {step.collective ? nullptr : residual,
                                 step.collective ? step.collective->own_part(index) : produced,
                                 shape.hidden_stride, num_tokens - 1, operation.second_bias};
    walk.next_weight = &operation.second;
    if (operation.kind == OperationKind::kAttention) {
        multiply_normed(step, walk, operation.first, operation.norm, nullptr, num_tokens, WriteHeads{step, operation});
        if (operation.query_norm) norm_heads(step, walk, operation);
        attend(step, walk, operation);
        walk.next_weight = weight_after(step, index);
        multiply_rows_of(step, walk, operation.second, work.attended, shape.num_heads * shape.head_dim, write);
    } else {
        const int inner_stride = operation.first.num_panels * kLanes;
        multiply_normed(step, walk, operation.first, operation.norm, nullptr, num_tokens,
                        WriteGated{work.inner, inner_stride, operation.activation});
        walk.next_weight = weight_after(step, index);
        multiply_rows_of(step, walk, operation.second, work.inner, inner_stride, write);
    }
    if (step.collective) add_parts(step, walk, index, residual, produced);
    if (operation.norm_after) add_normed_rows(step, walk, operation.norm_after);
}

// Looking at every row, not only at those that are sampled, finds a fault in the step in which it is cached.
void end_rows(const Step& step, Walk& walk) {
    const Shape& shape = step.model->shape;
    run_short_items(walk, step.batch->num_tokens, [&](int row) {
        Vec total = zero();
        const float* hidden = step.workspace->hidden + (ptrdiff_t)row * shape.hidden_stride;
        // A value that is not finite gives a difference that is not a number.
        for (int i = 0; i < shape.hidden_stride; i += kLanes) total = total + (load(hidden + i) - load(hidden + i));
        step.batch->is_finite[row] = sum_of(total) == 0.0f;
    });
}

// The logits of the batch's rows to sample, from the residual stream.
void sample_rows(const Step& step, Walk& walk) {
    const Model& model = *step.model;
    walk.next_weight = nullptr;
    if (step.batch->num_sampled_rows)
        multiply_normed(step, walk, model.head, model.final_norm, step.batch->sampled_rows,
                        step.batch->num_sampled_rows,
                        WriteColumns{step.batch->logits + model.head_first, model.head_count, model.shape.vocab_size});
    end_products();
    // All ranks write their columns into the same rows.
    if (step.collective) meet_ranks(step, walk);
}

void run_head(const Step& step, int thread) {
    Walk walk(*step.team, thread);
    sample_rows(step, walk);
}

void run_step(const Step& step, int thread) {
    const Model& model = *step.model;
    Walk walk(*step.team, thread);
    begin_rows(step, walk);
    for (int index = 0; index < model.num_operations; ++index) run_operation(step, walk, model.operations[index]);
    end_rows(step, walk);
    sample_rows(step, walk);
}

void multiply_all_rows(const Step& step, int thread, const Panels& weight, const bf16* rows, int stride, float* to,
                       int num_columns) {
    Walk walk(*step.team, thread);
    bf16* arranged = step.workspace->normed;
    run_short_items(walk, step.batch->num_tokens, [&](int row) {
        const InputRow copy = input_row(arranged, row, stride * (ptrdiff_t)sizeof(bf16));
        for (int i = 0; i < stride; i += kLanes)
            __builtin_memcpy(copy.value(i), rows + (ptrdiff_t)row * stride + i, kLanes * sizeof(bf16));
    });
    multiply_rows_of(step, walk, weight, arranged, stride, WriteColumns{to, num_columns, num_columns});
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
    begin_products(kTileRows);
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
    typename Groups::Sum sums[kMaxRows][kColumns], starts[kMaxRows][kColumns] = {};
    alignas(64) bf16 columns_in_memory[kColumns][2 * kLanes], inputs_in_memory[kMaxRows][2];
    for (auto& column : columns_in_memory)
        for (bf16& value : column) value = 0x3f80;
    for (auto& input : inputs_in_memory) input[0] = input[1] = 0x3f80;
    // What a compiler knew to be alike, or to be the same in each round, would be computed once.
    asm volatile("" : "+m"(starts), "+m"(columns_in_memory));
    typename Groups::Columns columns[kColumns];
    unroll<kColumns>([&](auto column) __attribute__((always_inline)) {
        constexpr int j = decltype(column)::value;
        columns[j] = Groups::load((const char*)columns_in_memory[j]);
        unroll<kMaxRows>([&](auto row) __attribute__((always_inline)) {
            sums[decltype(row)::value][j] = starts[decltype(row)::value][j];
        });
    });
    for (int round = 0; round < num_rounds; ++round) {
        asm volatile("" : "+m"(inputs_in_memory));
        unroll<kMaxRows>([&](auto row) __attribute__((always_inline)) {
            constexpr int i = decltype(row)::value;
            const typename Groups::Input input = Groups::splat((const char*)inputs_in_memory[i]);
            unroll<kColumns>([&](auto column) __attribute__((always_inline)) {
                Groups::add(sums[i][decltype(column)::value], columns[decltype(column)::value], input);
            });
        });
    }
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
