// Products in tiles: sixteen rows with sixteen columns over sixteen groups of inputs in one instruction (Intel AMX).
//
// Owns tile registers and their shapes. It must not know models. A panel of a weight and a tile of keys or values
// already lie in memory as tiles do: a line of a tile is a group of inputs of sixteen columns. An instruction adds the
// products of a row in an order of its own that depends on nothing else, so results do not depend on the batch here
// either; those in bfloat16 differ in their last bits from those of other instruction sets.
#pragma once

#include "simd.hpp"

namespace octavo {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileLineBytes = 64;
constexpr int kTileGroups = 16;  // of inputs, in one instruction
constexpr int kTileInputs = 2 * kTileGroups;  // in bfloat16

// Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
constexpr int kFirstRowTile = 4, kFirstColumnTile = 6;
constexpr int kSumTiles = 4;

struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t rows[16] = {};
};

// With fewer inputs than thirty-two a row is shorter and there are fewer lines of columns. With fewer rows there is less to
// load, multiply and store; what comes out of a row does not depend on how many there are.
constexpr TileShapes shapes_for(int num_inputs, int num_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        const bool is_row = tile == kFirstRowTile || tile == kFirstRowTile + 1, is_column = tile >= kFirstColumnTile;
        shapes.line_bytes[tile] = (uint16_t)(is_row ? 2 * num_inputs : kTileLineBytes);
        shapes.rows[tile] = (uint8_t)(is_column ? num_inputs / 2 : num_rows);
    }
    return shapes;
}

// The shapes for up to sixteen rows.
struct ShapesByRows {
    TileShapes of_rows[kTileRows];

    constexpr explicit ShapesByRows(int num_inputs) : of_rows{} {
        for (int i = 0; i < kTileRows; ++i) of_rows[i] = shapes_for(num_inputs, i + 1);
    }
    // Of more rows each tile is full.
    constexpr const TileShapes& operator()(int num_rows) const {
        return of_rows[(num_rows < kTileRows ? num_rows : kTileRows) - 1];
    }
};

alignas(64) constexpr ShapesByRows kShapesByRows(kTileInputs);
alignas(64) constexpr ShapesByRows kHalfShapesByRows(kTileInputs / 2);

// Shapes hold for a thread; loading them clears all tiles.
OCTAVO_INLINE void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

// Gives the tiles back, so that the system need not keep them for a thread that is elsewhere.
OCTAVO_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int TILE>
OCTAVO_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE) : "memory");
}

template <int TILE>
OCTAVO_INLINE void load_tile(const void* from, ptrdiff_t line_stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(line_stride), "i"(TILE) : "memory");
}

template <int TILE>
OCTAVO_INLINE void store_tile(void* to, ptrdiff_t line_stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(line_stride), "i"(TILE) : "memory");
}

template <class Groups, int SUM, int ROW, int COLUMN>
OCTAVO_INLINE void add_tile_products() {
    if constexpr (Groups::kIsInt8)
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROW), "i"(COLUMN) : "memory");
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ROW), "i"(COLUMN) : "memory");
}

// Into the first-level cache, unlike `prefetch`.
template <int LINES>
OCTAVO_INLINE void fetch_into_first_level(const char* from, Int<LINES>) {
    unroll<LINES>([&](auto line) __attribute__((always_inline)) {
        __builtin_prefetch(from + decltype(line)::value * kTileLineBytes, 0, 3);
    });
}

// One piece of memory as tiles: where the first begins, how far apart its lines are, and how far apart the tiles of
// successive inputs.
struct TileView {
    const char* first;
    ptrdiff_t line_stride;
    ptrdiff_t input_stride;
};

// Writes the sums of ROWS tiles of rows with COLUMNS tiles of columns to `to`, lines `to_stride` bytes apart and column
// tiles `kTileLineBytes`. Sums that go on begin with what is there.
template <class Groups, int ROWS, int COLUMNS>
__attribute__((noinline)) void tile_products(char* to, ptrdiff_t to_stride, bool goes_on,
                                             const TileView (&rows)[ROWS], const TileView (&columns)[COLUMNS],
                                             int num_steps) {
    static_assert(ROWS * COLUMNS <= kSumTiles);
    const auto address_of = [&](int sum) __attribute__((always_inline)) {
        return to + sum / COLUMNS * kTileRows * to_stride + sum % COLUMNS * kTileLineBytes;
    };
    unroll<ROWS * COLUMNS>([&](auto sum) __attribute__((always_inline)) {
        constexpr int k = decltype(sum)::value;
        if (goes_on)
            load_tile<k>(address_of(k), to_stride);
        else
            clear_tile<k>();
    });
    for (int step = 0; step < num_steps; ++step) {
        // With one tile of rows the registers of the columns take turns; with more, those of the rows.
        unroll<COLUMNS>([&](auto column) __attribute__((always_inline)) {
            constexpr int j = decltype(column)::value, kColumn = kFirstColumnTile + j % 2;
            load_tile<kColumn>(columns[j].first + step * columns[j].input_stride, columns[j].line_stride);
            unroll<ROWS>([&](auto row) __attribute__((always_inline)) {
                constexpr int i = decltype(row)::value, kRow = kFirstRowTile + i % 2;
                // Two tiles of rows stay where they are for all columns.
                if (j == 0 || ROWS > 2)
                    load_tile<kRow>(rows[i].first + step * rows[i].input_stride, rows[i].line_stride);
                add_tile_products<Groups, i * COLUMNS + j, kRow, kColumn>();
            });
        });
    }
    unroll<ROWS * COLUMNS>([&](auto sum) __attribute__((always_inline)) {
        store_tile<decltype(sum)::value>(address_of(decltype(sum)::value), to_stride);
    });
}

}  // namespace
}  // namespace octavo
