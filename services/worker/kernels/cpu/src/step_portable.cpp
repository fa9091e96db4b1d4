// The step for any processor.
#include "step.hpp"

namespace octavo {

const Kernels& portable_kernels() {
    static constexpr Kernels kKernels = kernels_of("portable");
    return kKernels;
}

}  // namespace octavo
