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
constexpr int kStepsAtOnce = 18;
constexpr int kFewRows = kTileRows;
constexpr int kPanelSumBytes = kPanelColumns * 4;  // sums of one row
constexpr int kBlockSumBytes = kBlockRows * kPanelSumBytes;
constexpr ptrdiff_t kStepBytes = kTileGroups * kPanelGroupBytes;
constexpr ptrdiff_t kBlockStepBytes = kBlockRows * kTileLineBytes;

// How much of a weight that is read once is asked for before it is read.
constexpr ptrdiff_t kBytesAskedFor = kPages * kPageBytes;

static_assert(kBlockRows == 2 * kTileRows);

// Of a few rows a tile has no more than there are: with one it takes less time to load and to multiply.
OCTAVO_INLINE void begin_products(int num_rows) { load_shapes(kShapesByRows(num_rows)); }
OCTAVO_INLINE void end_products() { release_tiles(); }
OCTAVO_INLINE int panels_at_once(int) { return 1; }

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

// Rows and columns over some steps of inputs.
struct BlockView {
    const char *rows, *columns;
    int num_steps, block;
};

// The next panel, of which each step of a block asks for some lines. With many blocks there is time for every line, and what
// has not come by then would be waited for.
struct NextPanelFetch {
    const char* from;
    int bytes_per_step;

    NextPanelFetch(const Panels& weight, int panel, int num_steps, int num_blocks)
        : from(weight.data + (panel + 1) * weight.panel_bytes),
          bytes_per_step(divided_up(divided_up((int)weight.panel_bytes, num_steps * num_blocks), kTileLineBytes) *
                         kTileLineBytes) {}

    OCTAVO_INLINE void ask_with(int step, const BlockView&) const {
        const char* first = from + (ptrdiff_t)step * bytes_per_step;
        for (int offset = 0; offset < bytes_per_step; offset += kTileLineBytes) prefetch(first + offset);
    }
    OCTAVO_INLINE void go_on(int num_steps) { from += num_steps * bytes_per_step; }
};

// Asks for the lines of a weight that is read once: with each step of inputs for a part of each of eight pages of memory,
// from the one that is read on, so that a page is asked for by eighths while those before it are read. Where a thread's
// reading of this weight ends it goes on with the next weight's. With two passes over a panel each asks for half the lines.
//
// Lines that are asked for in the order in which they are read come no faster than the processor fetches them by itself:
// it does so a page at a time, and begins anew with each.
template <int NUM_PASSES>
class SpreadFetch {
   public:
    explicit SpreadFetch(const Onward& onward)
        : end_(onward.end), past_end_(onward.next ? onward.next - onward.end : 0) {}

    OCTAVO_INLINE void ask_with(int step, const BlockView& view) const {
        ask_from(view.columns + step * kStepBytes, view.block);
    }
    OCTAVO_INLINE void go_on(int) {}

    // With the step of inputs that begins here.
    OCTAVO_INLINE void ask_from(const char* step, int pass) const {
        unroll<kPages / NUM_PASSES>([&](auto number) __attribute__((always_inline)) {
            const int d = decltype(number)::value * NUM_PASSES + pass;
            const char* from = part_of_page<kStepBytes>(step, d);
            from += from >= end_ ? past_end_ : 0;
            fetch_into_first_level(from, Int<kStepBytes / kPages / kTileLineBytes>{});
        });
    }

   private:
    const char* end_;
    ptrdiff_t past_end_;
};

// Adds to `sums` the products of a block, or of the sixteen rows that there are of it, with a panel. `beside(step)` is
// work of another kind: the processor does it while tiles are multiplied.
template <class Groups, int ROW_TILES, class Fetch, class Beside>
__attribute__((noinline)) void add_block(char* sums, bool goes_on, BlockView view, Fetch fetch, Beside beside) {
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
        fetch.ask_with(step, view);
        load_tile<kFirstColumnTile>(columns, kPanelGroupBytes);
        load_passing_tile<kFirstRowTile>(rows, kTileLineBytes);
        add_tile_products<Groups, 0, kFirstRowTile, kFirstColumnTile>();
        load_tile<kFirstColumnTile + 1>(columns + kTileLineBytes, kPanelGroupBytes);
        add_tile_products<Groups, 1, kFirstRowTile, kFirstColumnTile + 1>();
        if constexpr (ROW_TILES == 2) {
            load_passing_tile<kFirstRowTile + 1>(rows + kTileRows * kTileLineBytes, kTileLineBytes);
            add_tile_products<Groups, 2, kFirstRowTile + 1, kFirstColumnTile>();
            add_tile_products<Groups, 3, kFirstRowTile + 1, kFirstColumnTile + 1>();
        }
        beside(step);
    }
    unroll<2 * ROW_TILES>([&](auto sum) __attribute__((always_inline)) {
        store_tile<decltype(sum)::value>(address_of(decltype(sum)::value), kPanelSumBytes);
    });
}

// Hands rows of sums [num_rows][32] that lie `stride` bytes apart on to the epilogue of a panel.
template <class Groups, class Write>
OCTAVO_INLINE void hand_on(const char* sums, int stride, int first_row, int num_rows, const Write& write) {
    using Sum = typename Groups::Sum;
    for (int i = 0; i < num_rows; ++i) {
        const char* from = sums + i * stride;
        write(first_row + i, load_as<Sum>(from), load_as<Sum>(from + kTileLineBytes));
    }
}

// Sums [16][32] of up to sixteen rows with a panel.
template <class Groups>
__attribute__((noinline)) void multiply_panel(char* sums, const char* rows, const char* columns, int num_steps,
                                              SpreadFetch<1> fetch) {
    clear_tile<0>();
    clear_tile<1>();
    for (int step = 0; step < num_steps; ++step, rows += kBlockStepBytes, columns += kStepBytes) {
        fetch.ask_from(columns, 0);
        load_tile<kFirstRowTile>(rows, kTileLineBytes);
        load_tile<kFirstColumnTile>(columns, kPanelGroupBytes);
        add_tile_products<Groups, 0, kFirstRowTile, kFirstColumnTile>();
        load_tile<kFirstColumnTile + 1>(columns + kTileLineBytes, kPanelGroupBytes);
        add_tile_products<Groups, 1, kFirstRowTile, kFirstColumnTile + 1>();
    }
    store_tile<0>(sums, kPanelSumBytes);
    store_tile<1>(sums + kTileLineBytes, kPanelSumBytes);
}

// A few rows: the weight is read once from memory, which is what takes the time.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_few_rows(const Claim& claim, const Panels& weight, const Inputs& inputs, int num_rows,
                                     const Onward& onward, Epilogue& epilogue) {
    alignas(64) char sums[kTileRows * kPanelSumBytes];
    const SpreadFetch<1> fetch(onward);
    for (int panel = claim.items.first; panel < claim.items.end; ++panel) {
        multiply_panel<Groups>(sums, inputs.data, weight.data + panel * weight.panel_bytes,
                               weight.num_groups / kTileGroups, fetch);
        claim.write(panel,
                    [&] { hand_on<Groups>(sums, kPanelSumBytes, 0, num_rows, epilogue.of_panel(panel)); });
    }
}

// The products of one panel with a chunk of rows, block by block.
template <class Groups, class Fetch>
struct PanelProducts {
    const Panels& weight;
    const Inputs& inputs;
    int panel;
    Range rows;
    char* sums;             // [rows][32], or those of one block
    ptrdiff_t block_bytes;  // from the sums of a block to the next one's
    Fetch fetch;

    OCTAVO_INLINE const char* rows_of(int block, int step) const {
        return input_row(inputs.data, rows.first + block * kBlockRows, inputs.stride).first + step * kBlockStepBytes;
    }

    template <class Beside>
    OCTAVO_INLINE void add(int block, Range steps, Beside&& beside) {
        const BlockView view = {rows_of(block, steps.first),
                                weight.data + panel * weight.panel_bytes + steps.first * kStepBytes,
                                steps.end - steps.first, block};
        const Fetch now = fetch;
        fetch.go_on(view.num_steps);
        char* to = sums + block * block_bytes;
        if (rows.end - rows.first - block * kBlockRows > kTileRows)
            add_block<Groups, 2>(to, steps.first > 0, view, now, beside);
        else
            add_block<Groups, 1>(to, steps.first > 0, view, now, beside);
    }
};

template <class Groups, class Fetch, class Epilogue>
OCTAVO_INLINE void multiply_blocks(const Claim& claim, int item, const Panels& weight, int panel, const Inputs& inputs,
                                   Range rows, Fetch fetch, Epilogue& epilogue) {
    alignas(64) char sums[kMaxChunkRows * kPanelSumBytes];
    const int num_steps = weight.num_groups / kTileGroups, num_blocks = divided_up(rows.end - rows.first, kBlockRows);
    const int num_parts = num_blocks > 1 ? divided_up(num_steps, kStepsAtOnce) : 1;
    // Sums that are complete at once are handed on before the next block's take their place, which the first-level cache
    // still holds.
    const ptrdiff_t block_bytes = num_parts > 1 ? kBlockSumBytes : 0;
    PanelProducts<Groups, Fetch> products = {weight, inputs, panel, rows, sums, block_bytes, fetch};
    for (int part = 0; part + 1 < num_parts; ++part)
        for (int block = 0; block < num_blocks; ++block)
            products.add(block, share_of(num_steps, part, num_parts), [](int) {});
    const Range last_steps = share_of(num_steps, num_parts - 1, num_parts);
    products.add(0, last_steps, [](int) {});
    claim.write(item, [&]() __attribute__((always_inline)) {
        // The copies are the functions' own, and so need not be read again for each row.
        const auto hand_on_rows = [sums = (const char*)sums, block_bytes, rows, write = epilogue.of_panel(panel)](
                                      int block, Range of_block) __attribute__((always_inline)) {
            const int first_row = rows.first + block * kBlockRows + of_block.first;
            hand_on<Groups>(sums + block * block_bytes + of_block.first * kPanelSumBytes, kPanelSumBytes, first_row,
                            at_most(rows.end - first_row, of_block.end - of_block.first), write);
        };
        // The sums of a block are handed on while the next one is multiplied.
        for (int block = 1; block < num_blocks; ++block)
            products.add(block, last_steps, [hand_on_rows, block, last_steps](int step) __attribute__((always_inline)) {
                hand_on_rows(block - 1, share_of(kBlockRows, step, last_steps.end - last_steps.first));
            });
        hand_on_rows(num_blocks - 1, {0, kBlockRows});
    });
}

// What lies beyond the rows in memory is read and its results are dropped.
template <class Groups, class Epilogue>
OCTAVO_INLINE void multiply_item(const Claim& claim, int item, const Panels& weight, int panel, const Inputs& inputs,
                                 Range rows, bool, const Onward& onward, Epilogue& epilogue) {
    const int num_blocks = divided_up(rows.end - rows.first, kBlockRows), num_steps = weight.num_groups / kTileGroups;
    if (num_blocks == 1)
        multiply_blocks<Groups>(claim, item, weight, panel, inputs, rows, SpreadFetch<1>(onward), epilogue);
    else if (num_blocks == 2)
        multiply_blocks<Groups>(claim, item, weight, panel, inputs, rows, SpreadFetch<2>(onward), epilogue);
    else
        multiply_blocks<Groups>(claim, item, weight, panel, inputs, rows,
                                NextPanelFetch(weight, panel, num_steps, num_blocks), epilogue);
}

}  // namespace
}  // namespace octavo
