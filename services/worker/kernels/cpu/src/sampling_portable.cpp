// The sampler's row kernels for processors of any kind.
#include "sampling.hpp"

namespace octavo {

const RowKernels& portable_row_kernels() {
    static constexpr RowKernels kKernels = row_kernels_of("portable");
    return kKernels;
}

}  // namespace octavo
