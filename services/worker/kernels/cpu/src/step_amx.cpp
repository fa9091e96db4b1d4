// The step for processors with tiles of bfloat16 products (Intel AMX) beside AVX-512.
#define OCTAVO_AVX512
#define OCTAVO_AMX
#include "step.hpp"

namespace octavo {

const Kernels& amx_kernels() {
    static constexpr Kernels kKernels = kernels_of("amx_bf16");
    return kKernels;
}

}  // namespace octavo
