// The sampler's row kernels for processors with AVX-512.
#define OCTAVO_AVX512
#include "sampling.hpp"

namespace octavo {

const RowKernels& avx512_row_kernels() {
    static constexpr RowKernels kKernels = row_kernels_of("avx512");
    return kKernels;
}

}  // namespace octavo
