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
// Inputs of a panel that stay in the first-level cache while rows go by, in steps of `kTileInputs`.
constexpr int kStepsAtOnce = 10;
constexpr int kFewRows = kTileRows;
constexpr ptrdiff_t kStepBytes = kTileInputs / 2 * kPanelPairBytes;

OCTAVO_INLINE int rows_of_chunk(int stride) {
    const int num_pairs_of_tiles = kChunkBytes / (stride * (int)sizeof(bf16)) / (2 * kTileRows);
    return at_most((num_pairs_of_tiles > 1 ? num_pairs_of_tiles : 1) * 2 * kTileRows, kMaxChunkRows);
}

OCTAVO_INLINE int divided_up(int count, int divisor) { return (count + divisor - 1) / divisor; }

// The products of ROW_TILES times sixteen rows with NUM_PANELS adjacent panels over some steps of inputs.
template <int ROW_TILES, int NUM_PANELS>
OCTAVO_INLINE void add_tiles(float* sums, const Panels& weight, int panel, const bf16* inputs, int stride,
                             int first_row, Range steps, Fetch fetch) {
    const ptrdiff_t panel_bytes = (ptrdiff_t)weight.num_pairs * kPanelPairBytes;
    const ptrdiff_t row_bytes = (ptrdiff_t)stride * sizeof(bf16);
    TileView rows[ROW_TILES], columns[2 * NUM_PANELS];
    for (int i = 0; i < ROW_TILES; ++i)
        rows[i] = {(const char*)inputs + (first_row + i * kTileRows) * row_bytes + steps.first * kTileLineBytes,
                   row_bytes, kTileLineBytes};
    for (int j = 0; j < 2 * NUM_PANELS; ++j)
        columns[j] = {(const char*)weight.data + (panel + j / 2) * panel_bytes + j % 2 * kTileLineBytes +
                          steps.first * kStepBytes,
                      kPanelPairBytes, kStepBytes};
    tile_products<ROW_TILES, 2 * NUM_PANELS>((char*)sums, NUM_PANELS * kPanelColumns * sizeof(float),
                                             steps.first > 0, rows, columns, steps.end - steps.first, fetch);
}

// Hands on `num_rows` rows of the sums [rows][NUM_PANELS][32].
template <int NUM_PANELS, class Epilogue>
OCTAVO_INLINE void hand_on(const float* sums, int panel, int first_row, int num_rows, Epilogue& epilogue) {
    for (int i = 0; i < num_rows; ++i)
        for (int p = 0; p < NUM_PANELS; ++p) {
            const float* from = sums + (i * NUM_PANELS + p) * kPanelColumns;
            epilogue(first_row + i, panel + p, load(from), load(from + kLanes));
        }
}

// A few rows: the weight is read once from memory, which is what takes the time. The processor fetches ahead by itself;
// to ask for lines on top of that took a sixth more time.
template <class Epilogue>
OCTAVO_INLINE void multiply_few_rows(const Panels& weight, Range panels, const bf16* inputs, int stride,
                                     int num_rows, Epilogue& epilogue) {
    alignas(64) float sums[kTileRows * 2 * kPanelColumns];
    const Range steps = {0, weight.num_pairs / (kTileInputs / 2)};
    int panel = panels.first;
    for (; panel + 2 <= panels.end; panel += 2) {
        add_tiles<1, 2>(sums, weight, panel, inputs, stride, 0, steps, kFetchNothing);
        hand_on<2>(sums, panel, 0, num_rows, epilogue);
    }
    for (; panel < panels.end; ++panel) {
        add_tiles<1, 1>(sums, weight, panel, inputs, stride, 0, steps, kFetchNothing);
        hand_on<1>(sums, panel, 0, num_rows, epilogue);
    }
}

// What lies beyond the rows in memory is read and its results are dropped.
template <class Epilogue>
OCTAVO_INLINE void multiply_rows(const Panels& weight, Range panels, const bf16* inputs, int stride, Range rows,
                                 Epilogue& epilogue) {
    constexpr int kRows = 2 * kTileRows;
    alignas(64) float sums[kMaxChunkRows * kPanelColumns];
    const ptrdiff_t panel_bytes = (ptrdiff_t)weight.num_pairs * kPanelPairBytes;
    const int num_steps = weight.num_pairs / (kTileInputs / 2), num_row_blocks = divided_up(rows.end - rows.first, kRows);
    const int num_parts = num_row_blocks > 1 ? divided_up(num_steps, kStepsAtOnce) : 1;
    // The next panel is fetched a little with each step.
    const int bytes_per_step = divided_up(divided_up((int)panel_bytes, num_steps * num_row_blocks), 64) * 64;
    for (int panel = panels.first; panel < panels.end; ++panel) {
        const char* next = (const char*)weight.data + (panel + 1) * panel_bytes;
        for (int part = 0; part < num_parts; ++part) {
            const Range steps = share_of(num_steps, part, num_parts);
            for (int block = 0; block < num_row_blocks; ++block) {
                const int first_row = rows.first + block * kRows, count = at_most(rows.end - first_row, kRows);
                float* block_sums = sums + block * kRows * kPanelColumns;
                const Fetch fetch = {next, bytes_per_step};
                next += (steps.end - steps.first) * bytes_per_step;
                if (count > kTileRows)
                    add_tiles<2, 1>(block_sums, weight, panel, inputs, stride, first_row, steps, fetch);
                else
                    add_tiles<1, 1>(block_sums, weight, panel, inputs, stride, first_row, steps, fetch);
                if (part + 1 == num_parts) hand_on<1>(block_sums, panel, first_row, count, epilogue);
            }
        }
    }
}

}  // namespace
}  // namespace octavo
