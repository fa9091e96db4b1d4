// How a thread goes through a step: phase after phase, in each of which it claims items until none are left.
//
// Owns the order of claiming, helping and waiting. It must not know what an item is. What a thread computes after a phase
// is over may come from memory that others write already; such results are never taken, so that nobody sees them.
#pragma once

#include "plan.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

// One thread's way through a step.
struct Walk {
    Team& team;
    int thread;
    uint64_t next_item;
    const Panels* next_weight = nullptr;  // what is read after the phase under way
    Ahead ahead;                          // and what of it nobody has asked for yet

    Walk(Team& team, int thread) : team(team), thread(thread), next_item(team.first_item()) {}

    Phase next_phase(int num_items) {
        const uint64_t first = next_item;
        next_item += (uint64_t)num_items;
        return {first, next_item, team.now()};
    }
};

// Items of a phase that a thread computes now.
struct Claim {
    Team& team;
    const Phase& phase;
    int thread;
    Range items;
    Shares shares;

    OCTAVO_INLINE bool is_taken(int item) const { return team.is_taken(phase, item); }

    // Has the results of an item written, unless another has done so.
    template <class Write>
    OCTAVO_INLINE void write(int item, Write&& write_results) const {
        if (!team.take(phase, item)) return;
        write_results();
        team.finish(thread, 1);
    }
};

// Goes through a phase: `prepare()` before the first item, and `compute(claim)` for claims of at least `grain` items where
// there are as many. Returns when all items are done.
template <class Prepare, class Compute>
OCTAVO_INLINE void run_phase(Walk& walk, int num_items, int grain, Prepare&& prepare, Compute&& compute) {
    Team& team = walk.team;
    const Phase phase = walk.next_phase(num_items);
    if (team.is_over(phase)) return;
    const Shares shares = {(uint64_t)num_items, grain, team.num_threads()};
    prepare();
    for (Range items; (items = team.claim(phase, walk.thread, grain)).first < items.end;)
        compute(Claim{team, phase, walk.thread, items, shares});
    if (team.wait_for_others(phase, walk.ahead)) return;
    // Whoever holds the rest goes through it from its beginning.
    for (int item = num_items - 1; item >= 0 && !team.is_over(phase); --item)
        if (!team.is_taken(phase, item)) compute(Claim{team, phase, walk.thread, {item, item + 1}, shares});
    team.wait(phase);
}

// A phase of items so short that it does not matter who is in the midst of one.
template <class Compute>
OCTAVO_INLINE void run_short_items(Walk& walk, int num_items, Compute&& compute) {
    run_phase(walk, num_items, 1, [] {}, [&](const Claim& claim) {
        for (int item = claim.items.first; item < claim.items.end; ++item) claim.write(item, [&] { compute(item); });
    });
}

}  // namespace
}  // namespace octavo
