// One step of a model: embedding, attention and feed-forward operations, and the head.
//
// Owns the order of the computation and its division into phases. It must not know sampling or where a batch came from. Each row's result is a fixed sequence of operations that depends on nothing but its sequence's tokens:
// sums over inputs run in the order of the inputs, attention runs over tiles of sixteen positions and corrects its
// softmax every sixteen tiles, both counted from the sequence's first token.
#pragma once

#include "attention.hpp"
#include "epilogues.hpp"
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

// Asks for lines a page ahead, in their order, or `over_pages` as products of a few rows in tiles do: which of the two is
// faster depends on the machine.
float read_memory(const char* from, size_t num_bytes, bool over_pages) {
    constexpr ptrdiff_t kStepBytes = kPageBytes / 2;
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    const char* end = from + num_bytes;
    for (const char* step = from; step < end; step += kStepBytes) {
        unroll<kPages>([&](auto distance) __attribute__((always_inline)) {
            constexpr int d = decltype(distance)::value;
            constexpr ptrdiff_t kPartBytes = kStepBytes / kPages;
            const char* part = over_pages ? part_of_page<kStepBytes>(step, d) : step + kPageBytes + d * kPartBytes;
            fetch_into_first_level(part, Int<kPartBytes / kLineBytes>{});
        });
        for (const char* at = step; at < step + kStepBytes && at + 4 * kLineBytes <= end; at += 4 * kLineBytes)
            unroll<4>([&](auto index) __attribute__((always_inline)) {
                constexpr int i = decltype(index)::value;
                sums[i] = sums[i] + load((const float*)(at + kLineBytes * i));
            });
    }
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
