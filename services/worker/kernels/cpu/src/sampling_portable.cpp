// The sampler's row kernels for processors of any kind.
#include "sampling.hpp"

namespace octavo {

const RowKernels& portable_row_kernels() { return kRowKernels; }

}  // namespace octavo
