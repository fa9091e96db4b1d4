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

// With fewer rows there is less to load, multiply and store; what comes out of a row does not depend on how many there are.
constexpr TileShapes shapes_for(int num_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.line_bytes[tile] = kTileLineBytes;
        shapes.rows[tile] = (uint8_t)(tile >= kFirstColumnTile ? kTileGroups : num_rows);
    }
    return shapes;
}

// Attention keeps its shapes from its scores, with thirty-two inputs at once, to its sums of values, of which a tile of
// tokens has sixteen: it has registers of its own for those. To load other shapes takes as long as eleven products.
constexpr int kQueryTile = 4, kWeightTile = 5, kKeyTile = 6, kValueTile = 7;

constexpr TileShapes attention_shapes_for(int num_rows) {
    TileShapes shapes = shapes_for(num_rows);
    shapes.line_bytes[kWeightTile] = kTileLineBytes / 2;
    shapes.rows[kValueTile] = kTileGroups / 2;
    return shapes;
}

// The shapes for up to sixteen rows.
struct ShapesByRows {
    TileShapes of_rows[kTileRows];

    constexpr explicit ShapesByRows(TileShapes (*shapes_of)(int)) : of_rows{} {
        for (int i = 0; i < kTileRows; ++i) of_rows[i] = shapes_of(i + 1);
    }
    // Of more rows each tile is full.
    constexpr const TileShapes& operator()(int num_rows) const {
        return of_rows[(num_rows < kTileRows ? num_rows : kTileRows) - 1];
    }
};

alignas(64) constexpr ShapesByRows kShapesByRows(shapes_for);
alignas(64) constexpr ShapesByRows kAttentionShapesByRows(attention_shapes_for);

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

// For rows, keys and values that come from the second-level cache and are used once before others come: the hint keeps
// them from driving out of the first-level cache what is read again before long.
template <int TILE>
OCTAVO_INLINE void load_passing_tile(const void* from, ptrdiff_t line_stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(line_stride), "i"(TILE) : "memory");
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

}  // namespace
}  // namespace octavo
