// Attention over the paged cache.
//
// Owns scores, the softmax and the sums of values for the queries of one tile. It must not know where keys come from.
#pragma once

#include "plan.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

constexpr int kChunkTokens = kChunkTiles * kTileTokens;

// With few queries attention waits for keys and values, so that fetching them early pays.
constexpr bool is_bound_by_memory(int rows) { return rows <= 6; }

// The queries of one tile that share a KV head: rows are [query][head of the group].
class TileAttention {
   public:
    TileAttention(const Step& step, const Operation& operation, const QueryTile& queries, int kv_head, char* scratch)
        : shape_(step.model->shape),
          queries_(queries),
          group_size_(shape_.num_heads / shape_.num_kv_heads),
          num_rows_(queries.num_queries * group_size_),
          num_tiles_(queries.first_position / kTileTokens + 1),
          window_(operation.window ? operation.window : INT32_MAX),
          first_tile_(first_visible(queries.first_position) / kTileTokens),
          scale_(1.44269504f * operation.softmax_scale),
          table_(step.batch->block_tables + (ptrdiff_t)queries.sequence * step.batch->max_blocks),
          cache_(operation.cache + (ptrdiff_t)kv_head * 2 * kTileTokens * shape_.head_dim),
          first_head_(((ptrdiff_t)queries.first_row * shape_.num_heads + kv_head * group_size_) * shape_.head_dim) {
        const int max_rows = kTileTokens * group_size_;
        scores_ = (float*)scratch;
        sums_ = scores_ + kRowsTogether * kChunkTokens + kScoreSlack;
        maxima_ = sums_ + (ptrdiff_t)max_rows * shape_.head_dim;
        totals_ = maxima_ + max_rows;
        corrections_ = totals_ + max_rows;
        first_weights_ = (bf16*)(corrections_ + max_rows);
        weights_ = first_weights_;
        rows_ = first_weights_ + 2 * kRowsTogether * kChunkTokens;
    }

    // `next`, if there is one, is what this thread will attend to afterwards.
    void run(const bf16* queries, const TileAttention* next) {
        next_ = next;
        copy_queries(queries);
#if defined(OCTAVO_AMX)
        load_shapes(kAttentionShapesByRows(num_rows_));
#endif
        // Tiles before the window are left out. Where chunks begin does not depend on it, and a tile that is masked
        // from end to end adds nothing, so a row's result is the same whichever row of the tile is the first.
        for (int first = first_tile_; first < num_tiles_;) {
            const Range tiles = {first, at_most(first / kChunkTiles * kChunkTiles + kChunkTiles, num_tiles_)};
            first = tiles.end;
#if defined(OCTAVO_AMX)
            if (is_bound_by_memory(num_rows_)) list_pieces(tiles);
#endif
            for (int row = 0; row < num_rows_; row += kRowsTogether)
                attend_rows({row, at_most(row + kRowsTogether, num_rows_)}, tiles);
        }
#if defined(OCTAVO_AMX)
        add_due();
#endif
    }

    void write(bf16* attended) {
        for (int row = 0; row < num_rows_; ++row) {
            const ptrdiff_t row_values = (ptrdiff_t)shape_.num_heads * shape_.head_dim;
            const ptrdiff_t first = first_head_ % row_values + row % group_size_ * shape_.head_dim;
            const InputRow to = input_row(attended, queries_.first_row + row / group_size_,
                                          row_values * (ptrdiff_t)sizeof(bf16));
            const Vec scale = splat(1.0f / totals_[row]);
            for (int i = 0; i < shape_.head_dim; i += kLanes)
                store_bf16(to.value(first + i), load(sum_at(row, i)) * scale);
        }
    }

   private:
    OCTAVO_INLINE const bf16* tile(int index) const {
        const int tiles_per_block = shape_.block_size / kTileTokens;
        const ptrdiff_t number =
            (ptrdiff_t)table_[index / tiles_per_block] * tiles_per_block + index % tiles_per_block;
        return cache_ + number * shape_.num_kv_heads * 2 * kTileTokens * shape_.head_dim;
    }

    OCTAVO_INLINE const bf16* values_of(int index) const { return tile(index) + kTileTokens * shape_.head_dim; }

    // The rows' scores of a chunk stay in the first-level cache until they have become weights, and these until they
    // are used.
#if defined(OCTAVO_AMX)
    // To weigh is work for vectors and to add values is work for tiles, so the values of the rows before are added
    // meanwhile; unless memory sets the time, which comes in the order in which it was asked for.
    void attend_rows(Range rows, Range tiles) {
        score(rows, tiles);
        weights_ = weights_ == first_weights_ ? first_weights_ + kRowsTogether * kChunkTokens : first_weights_;
        const bool is_any_due = due_.tiles.first < due_.tiles.end;
        if (is_any_due) begin_columns<kSumTiles>(0);
        weigh(rows, tiles, [this](int part, int num_parts) __attribute__((always_inline)) {
            const Range share = share_of(due_.tiles.end - due_.tiles.first, part, num_parts);
            for (int i = share.first; i < share.end; ++i) add_tile<kSumTiles>(due_.tiles.first + i, 0);
        });
        if (is_any_due) {
            end_columns<kSumTiles>(0);
            add_columns_from(kSumTiles * kLanes);
        }
        if (tiles.first != first_tile_) correct_sums(rows);
        due_ = {rows.first, tiles, weights_};
        if (is_bound_by_memory(num_rows_) || shape_.head_dim < kSumTiles * kLanes) add_due();
    }
#else
    void attend_rows(Range rows, Range tiles) {
        score(rows, tiles);
        weigh(rows, tiles, [](int, int) {});
        add_values(rows, tiles);
    }
#endif

    void copy_queries(const bf16* queries) {
        const int row_values = group_size_ * shape_.head_dim;
        for (int query = 0; query < queries_.num_queries; ++query)
            __builtin_memcpy(rows_ + query * row_values,
                             queries + first_head_ + (ptrdiff_t)query * shape_.num_heads * shape_.head_dim,
                             row_values * sizeof(bf16));
    }

#if defined(OCTAVO_AMX)
    // What is read of a chunk, in this order: the keys of its tiles and their values, and the keys that are read afterwards.
    void list_pieces(Range tiles) {
        const int num_tiles = tiles.end - tiles.first;
        for (int i = 0; i < num_tiles; ++i) {
            pieces_[i] = (const char*)tile(tiles.first + i);
            pieces_[num_tiles + i] = (const char*)values_of(tiles.first + i);
        }
        const bool goes_on = tiles.end < num_tiles_;
        const TileAttention* then = goes_on ? this : next_;
        const int first = goes_on || !then ? tiles.end : then->first_tile_;
        // Where there are no more, the last is asked for again.
        for (int i = 0; i < kPiecesAhead; ++i) {
            const bool is_there = then && first + i < then->num_tiles_;
            pieces_[2 * num_tiles + i] = is_there ? (const char*)then->tile(first + i) : pieces_[2 * num_tiles + i - 1];
        }
    }

    // Asks for an eighth of this piece and of each of the seven after it, as `SpreadFetch` does.
    OCTAVO_INLINE void ask_with(int piece) const {
        const ptrdiff_t part = kTileTokens * shape_.head_dim * (ptrdiff_t)sizeof(bf16) / kPiecesAtOnce;
        unroll<kPiecesAtOnce>([&](auto distance) __attribute__((always_inline)) {
            constexpr int d = decltype(distance)::value;
            const char* from = pieces_[piece + d] + (kPiecesAtOnce - 1 - d) * part;
            for (ptrdiff_t line = 0; line < part; line += kTileLineBytes) fetch_into_first_level(from + line, Int<1>{});
        });
    }

    // Scores sixteen rows with four tiles of keys.
    __attribute__((noinline)) void score_tiles(int first_row, Range tiles) {
        const ptrdiff_t row_bytes = (ptrdiff_t)shape_.head_dim * sizeof(bf16);
        const char* rows = (const char*)rows_ + first_row * row_bytes;
        const char* keys[kSumTiles];
        // Beyond the last tile its scores are computed again; nobody reads them.
        for (int j = 0; j < kSumTiles; ++j) keys[j] = (const char*)tile(at_most(tiles.first + j, tiles.end - 1));
        float* to = scores_ + tiles.first % kChunkTiles * kTileTokens;
        unroll<kSumTiles>([&](auto sum) __attribute__((always_inline)) { clear_tile<decltype(sum)::value>(); });
        for (int step = 0; step < shape_.head_dim / kTileInputs; ++step) {
            load_tile<kQueryTile>(rows + step * kTileLineBytes, row_bytes);
            unroll<kSumTiles>([&](auto sum) __attribute__((always_inline)) {
                constexpr int j = decltype(sum)::value;
                load_passing_tile<kKeyTile>(keys[j] + step * kTileGroups * kTileLineBytes, kTileLineBytes);
                add_tile_products<Bfloat16Pairs, j, kQueryTile, kKeyTile>();
            });
        }
        unroll<kSumTiles>([&](auto sum) __attribute__((always_inline)) {
            constexpr int j = decltype(sum)::value;
            store_tile<j>(to + j * kTileTokens, kChunkTokens * sizeof(float));
        });
    }

    void score(Range rows, Range tiles) {
        for (int index = tiles.first; index < tiles.end; index += kSumTiles) {
            if (is_bound_by_memory(num_rows_))
                for (int i = index; i < at_most(index + kSumTiles, tiles.end); ++i) ask_with(i - tiles.first);
            score_tiles(rows.first, {index, tiles.end});
        }
    }
#else
    template <int ROWS, int TILES>
    OCTAVO_INLINE void score_tiles(int first_row, Range tiles) {
        Vec sums[ROWS * TILES];
        const char* columns[TILES];
        // Beyond the last tile its scores are computed again; nobody reads them.
        for (int j = 0; j < TILES; ++j) columns[j] = (const char*)tile(at_most(tiles.first + j, tiles.end - 1));
        // While keys are scored the values beside them are fetched.
        constexpr bool kPrefetch = is_bound_by_memory(ROWS);
        const ptrdiff_t row_bytes = shape_.head_dim * (ptrdiff_t)sizeof(bf16);
        products<Bfloat16Pairs, ROWS, TILES, kPrefetch>(sums, (const char*)rows_ + first_row * row_bytes, row_bytes,
                                                        columns, 64, shape_.head_dim / 2, kTileTokens * row_bytes);
        float* to = scores_of(first_row) + tiles.first % kChunkTiles * kTileTokens;
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < TILES; ++j) store(to + i * kChunkTokens + j * kTileTokens, sums[i * TILES + j]);
    }

    void score(Range rows, Range tiles) {
        for_each_tile(rows.first, rows.end - rows.first, [&](int first_row, auto size) __attribute__((always_inline)) {
            constexpr int kRows = decltype(size)::value, kTiles = columns_at_once(kRows);
            for (int index = tiles.first; index < tiles.end; index += kTiles)
                score_tiles<kRows, kTiles>(first_row, {index, tiles.end});
        });
    }
#endif

    OCTAVO_INLINE int first_visible(int position) const { return position < window_ ? 0 : position + 1 - window_; }

    // Lanes from `first` to below `end` of `values`, `other` elsewhere.
    static OCTAVO_INLINE Vec lanes_between(Vec values, int first, int end, Vec other) {
        alignas(64) static const int32_t kIndices[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        if (first <= 0 && end >= kLanes) return values;  // As nearly always.
        OCTAVO_PARTS((load_as<Ints>(kIndices + i * kPartLanes) < Ints{} + end) &
                             (load_as<Ints>(kIndices + i * kPartLanes) >= Ints{} + first)
                         ? values.part[i]
                         : other.part[i]);
    }

    // Vectors of scores that are weighed together where a row sees them from end to end, as it does nearly all.
    static constexpr int kVectorsTogether = 4;

    static OCTAVO_INLINE int end_of_whole(int first_token, int visible, int limit) {
        constexpr int kTokens = kVectorsTogether * kLanes;
        return visible > first_token ? first_token : first_token + (limit - first_token) / kTokens * kTokens;
    }

    // What a row sees of a chunk, counted from the chunk's first token; most of it in whole groups of vectors.
    struct SeenTokens {
        int first, end, end_whole;
    };

    SeenTokens seen_by(int row, int chunk_tile, int first_token) const {
        const int position = queries_.first_position + row / group_size_, chunk_token = chunk_tile * kTileTokens;
        const int first = first_visible(position) - chunk_token;
        const int end = at_most(kChunkTokens, position + 1 - chunk_token);
        return {first, end, end_of_whole(first_token, first, end)};
    }

    // Turns scores into weights relative to each row's largest score so far. `beside(part, num_parts)` is work of another
    // kind, a part of which is done with each row.
    template <class Beside>
    OCTAVO_INLINE void weigh(Range rows, Range tiles, Beside beside) {
        const int chunk_tile = tiles.first / kChunkTiles * kChunkTiles, num_rows = rows.end - rows.first;
        const Range tokens = {(tiles.first - chunk_tile) * kTileTokens, (tiles.end - chunk_tile) * kTileTokens};
        SeenTokens seen[kRowsTogether];
        // What belongs to a row is found for all of them at once, each in its lane.
        Vec of_rows[kRowsTogether];
        for (int i = 0; i < num_rows; ++i) {
            seen[i] = seen_by(rows.first + i, chunk_tile, tokens.first);
            of_rows[i] = largest_scores(scores_of(rows.first + i), tokens, seen[i]);
        }
        for (int i = num_rows; i < kRowsTogether; ++i) of_rows[i] = zero();
        const bool is_first = tiles.first == first_tile_;
        // Scores are scaled here and not in the queries, which are rounded.
        const Vec scaled = maxima_of(of_rows) * splat(scale_), before = load(maxima_ + rows.first);
        const Vec maxima = is_first ? scaled : max(scaled, before);
        const Vec corrections = is_first ? zero() : exp2_of(before - maxima);
        store(maxima_ + rows.first, maxima);
        store(corrections_ + rows.first, corrections);
        for (int i = 0; i < num_rows; ++i) {
            of_rows[i] = weigh_row(scores_of(rows.first + i), weights_of(rows.first + i), tokens, seen[i],
                                   maxima_[rows.first + i]);
            beside(i, num_rows);
        }
        for (int i = num_rows; i < kRowsTogether; ++i) of_rows[i] = zero();
        const Vec totals = sums_of(of_rows);
        store(totals_ + rows.first, is_first ? totals : load(totals_ + rows.first) * corrections + totals);
    }

    OCTAVO_INLINE Vec largest_scores(const float* scores, Range tokens, SeenTokens seen) const {
        const Vec lowest = splat(-3e38f);
        Vec maxima[kVectorsTogether] = {lowest, lowest, lowest, lowest};
        for (int i = tokens.first; i < seen.end_whole; i += kVectorsTogether * kLanes)
            unroll<kVectorsTogether>([&](auto vector) __attribute__((always_inline)) {
                constexpr int k = decltype(vector)::value;
                maxima[k] = max(load(scores + i + k * kLanes), maxima[k]);
            });
        Vec largest = max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]));
        for (int i = seen.end_whole; i < tokens.end; i += kLanes)
            largest = max(lanes_between(load(scores + i), seen.first - i, seen.end - i, lowest), largest);
        return largest;
    }

    // Returns the sums of the weights in each lane.
    OCTAVO_INLINE Vec weigh_row(const float* scores, bf16* weights, Range tokens, SeenTokens seen, float maximum) const {
        const Vec scale = splat(scale_), offset = splat(-maximum);
        Vec total = zero();
        for (int i = tokens.first; i < seen.end_whole; i += kVectorsTogether * kLanes)
            unroll<kVectorsTogether / 2>([&](auto pair) __attribute__((always_inline)) {
                const int from = i + 2 * decltype(pair)::value * kLanes;
                const Vec left = exp2_to_be_rounded(fma(load(scores + from), scale, offset));
                const Vec right = exp2_to_be_rounded(fma(load(scores + from + kLanes), scale, offset));
                total = total + left;
                total = total + right;
                store_bf16(weights + from, left, right);
            });
        for (int i = seen.end_whole; i < tokens.end; i += kLanes) {
            const Vec weight = exp2_to_be_rounded(fma(load(scores + i), scale, offset));
            const Vec kept = lanes_between(weight, seen.first - i, seen.end - i, zero());
            total = total + kept;
            store_bf16(weights + i, kept);
        }
        return total;
    }

    OCTAVO_INLINE float* scores_of(int row) const { return scores_ + row % kRowsTogether * kChunkTokens; }
    OCTAVO_INLINE bf16* weights_of(int row) const { return weights_ + row % kRowsTogether * kChunkTokens; }
    OCTAVO_INLINE float* sum_at(int row, int column) { return sums_ + (ptrdiff_t)row * shape_.head_dim + column; }

#if defined(OCTAVO_AMX)
    // Adds sixteen rows of weighted values in COLUMNS tiles of columns: tiles hold the sums from `begin_columns` to
    // `end_columns`.
    template <int COLUMNS>
    OCTAVO_INLINE void begin_columns(int first_column) {
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int j = decltype(column)::value;
            if (due_.tiles.first == first_tile_)
                clear_tile<j>();
            else
                load_tile<j>(sum_at(due_.first_row, first_column + j * kLanes), sum_stride());
        });
    }

    template <int COLUMNS>
    OCTAVO_INLINE void add_tile(int index, int first_column) {
        const char* values = (const char*)(values_of(index) + 2 * first_column);
        load_tile<kWeightTile>(due_.weights + index % kChunkTiles * kTileTokens, kChunkTokens * sizeof(bf16));
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int j = decltype(column)::value;
            load_passing_tile<kValueTile>(values + j * kTileLineBytes, (ptrdiff_t)shape_.head_dim * 2 * sizeof(bf16));
            add_tile_products<Bfloat16Pairs, j, kWeightTile, kValueTile>();
        });
    }

    template <int COLUMNS>
    OCTAVO_INLINE void end_columns(int first_column) {
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int j = decltype(column)::value;
            store_tile<j>(sum_at(due_.first_row, first_column + j * kLanes), sum_stride());
        });
    }

    template <int COLUMNS>
    __attribute__((noinline)) void add_columns(int first_column) {
        begin_columns<COLUMNS>(first_column);
        for (int index = due_.tiles.first; index < due_.tiles.end; ++index) {
            if (is_bound_by_memory(num_rows_) && first_column == 0)
                ask_with(due_.tiles.end - 2 * due_.tiles.first + index);
            add_tile<COLUMNS>(index, first_column);
        }
        end_columns<COLUMNS>(first_column);
    }

    void add_columns_from(int column) {
        for (; column + kSumTiles * kLanes <= shape_.head_dim; column += kSumTiles * kLanes)
            add_columns<kSumTiles>(column);
        if (column < shape_.head_dim) add_columns<kSumTiles / 2>(column);
    }

    void add_due() {
        if (due_.tiles.first < due_.tiles.end) add_columns_from(0);
        due_.tiles = {0, 0};
    }

    OCTAVO_INLINE ptrdiff_t sum_stride() const { return (ptrdiff_t)shape_.head_dim * (ptrdiff_t)sizeof(float); }

    void correct_sums(Range rows) {
        for (int row = rows.first; row < rows.end; ++row) {
            if (corrections_[row] == 1.0f) continue;
            const Vec correction = splat(corrections_[row]);
            for (int i = 0; i < shape_.head_dim; i += kLanes) store(sum_at(row, i), load(sum_at(row, i)) * correction);
        }
    }
#else
    // From the values of a tile to the keys that will be read a chunk later, of these queries or of the next ones.
    OCTAVO_INLINE ptrdiff_t distance_to_next_keys(int index) const {
        const bf16* keys = nullptr;
        if (index + kChunkTiles < num_tiles_)
            keys = tile(index + kChunkTiles);
        else if (next_ && next_->first_tile_ + index % kChunkTiles < next_->num_tiles_)
            keys = next_->tile(next_->first_tile_ + index % kChunkTiles);
        return keys ? (const char*)keys - (const char*)values_of(index) : 0;
    }

    template <int ROWS, int COLUMNS>
    __attribute__((noinline)) void add_columns(Range tiles, int first_row, int first_column) {
        Vec sums[ROWS][COLUMNS];
        unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
            constexpr int i = decltype(row)::value;
            unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
                constexpr int j = decltype(column)::value;
                sums[i][j] = tiles.first == first_tile_
                                 ? zero()
                                 : load(sum_at(first_row + i, first_column + j * kLanes)) *
                                       splat(corrections_[first_row + i]);
            });
        });
        for (int index = tiles.first; index < tiles.end; ++index) {
            const bf16* values = values_of(index) + 2 * first_column;
            const char* columns[COLUMNS];
            unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
                columns[decltype(column)::value] = (const char*)values + decltype(column)::value * 64;
            });
            accumulate<Bfloat16Pairs, ROWS, COLUMNS, is_bound_by_memory(ROWS)>(
                sums,
                (const char*)(weights_of(first_row) + index % kChunkTiles * kTileTokens),
                kChunkTokens * sizeof(bf16), columns, shape_.head_dim * 4, kTileTokens / 2, distance_to_next_keys(index));
        }
        unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
            constexpr int i = decltype(row)::value;
            unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
                constexpr int j = decltype(column)::value;
                store(sum_at(first_row + i, first_column + j * kLanes), sums[i][j]);
            });
        });
    }

    void add_values(Range rows, Range tiles) {
        for_each_tile(rows.first, rows.end - rows.first, [&](int first_row, auto size) __attribute__((always_inline)) {
            constexpr int kRows = decltype(size)::value;
            constexpr int kColumns = !kIsWide ? 1 : kRows <= 3 ? 4 : 2, kLast = at_most(kColumns, 2);
            int column = 0;
            for (; column + kColumns * kLanes <= shape_.head_dim; column += kColumns * kLanes)
                add_columns<kRows, kColumns>(tiles, first_row, column);
            for (; column < shape_.head_dim; column += kLast * kLanes)
                add_columns<kRows, kLast>(tiles, first_row, column);
        });
    }
#endif

    const Shape& shape_;
    const QueryTile& queries_;
    const int group_size_, num_rows_, num_tiles_;
    const int window_;
    const int first_tile_;  // with a key that a query sees
    const float scale_;     // of scores, for powers of two
    const int32_t* table_;
    const bf16* cache_;
    const ptrdiff_t first_head_;  // of the tile's first query, in a row of all heads
    float *scores_, *sums_, *maxima_, *totals_, *corrections_;
    bf16 *first_weights_, *weights_, *rows_;
    const TileAttention* next_ = nullptr;
#if defined(OCTAVO_AMX)
    // Rows whose weights are complete and whose values are still to be added.
    struct DueSums {
        int first_row;
        Range tiles;
        const bf16* weights;
    };
    DueSums due_ = {0, {0, 0}, nullptr};
    static constexpr int kPiecesAtOnce = 8, kPiecesAhead = kPiecesAtOnce - 1;
    const char* pieces_[2 * kChunkTiles + kPiecesAhead];
#endif
};

void attend(const Step& step, Walk& walk, const Operation& operation) {
    const int num_kv_heads = step.model->shape.num_kv_heads;
    const Workspace& work = *step.workspace;
    char* scratch = work.scratch + walk.thread * work.scratch_stride;
    const auto attention_of = [&](int item) {
        return TileAttention(step, operation, step.batch->tiles[item / num_kv_heads], item % num_kv_heads, scratch);
    };
    run_phase(
        walk, step.batch->num_tiles * num_kv_heads, 1, [] {},
        [&](const Claim& claim) {
            for (int item = claim.items.first; item < claim.items.end; ++item) {
                if (claim.is_taken(item)) continue;
                TileAttention attention = attention_of(item);
                if (item + 1 < claim.shares.end_beyond(item)) {
                    const TileAttention next = attention_of(item + 1);
                    attention.run(work.queries, &next);
                } else {
                    attention.run(work.queries, nullptr);
                }
                claim.write(item, [&] { attention.write(work.attended); });
            }
        });
}

}  // namespace
}  // namespace octavo
