// Products of rows with packed weights in tiles (Intel AMX): a part of products.hpp.
//
// Owns the order in which tiles are loaded and weights fetched. It must not know what a weight is for.
#pragma once

#include "amx.hpp"
#include "phases.hpp"
#include "plan.hpp"
#include "products_common.hpp"

namespace octavo {
namespace {

// Inputs that stay in the second-level cache while panels go by, and the sums of a panel that wait beside them.
constexpr int kChunkBytes = 768 << 10;
constexpr int kMaxChunkRows = 512;
// Inputs of a panel that stay in the first-level cache while rows go by, in steps of `kTileGroups`.
constexpr int kStepsAtOnce = 10;
constexpr int kFewRows = kTileRows;
constexpr int kPanelSumBytes = kPanelColumns * 4;  // sums of one row
constexpr ptrdiff_t kStepBytes = kTileGroups * kPanelGroupBytes;

OCTAVO_INLINE void begin_products() { load_shapes(kFullShapes); }
OCTAVO_INLINE void end_products() { release_tiles(); }

// A chunk of rows is one tile here, and its rows are whole pairs of the processor's tiles.
OCTAVO_INLINE Tiling tiling_of(int num_rows, int num_panels, ptrdiff_t stride) {
    const int num_pairs_of_tiles = kChunkBytes / (int)stride / (2 * kTileRows);
    const int rows = at_most((num_pairs_of_tiles > 1 ? num_pairs_of_tiles : 1) * 2 * kTileRows, kMaxChunkRows);
    return {num_rows, num_panels, divided_up(num_rows, rows), 1};
}

// The products of ROW_TILES times sixteen rows with NUM_PANELS adjacent panels over some steps of inputs.
template <class Groups, int ROW_TILES, int NUM_PANELS>
OCTAVO_INLINE void add_tiles(char* sums, const Panels& weight, int panel, const Inputs& inputs, int first_row,
                             Range steps, Fetch fetch) {
    TileView rows[ROW_TILES], columns[2 * NUM_PANELS];
    for (int i = 0; i < ROW_TILES; ++i)
        rows[i] = {inputs.data + (first_row + i * kTileRows) * inputs.stride + steps.first * kTileLineBytes,
                   inputs.stride, kTileLineBytes};
    for (int j = 0; j < 2 * NUM_PANELS; ++j)
        columns[j] = {weight.data + (panel + j / 2) * weight.panel_bytes + j % 2 * kTileLineBytes +
                          steps.first * kStepBytes,
                      kPanelGroupBytes, kStepBytes};
    tile_products<Groups, ROW_TILES, 2 * NUM_PANELS>(sums, NUM_PANELS * kPanelSumBytes, steps.first > 0, rows,
                                                     columns, steps.end - steps.first, fetch);
}

// Hands on rows of sums [num_rows][32] that lie `stride` bytes apart.
template <class Groups, class Epilogue>
OCTAVO_INLINE void hand_on(const char* sums, int stride, int panel, int first_row, int num_rows, Epilogue& epilogue) {
    using Sum = typename Groups::Sum;
    for (int i = 0; i < num_rows; ++i) {
        const char* from = sums + i * stride;
        epilogue(first_row + i, panel, load_as<Sum>(from), load_as<Sum>(from + kTileLineBytes));
    }
}

// A few rows: the weight is read once from memory, which is what takes the time. The processor fetches ahead by itself;
// to ask for lines on top of that took a sixth more time.
template <class Groups, int NUM_PANELS, class Epilogue>
OCTAVO_INLINE void multiply_panels(const Claim& claim, const Panels& weight, int panel, const Inputs& inputs,
                                   int num_rows, Epilogue& epilogue) {
    alignas(64) char sums[kTileRows * NUM_PANELS * kPanelSumBytes];
    add_tiles<Groups, 1, NUM_PANELS>(sums, weight, panel, inputs, 0, {0, weight.num_groups / kTileGroups},
                                     kFetchNothing);
    for (int p = 0; p < NUM_PANELS; ++p)
        claim.write(panel + p, [&] {
            hand_on<Groups>(sums + p * kPanelSumBytes, NUM_PANELS * kPanelSumBytes, panel + p, 0, num_rows, epilogue);
        });
}

template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_few_rows(const Claim& claim, const Panels& weight, const Inputs& inputs, int num_rows,
                                     Epilogue& epilogue) {
    int panel = claim.items.first;
    for (; panel + 2 <= claim.items.end; panel += 2)
        multiply_panels<Groups, 2>(claim, weight, panel, inputs, num_rows, epilogue);
    for (; panel < claim.items.end; ++panel)
        multiply_panels<Groups, 1>(claim, weight, panel, inputs, num_rows, epilogue);
}

// What lies beyond the rows in memory is read and its results are dropped.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_item(const Claim& claim, int item, const Panels& weight, int panel, const Inputs& inputs,
                                 Range rows, bool, Epilogue& epilogue) {
    constexpr int kRows = 2 * kTileRows;
    alignas(64) char sums[kMaxChunkRows * kPanelSumBytes];
    const int num_steps = weight.num_groups / kTileGroups, num_row_blocks = divided_up(rows.end - rows.first, kRows);
    const int num_parts = num_row_blocks > 1 ? divided_up(num_steps, kStepsAtOnce) : 1;
    // The next panel is fetched a little with each step.
    const int bytes_per_step = divided_up(divided_up((int)weight.panel_bytes, num_steps * num_row_blocks), 64) * 64;
    const char* next = weight.data + (panel + 1) * weight.panel_bytes;
    const auto add_block = [&](int block, Range steps) __attribute__((always_inline)) {
        const int first_row = rows.first + block * kRows;
        char* block_sums = sums + block * kRows * kPanelSumBytes;
        const Fetch fetch = {next, bytes_per_step};
        next += (steps.end - steps.first) * bytes_per_step;
        if (rows.end - first_row > kTileRows)
            add_tiles<Groups, 2, 1>(block_sums, weight, panel, inputs, first_row, steps, fetch);
        else
            add_tiles<Groups, 1, 1>(block_sums, weight, panel, inputs, first_row, steps, fetch);
    };
    const auto hand_on_block = [&](int block) __attribute__((always_inline)) {
        const int first_row = rows.first + block * kRows;
        hand_on<Groups>(sums + block * kRows * kPanelSumBytes, kPanelSumBytes, panel, first_row,
                        at_most(rows.end - first_row, kRows), epilogue);
    };
    for (int part = 0; part + 1 < num_parts; ++part)
        for (int block = 0; block < num_row_blocks; ++block) add_block(block, share_of(num_steps, part, num_parts));
    const Range last_steps = share_of(num_steps, num_parts - 1, num_parts);
    add_block(0, last_steps);
    // Sums are handed on while they are in the first-level cache.
    claim.write(item, [&]() __attribute__((always_inline)) {
        hand_on_block(0);
        for (int block = 1; block < num_row_blocks; ++block) {
            add_block(block, last_steps);
            hand_on_block(block);
        }
    });
}

}  // namespace
}  // namespace octavo
