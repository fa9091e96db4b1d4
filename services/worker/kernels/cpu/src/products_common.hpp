// Ranges of work and rows of inputs: what all ways of multiplying share.
#pragma once

#include "plan.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

template <class Value>
constexpr Value at_most(Value value, Value limit) {
    return value < limit ? value : limit;
}

OCTAVO_INLINE Range share_of(int count, int thread, int num_threads) {
    return {(int)((int64_t)count * thread / num_threads), (int)((int64_t)count * (thread + 1) / num_threads)};
}

constexpr int divided_up(int count, int divisor) { return (count + divisor - 1) / divisor; }

// A product's items: tiles of rows in chunks, and of a chunk panel after panel, of which an item is one with one tile.
// Rows are divided in multiples of `rows_together`.
struct Tiling {
    struct Place {
        int panel;
        Range rows;
        bool is_first_tile;  // of its chunk with this panel
    };

    int num_rows, num_panels, num_tiles, tiles_of_chunk, rows_together;

    int num_items() const { return num_panels * num_tiles; }

    OCTAVO_INLINE Place place_of(int item) const {
        const int chunk = item / (num_panels * tiles_of_chunk), first_tile = chunk * tiles_of_chunk;
        const int count = at_most(num_tiles - first_tile, tiles_of_chunk);
        const int in_chunk = item - num_panels * first_tile, tile = first_tile + in_chunk % count;
        const Range parts = share_of(divided_up(num_rows, rows_together), tile, num_tiles);
        const Range rows = {parts.first * rows_together, at_most(parts.end * rows_together, num_rows)};
        return {in_chunk / count, rows, tile == first_tile};
    }
};

constexpr int kGroupBytes = 4;
constexpr int kPanelGroupBytes = kPanelColumns * kGroupBytes;  // a group of inputs of all columns

constexpr int kLineBytes = 64;
#if defined(OCTAVO_AMX)
// Rows lie in blocks, and of a block all first lines lie side by side, then all second ones: sixteen of them are a tile,
// and a block's tiles follow one another in the order in which they are read.
constexpr int kBlockRows = kMaxRowsAtOnce;
#else
constexpr int kBlockRows = 1;
#endif

// One row of inputs of a product: lines of 64 bytes, `kBlockRows` lines apart.
struct InputRow {
    char* first;

    OCTAVO_INLINE char* at(ptrdiff_t byte) const {
        return first + byte / kLineBytes * (kBlockRows * kLineBytes) + byte % kLineBytes;
    }
    OCTAVO_INLINE bf16* value(ptrdiff_t index) const { return (bf16*)at(index * (ptrdiff_t)sizeof(bf16)); }
};

// The row with this index of rows of `stride` bytes, which are whole lines.
OCTAVO_INLINE InputRow input_row(const void* rows, ptrdiff_t index, ptrdiff_t stride) {
    return {(char*)rows + index / kBlockRows * kBlockRows * stride + index % kBlockRows * kLineBytes};
}

// Memory that is read once comes fastest where each step of reading asks for a part of each of so many pages.
constexpr ptrdiff_t kPageBytes = 4096;
constexpr int kPages = 8;

// Where the part begins that the step of reading from `step` on asks for, of the page `distance` pages further: an eighth of
// a page lies between those of two pages, so that each page has come from its beginning when it is read.
template <ptrdiff_t STEP_BYTES>
OCTAVO_INLINE const char* part_of_page(const char* step, int distance) {
    const char* page = (const char*)((uintptr_t)step / kPageBytes * kPageBytes);
    const char* first = page + (uintptr_t)step % kPageBytes / STEP_BYTES * (STEP_BYTES / kPages);
    return first + distance * kPageBytes + (kPages - 1 - distance) * (kPageBytes / kPages);
}

// Where a thread's reading of a weight ends, and where it goes on; null when nothing comes after it.
struct Onward {
    const char *end, *next;
};

// Rows of inputs in the type of the weight that they are multiplied with.
struct Inputs {
    const char* data;
    ptrdiff_t stride;  // in bytes
};

}  // namespace
}  // namespace octavo
