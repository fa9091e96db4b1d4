// Products of rows with packed weights in tiles (Intel AMX): a part of products.hpp.
//
// Owns the order in which tiles are loaded and weights fetched. It must not know what a weight is for.
#pragma once

#include "amx.hpp"
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

OCTAVO_INLINE int rows_of_chunk(ptrdiff_t stride) {
    const int num_pairs_of_tiles = kChunkBytes / (int)stride / (2 * kTileRows);
    return at_most((num_pairs_of_tiles > 1 ? num_pairs_of_tiles : 1) * 2 * kTileRows, kMaxChunkRows);
}

OCTAVO_INLINE int divided_up(int count, int divisor) { return (count + divisor - 1) / divisor; }

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

// Hands on `num_rows` rows of the sums [rows][NUM_PANELS][32].
template <class Groups, int NUM_PANELS, class Epilogue>
OCTAVO_INLINE void hand_on(const char* sums, int panel, int first_row, int num_rows, Epilogue& epilogue) {
    using Sum = typename Groups::Sum;
    for (int i = 0; i < num_rows; ++i)
        for (int p = 0; p < NUM_PANELS; ++p) {
            const char* from = sums + (i * NUM_PANELS + p) * kPanelSumBytes;
            epilogue(first_row + i, panel + p, load_as<Sum>(from), load_as<Sum>(from + kTileLineBytes));
        }
}

// A few rows: the weight is read once from memory, which is what takes the time. The processor fetches ahead by itself;
// to ask for lines on top of that took a sixth more time.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_few_rows(const Panels& weight, Range panels, const Inputs& inputs, int num_rows,
                                     Epilogue& epilogue) {
    alignas(64) char sums[kTileRows * 2 * kPanelSumBytes];
    const Range steps = {0, weight.num_groups / kTileGroups};
    int panel = panels.first;
    for (; panel + 2 <= panels.end; panel += 2) {
        add_tiles<Groups, 1, 2>(sums, weight, panel, inputs, 0, steps, kFetchNothing);
        hand_on<Groups, 2>(sums, panel, 0, num_rows, epilogue);
    }
    for (; panel < panels.end; ++panel) {
        add_tiles<Groups, 1, 1>(sums, weight, panel, inputs, 0, steps, kFetchNothing);
        hand_on<Groups, 1>(sums, panel, 0, num_rows, epilogue);
    }
}

// What lies beyond the rows in memory is read and its results are dropped.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_rows(const Panels& weight, Range panels, const Inputs& inputs, Range rows,
                                 Epilogue& epilogue) {
    constexpr int kRows = 2 * kTileRows;
    alignas(64) char sums[kMaxChunkRows * kPanelSumBytes];
    const int num_steps = weight.num_groups / kTileGroups, num_row_blocks = divided_up(rows.end - rows.first, kRows);
    const int num_parts = num_row_blocks > 1 ? divided_up(num_steps, kStepsAtOnce) : 1;
    // The next panel is fetched a little with each step.
    const int bytes_per_step = divided_up(divided_up((int)weight.panel_bytes, num_steps * num_row_blocks), 64) * 64;
    for (int panel = panels.first; panel < panels.end; ++panel) {
        const char* next = weight.data + (panel + 1) * weight.panel_bytes;
        for (int part = 0; part < num_parts; ++part) {
            const Range steps = share_of(num_steps, part, num_parts);
            for (int block = 0; block < num_row_blocks; ++block) {
                const int first_row = rows.first + block * kRows, count = at_most(rows.end - first_row, kRows);
                char* block_sums = sums + block * kRows * kPanelSumBytes;
                const Fetch fetch = {next, bytes_per_step};
                next += (steps.end - steps.first) * bytes_per_step;
                if (count > kTileRows)
                    add_tiles<Groups, 2, 1>(block_sums, weight, panel, inputs, first_row, steps, fetch);
                else
                    add_tiles<Groups, 1, 1>(block_sums, weight, panel, inputs, first_row, steps, fetch);
                if (part + 1 == num_parts) hand_on<Groups, 1>(block_sums, panel, first_row, count, epilogue);
            }
        }
    }
}

}  // namespace
}  // namespace octavo
