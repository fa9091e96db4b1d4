// The sampler's row kernels for processors with AVX2.
#define OCTAVO_AVX2
#include "sampling.hpp"

namespace octavo {

const RowKernels& avx2_row_kernels() {
    static constexpr RowKernels kKernels = row_kernels_of("avx2");
    return kKernels;
}

}  // namespace octavo
