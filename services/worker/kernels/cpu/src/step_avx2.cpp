// The step for processors with AVX2 and FMA.
#define OCTAVO_AVX2
#include "step.hpp"

namespace octavo {

const Kernels& avx2_kernels() {
    static constexpr Kernels kKernels = kernels_of("avx2");
    return kKernels;
}

}  // namespace octavo
