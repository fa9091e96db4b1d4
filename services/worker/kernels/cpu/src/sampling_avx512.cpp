// The sampler's row kernels for processors with AVX-512.
#define OCTAVO_AVX512
#include "sampling.hpp"

namespace octavo {

const RowKernels& avx512_row_kernels() { return kRowKernels; }

}  // namespace octavo
