// Products of rows with packed weights, divided into items.
//
// Owns what an item is, the order of items, and how weights are fetched. It must not know what a weight is for.
#pragma once

#include "int8_rows.hpp"
#include "phases.hpp"
#include "plan.hpp"
#include "products_common.hpp"
#include "simd.hpp"
#if defined(OCTAVO_AMX)
#include "amx_products.hpp"
#endif

namespace octavo {
namespace {

#if !defined(OCTAVO_AMX)
constexpr int kFewRows = kMaxRows;

// Tiles of rows whose inputs stay in the second-level cache while panels go by.
constexpr int kChunkTilesOfRows = 192 / kMaxRows;

// Computes ROWS rows of NUM_PANELS adjacent panels, which are an item each, and hands each row's 32 columns on as two
// vectors.
template <class Groups, int ROWS, int NUM_PANELS, bool PREFETCH, class Epilogue>
OCTAVO_INLINE void multiply_tile(const Claim& claim, int first_item, const Panels& weight, int panel,
                                 const Inputs& inputs, int first_row, Epilogue& epilogue,
                                 ptrdiff_t prefetch_distance) {
    using Sum = typename Groups::Sum;
    const char* base = weight.data + panel * weight.panel_bytes;
    const char* rows = inputs.data + first_row * inputs.stride;
    Sum sums[2 * ROWS * NUM_PANELS];
    if constexpr (kIsWide) {
        const char* columns[2 * NUM_PANELS];
        for (int j = 0; j < 2 * NUM_PANELS; ++j) columns[j] = base + (j / 2) * weight.panel_bytes + (j % 2) * 64;
        products<Groups, ROWS, 2 * NUM_PANELS, PREFETCH>(sums, rows, inputs.stride, columns, 128, weight.num_groups,
                                                         prefetch_distance);
    } else {
        Sum halves[2][ROWS];
        for (int half = 0; half < 2; ++half)
            products<Groups, ROWS, 1, PREFETCH>(halves[half], rows, inputs.stride, {base + half * 64}, 128,
                                                weight.num_groups, prefetch_distance);
        for (int i = 0; i < 2 * ROWS; ++i) sums[i] = halves[i % 2][i / 2];
    }
    for (int p = 0; p < NUM_PANELS; ++p)
        claim.write(first_item + p, [&]() __attribute__((always_inline)) {
            const auto write = epilogue.of_panel(panel + p);
            for (int i = 0; i < ROWS; ++i)
                write(first_row + i, sums[2 * (i * NUM_PANELS + p)], sums[2 * (i * NUM_PANELS + p) + 1]);
        });
}

// A few rows: the weight is read once from memory, which is what takes the time.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_few_rows(const Claim& claim, const Panels& weight, const Inputs& inputs, int num_rows,
                                     const Onward&, Epilogue& epilogue) {
    with_rows_up_to<kMaxRows>(num_rows, [&](auto size) __attribute__((always_inline)) {
        constexpr int kRows = decltype(size)::value;
        constexpr int kPanels = kIsWide ? columns_at_once(kRows) / 2 : 1;
        const ptrdiff_t ahead = kRows == 1 ? 2048 : weight.panel_bytes * kPanels;
        int panel = claim.items.first;
        for (; panel + kPanels <= claim.items.end; panel += kPanels)
            multiply_tile<Groups, kRows, kPanels, true>(claim, panel, weight, panel, inputs, 0, epilogue, ahead);
        for (; panel < claim.items.end; ++panel)
            multiply_tile<Groups, kRows, 1, true>(claim, panel, weight, panel, inputs, 0, epilogue, ahead);
    });
}

// One panel and one tile of rows.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_item(const Claim& claim, int item, const Panels& weight, int panel, const Inputs& inputs,
                                 Range rows, bool is_first_tile, const Onward&, Epilogue& epilogue) {
    with_rows_up_to<kMaxRows>(rows.end - rows.first, [&](auto size) __attribute__((always_inline)) {
        constexpr int kRows = decltype(size)::value;
        if (is_first_tile)
            multiply_tile<Groups, kRows, 1, true>(claim, item, weight, panel, inputs, rows.first, epilogue,
                                                  weight.panel_bytes);
        else
            multiply_tile<Groups, kRows, 1, false>(claim, item, weight, panel, inputs, rows.first, epilogue, 0);
    });
}

OCTAVO_INLINE Tiling tiling_of(int num_rows, int num_panels, ptrdiff_t, int) {
    return {num_rows, num_panels, divided_up(num_rows, kMaxRows), kChunkTilesOfRows, 1};
}
OCTAVO_INLINE void begin_products(int) {}
OCTAVO_INLINE void end_products() {}
constexpr ptrdiff_t kBytesAskedFor = 0;

// How many panels of a few rows are computed together.
OCTAVO_INLINE int panels_at_once(int num_rows) { return kIsWide ? at_most(columns_at_once(num_rows) / 2, 2) : 1; }
#endif

// What a thread has in its second-level cache of the weight that comes next when it has waited long enough.
constexpr ptrdiff_t kMaxBytesAhead = 384 << 10;

// A thread's share of the weight that comes next, if few rows are multiplied with it.
OCTAVO_INLINE Ahead share_of_next(const Walk& walk, int num_rows) {
    if (!walk.next_weight) return {};
    const Panels& weight = *walk.next_weight;
    const Shares shares = {(uint64_t)weight.num_panels, panels_at_once(num_rows), walk.team.num_threads()};
    return {weight.data + (ptrdiff_t)shares.first_of(walk.thread) * weight.panel_bytes,
            weight.data + (ptrdiff_t)shares.first_of(walk.thread + 1) * weight.panel_bytes};
}

OCTAVO_INLINE Ahead not_asked_for(const Ahead& share) {
    const ptrdiff_t num_bytes = at_most(share.end - share.from, kMaxBytesAhead);
    if (num_bytes <= kBytesAskedFor) return {};
    return {share.from + kBytesAskedFor, share.from + num_bytes};
}

// `make_inputs()` gives the rows to this thread, before it computes anything.
template <class Groups, class MakeInputs, class Epilogue>
void multiply_groups(Walk& walk, const Panels& weight, MakeInputs make_inputs, ptrdiff_t input_stride, int num_rows,
                     Epilogue epilogue) {
    const Tiling tiling = tiling_of(num_rows, weight.num_panels, input_stride, walk.team.num_threads());
    const bool is_few = num_rows <= kFewRows;
    const Ahead next = share_of_next(walk, num_rows);
    walk.ahead = not_asked_for(next);
    Inputs inputs{nullptr, input_stride};
    run_phase(
        walk, tiling.num_items(), is_few ? panels_at_once(num_rows) : 1,
        [&] {
            begin_products(num_rows);
            inputs.data = make_inputs();
        },
        [&](const Claim& claim) {
            auto write = epilogue.with(weight, inputs);
            const int end = tiling.num_tiles == 1 ? claim.shares.end_beyond(claim.items.first) : weight.num_panels;
            const Onward onward = {weight.data + end * weight.panel_bytes, next.from};
            if (is_few) return multiply_few_rows<Groups>(claim, weight, inputs, num_rows, onward, write);
            for (int item = claim.items.first; item < claim.items.end; ++item) {
                const Tiling::Place place = tiling.place_of(item);
                if (!claim.is_taken(item))
                    multiply_item<Groups>(claim, item, weight, place.panel, inputs, place.rows, place.is_first_tile,
                                          onward, write);
            }
        });
}

// Maps num_rows rows of bfloat16 values, or of int8 values where the weight is int8, `stride` bytes apart;
// `epilogue.of_panel(panel)(row, left, right)` takes what comes out.
template <class MakeInputs, class Epilogue>
void multiply(Walk& walk, const Panels& weight, MakeInputs make_inputs, ptrdiff_t input_stride, int num_rows,
              Epilogue epilogue) {
    if (weight.type == ValueType::kInt8)
        multiply_groups<Int8Quads>(walk, weight, make_inputs, input_stride, num_rows, ScaledLater<Epilogue>{epilogue});
    else
        multiply_groups<Bfloat16Pairs>(walk, weight, make_inputs, input_stride, num_rows, AsItIs<Epilogue>{epilogue});
}

}  // namespace
}  // namespace octavo
