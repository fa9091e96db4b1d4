// Ranges of work: what all ways of multiplying share.
#pragma once

#include "plan.hpp"
#include "simd.hpp"

namespace octavo {
namespace {

constexpr int kChunkPanels = 4;

struct Range {
    int first, end;
};

constexpr int at_most(int value, int limit) { return value < limit ? value : limit; }

OCTAVO_INLINE Range share_of(int count, int thread, int num_threads) {
    return {(int)((int64_t)count * thread / num_threads), (int)((int64_t)count * (thread + 1) / num_threads)};
}

constexpr int kPanelPairBytes = kPanelColumns * 2 * sizeof(bf16);  // a pair of inputs of all columns

}  // namespace
}  // namespace octavo
