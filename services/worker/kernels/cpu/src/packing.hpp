// Weights in the order in which kernels read them.
//
// Owns the bytes of a panel. It must not know what its columns mean.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.hpp"

namespace octavo {

// Which row of a weight becomes which column, in whole panels; null stands for a column of zeros.
using Columns = std::vector<const bf16*>;

// Returns panels for these columns, without memory.
Panels layout_of(ValueType type, int64_t num_columns, int64_t num_inputs);

// Floats that packing one panel needs to work in.
size_t panel_scratch_size(const Panels& panels);

// Packs one panel into the weight's memory; num_inputs are those that each row has.
void pack_panel(const Panels& panels, char* data, int64_t panel, const Columns& columns, int64_t num_inputs,
                float* scratch);

}  // namespace octavo
