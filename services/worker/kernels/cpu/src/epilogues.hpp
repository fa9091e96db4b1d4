// What becomes of a product's sums: heads, parts of the residual stream, gated inputs, logits.
//
// Owns where each row of a panel's columns goes. It must not know how sums come about.
#pragma once

#include "plan.hpp"
#include "products_common.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

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
    // Without a division: heads that are normed ask for each row.
    const int index = head - shape.num_heads;
    return index < 0 ? 0 : index < shape.num_kv_heads ? index : index - shape.num_kv_heads;
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

}  // namespace
}  // namespace octavo
