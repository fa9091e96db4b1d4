// Ranges of work and rows of inputs: what all ways of multiplying share.
#pragma once

#include "plan.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

constexpr int at_most(int value, int limit) { return value < limit ? value : limit; }

OCTAVO_INLINE Range share_of(int count, int thread, int num_threads) {
    return {(int)((int64_t)count * thread / num_threads), (int)((int64_t)count * (thread + 1) / num_threads)};
}

constexpr int divided_up(int count, int divisor) { return (count + divisor - 1) / divisor; }

// A product's items: tiles of rows in chunks, and of a chunk panel after panel, of which an item is one with one tile.
struct Tiling {
    struct Place {
        int panel;
        Range rows;
        bool is_first_tile;  // of its chunk with this panel
    };

    int num_rows, num_panels, num_tiles, tiles_of_chunk;

    int num_items() const { return num_panels * num_tiles; }

    OCTAVO_INLINE Place place_of(int item) const {
        const int chunk = item / (num_panels * tiles_of_chunk), first_tile = chunk * tiles_of_chunk;
        const int count = at_most(num_tiles - first_tile, tiles_of_chunk);
        const int in_chunk = item - num_panels * first_tile, tile = first_tile + in_chunk % count;
        return {in_chunk / count, share_of(num_rows, tile, num_tiles), tile == first_tile};
    }
};

constexpr int kGroupBytes = 4;
constexpr int kPanelGroupBytes = kPanelColumns * kGroupBytes;  // a group of inputs of all columns

// Rows of inputs in the type of the weight that they are multiplied with.
struct Inputs {
    const char* data;
    ptrdiff_t stride;  // in bytes
};

}  // namespace
}  // namespace octavo
