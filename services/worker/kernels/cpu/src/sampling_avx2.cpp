// The sampler's row kernels for processors with AVX2.
#define OCTAVO_AVX2
#include "sampling.hpp"

namespace octavo {

const RowKernels& avx2_row_kernels() { return kRowKernels; }

}  // namespace octavo
