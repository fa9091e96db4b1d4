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
constexpr int kChunkBytes = 960 << 10;
constexpr int kMaxChunkRows = 512;
// Inputs of a panel that stay in the first-level cache while rows go by, in steps of `kTileGroups`.
constexpr int kStepsAtOnce = 10;
constexpr int kFewRows = kTileRows;
constexpr int kPanelSumBytes = kPanelColumns * 4;  // sums of one row
constexpr int kBlockSumBytes = kBlockRows * kPanelSumBytes;
constexpr ptrdiff_t kStepBytes = kTileGroups * kPanelGroupBytes;
constexpr ptrdiff_t kBlockStepBytes = kBlockRows * kTileLineBytes;

static_assert(kBlockRows == 2 * kTileRows);

OCTAVO_INLINE void begin_products() { load_shapes(kFullShapes); }
OCTAVO_INLINE void end_products() { release_tiles(); }

// A chunk of rows is one tile here, and its rows are whole blocks. Of several chunks each thread's share has as many, so
// that no thread reads rows that another has just written; one chunk is divided by panels, whose reading is what takes the
// time then.
OCTAVO_INLINE Tiling tiling_of(int num_rows, int num_panels, ptrdiff_t stride, int num_threads) {
    const int max_blocks = at_most(kChunkBytes / (int)stride, kMaxChunkRows) / kBlockRows;
    const int num_blocks = divided_up(num_rows, kBlockRows);
    const int num_chunks = divided_up(num_blocks, max_blocks > 1 ? max_blocks : 1);
    const int even_chunks = num_chunks > 1 ? divided_up(num_chunks, num_threads) * num_threads : 1;
    return {num_rows, num_panels, at_most(even_chunks, num_blocks), 1, kBlockRows};
}

// Rows and columns over some steps of inputs, and the rows that come after them, which are fetched into the first-level
// cache a step ahead.
struct BlockView {
    const char *rows, *columns, *next_rows;
    int num_steps;
};

// Memory to fetch while products are computed: so much with each step of inputs, a line of each DISTANCE bytes.
template <int DISTANCE>
struct Fetch {
    const char* from;
    int bytes_per_step;

    OCTAVO_INLINE void ask_at(int step) const {
        const char* first = from + (ptrdiff_t)step * bytes_per_step;
        for (int offset = 0; offset < bytes_per_step; offset += DISTANCE) prefetch(first + offset);
    }
};

// With few blocks of rows the memory's rate is what counts: the processor fetches the lines between by itself, and each
// that is asked for takes one of the few places for lines under way to a core, which loads need too. With more blocks
// there is time for every line, and what has not come by then would be waited for.
constexpr int kFewBlocks = 2;
template <class Groups, bool IS_FEW_BLOCKS>
constexpr int kFetchDistance = IS_FEW_BLOCKS && !Groups::kIsInt8 ? 512 : kTileLineBytes;

// Adds to `sums` the products of a block, or of the sixteen rows that there are of it, with a panel. `beside(step)` is
// work of another kind: the processor does it while tiles are multiplied.
template <class Groups, int ROW_TILES, int DISTANCE, class Beside>
__attribute__((noinline)) void add_block(char* sums, bool goes_on, BlockView view, Fetch<DISTANCE> fetch,
                                         Beside beside) {
    const auto address_of = [&](int sum) __attribute__((always_inline)) {
        return sums + sum / 2 * kTileRows * kPanelSumBytes + sum % 2 * kTileLineBytes;
    };
    unroll<2 * ROW_TILES>([&](auto sum) __attribute__((always_inline)) {
        constexpr int k = decltype(sum)::value;
        if (goes_on)
            load_tile<k>(address_of(k), kPanelSumBytes);
        else
            clear_tile<k>();
    });
    for (int step = 0; step < view.num_steps; ++step) {
        const char* rows = view.rows + step * kBlockStepBytes;
        const char* columns = view.columns + step * kStepBytes;
        fetch.ask_at(step);
        fetch_into_first_level(step + 1 < view.num_steps ? rows + kBlockStepBytes : view.next_rows,
                               Int<ROW_TILES * kTileRows>{});
        load_tile<kFirstColumnTile>(columns, kPanelGroupBytes);
        load_tile<kFirstRowTile>(rows, kTileLineBytes);
        add_tile_products<Groups, 0, kFirstRowTile, kFirstColumnTile>();
        load_tile<kFirstColumnTile + 1>(columns + kTileLineBytes, kPanelGroupBytes);
        add_tile_products<Groups, 1, kFirstRowTile, kFirstColumnTile + 1>();
        if constexpr (ROW_TILES == 2) {
            load_tile<kFirstRowTile + 1>(rows + kTileRows * kTileLineBytes, kTileLineBytes);
            add_tile_products<Groups, 2, kFirstRowTile + 1, kFirstColumnTile>();
            add_tile_products<Groups, 3, kFirstRowTile + 1, kFirstColumnTile + 1>();
        }
        beside(step);
    }
    unroll<2 * ROW_TILES>([&](auto sum) __attribute__((always_inline)) {
        store_tile<decltype(sum)::value>(address_of(decltype(sum)::value), kPanelSumBytes);
    });
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
    const TileView rows[1] = {{inputs.data, kTileLineBytes, kBlockStepBytes}};
    TileView columns[2 * NUM_PANELS];
    for (int j = 0; j < 2 * NUM_PANELS; ++j)
        columns[j] = {weight.data + (panel + j / 2) * weight.panel_bytes + j % 2 * kTileLineBytes, kPanelGroupBytes,
                      kStepBytes};
    tile_products<Groups, 1, 2 * NUM_PANELS>(sums, NUM_PANELS * kPanelSumBytes, false, rows, columns,
                                             weight.num_groups / kTileGroups);
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

// The products of one panel with a chunk of rows, block by block.
template <class Groups, int DISTANCE>
struct PanelProducts {
    const Panels& weight;
    const Inputs& inputs;
    int panel;
    Range rows;
    char* sums;            // [rows][32]
    Fetch<DISTANCE> next;  // of the next panel

    OCTAVO_INLINE const char* rows_of(int block, int step) const {
        return input_row(inputs.data, rows.first + block * kBlockRows, inputs.stride).first + step * kBlockStepBytes;
    }

    template <class Beside>
    OCTAVO_INLINE void add(int block, int next_block, Range steps, Beside&& beside) {
        const BlockView view = {rows_of(block, steps.first),
                                weight.data + panel * weight.panel_bytes + steps.first * kStepBytes,
                                rows_of(next_block, steps.first), steps.end - steps.first};
        const Fetch<DISTANCE> fetch = next;
        next.from += view.num_steps * next.bytes_per_step;
        char* to = sums + block * kBlockSumBytes;
        if (rows.end - rows.first - block * kBlockRows > kTileRows)
            add_block<Groups, 2>(to, steps.first > 0, view, fetch, beside);
        else
            add_block<Groups, 1>(to, steps.first > 0, view, fetch, beside);
    }
};

template <bool IS_FEW_BLOCKS, class Groups, class Epilogue>
OCTAVO_INLINE void multiply_blocks(const Claim& claim, int item, const Panels& weight, int panel, const Inputs& inputs,
                                   Range rows, Epilogue& epilogue) {
    alignas(64) char sums[kMaxChunkRows * kPanelSumBytes];
    const int num_steps = weight.num_groups / kTileGroups, num_blocks = divided_up(rows.end - rows.first, kBlockRows);
    const int num_parts = num_blocks > 1 ? divided_up(num_steps, kStepsAtOnce) : 1;
    const int bytes_per_step =
        divided_up(divided_up((int)weight.panel_bytes, num_steps * num_blocks), kTileLineBytes) * kTileLineBytes;
    PanelProducts<Groups, kFetchDistance<Groups, IS_FEW_BLOCKS>> products = {
        weight, inputs, panel, rows, sums, {weight.data + (panel + 1) * weight.panel_bytes, bytes_per_step}};
    for (int part = 0; part + 1 < num_parts; ++part)
        for (int block = 0; block < num_blocks; ++block)
            products.add(block, (block + 1) % num_blocks, share_of(num_steps, part, num_parts), [](int) {});
    const Range last_steps = share_of(num_steps, num_parts - 1, num_parts);
    products.add(0, at_most(1, num_blocks - 1), last_steps, [](int) {});
    claim.write(item, [&]() __attribute__((always_inline)) {
        const auto hand_on_rows = [&](int block, Range of_block) __attribute__((always_inline)) {
            const int first_row = block * kBlockRows + of_block.first;
            hand_on<Groups>(sums + first_row * kPanelSumBytes, kPanelSumBytes, panel, rows.first + first_row,
                            at_most(rows.end - rows.first - first_row, of_block.end - of_block.first), epilogue);
        };
        // The sums of a block are handed on while the next one is multiplied.
        for (int block = 1; block < num_blocks; ++block)
            products.add(block, at_most(block + 1, num_blocks - 1), last_steps,
                         [&](int step) __attribute__((always_inline)) {
                             hand_on_rows(block - 1, share_of(kBlockRows, step, last_steps.end - last_steps.first));
                         });
        hand_on_rows(num_blocks - 1, {0, kBlockRows});
    });
}

// What lies beyond the rows in memory is read and its results are dropped.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_item(const Claim& claim, int item, const Panels& weight, int panel, const Inputs& inputs,
                                 Range rows, bool, Epilogue& epilogue) {
    if (rows.end - rows.first <= kFewBlocks * kBlockRows)
        multiply_blocks<true, Groups>(claim, item, weight, panel, inputs, rows, epilogue);
    else
        multiply_blocks<false, Groups>(claim, item, weight, panel, inputs, rows, epilogue);
}

}  // namespace
}  // namespace octavo
