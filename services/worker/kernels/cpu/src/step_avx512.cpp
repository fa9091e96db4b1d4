// The step for processors with AVX-512 and its products of bfloat16 pairs.
#define OCTAVO_AVX512
#include "step.hpp"

namespace octavo {

const Kernels& avx512_kernels() {
    static constexpr Kernels kKernels = kernels_of("avx512_bf16");
    return kKernels;
}

}  // namespace octavo
