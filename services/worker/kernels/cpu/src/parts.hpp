// Sums over the ranks of a tensor-parallel group.
//
// Owns the order of the sum: that of the ranks, on all of them, so that all hold the same bits. It must not know which
// operation's parts are added.
#pragma once

#include "collective.hpp"
#include "plan.hpp"
#include "products_common.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

bool is_broken(const Step& step) { return step.collective && step.collective->is_broken(); }

// Returns when all threads of all ranks have come here, or when the group is broken.
void meet_ranks(const Step& step, int thread) {
    step.team->barrier();
    if (thread == 0) step.collective->meet();
    step.team->barrier();
}

// Adds the parts of all ranks, and what came in unless `residual` is null, for the rows that this thread norms next.
void add_parts(const Step& step, int thread, const float* residual, float* produced) {
    const Collective& collective = *step.collective;
    const int stride = step.model->shape.hidden_stride;
    meet_ranks(step, thread);
    const Range rows = share_of(step.batch->num_tokens, thread, step.team->num_threads());
    for (ptrdiff_t i = (ptrdiff_t)rows.first * stride; i < (ptrdiff_t)rows.end * stride; i += kLanes) {
        Vec sum = load(collective.part_to_read(0) + i);
        for (int rank = 1; rank < collective.num_ranks(); ++rank)
            sum = sum + load(collective.part_to_read(rank) + i);
        store(produced + i, residual ? load(residual + i) + sum : sum);
    }
}

}  // namespace
}  // namespace octavo
