// Weights in the order in which kernels read them.
//
// Owns the bytes of a panel and the threads that write them. It must not know what a weight's columns mean.
#pragma once

#include <cstdint>
#include <vector>

#include "memory.hpp"
#include "plan.hpp"

namespace octavo {

// Rows of a weight [num_rows][num_columns] in bfloat16.
struct Matrix {
    const bf16* data;
    int64_t num_rows;
    int64_t num_columns;
};

// Which row of a weight becomes which column, in whole panels; null stands for a column of zeros.
using Columns = std::vector<const bf16*>;

// Packs rows of num_inputs values into memory of the arena.
Panels pack_weight(ValueType type, const Columns& columns, int64_t num_inputs, int num_threads, Arena& arena);

// Inputs of a weight, with those that fill its last group or block.
int padded_inputs(const Panels& panels);

}  // namespace octavo
