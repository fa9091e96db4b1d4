// Sums over the ranks of a tensor-parallel group.
//
// Owns the order of the sum: that of the ranks, on all of them, so that all hold the same bits. It must not know which
// operation's parts are added.
#pragma once

#include "collective.hpp"
#include "phases.hpp"
#include "plan.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

// Returns when all ranks have come here, or when the group is broken. One thread of each rank waits for the other ranks.
void meet_ranks(const Step& step, Walk& walk) {
    run_short_items(walk, 1, [&](int) { step.collective->meet(); });
}

// Adds the parts that all ranks have of an operation's result, and what came in unless `residual` is null.
void add_parts(const Step& step, Walk& walk, int operation, const float* residual, float* produced) {
    const Collective& collective = *step.collective;
    const int stride = step.model->shape.hidden_stride;
    meet_ranks(step, walk);
    run_short_items(walk, step.batch->num_tokens, [&](int row) {
        for (ptrdiff_t i = (ptrdiff_t)row * stride; i < (ptrdiff_t)(row + 1) * stride; i += kLanes) {
            Vec sum = load(collective.part(0, operation) + i);
            for (int rank = 1; rank < collective.num_ranks(); ++rank)
                sum = sum + load(collective.part(rank, operation) + i);
            store(produced + i, residual ? load(residual + i) + sum : sum);
        }
    });
}

}  // namespace
}  // namespace octavo
