// Ranges of work and rows of inputs: what all ways of multiplying share.
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

constexpr int kGroupBytes = 4;
constexpr int kPanelGroupBytes = kPanelColumns * kGroupBytes;  // a group of inputs of all columns

// Rows of inputs in the type of the weight that they are multiplied with.
struct Inputs {
    const char* data;
    ptrdiff_t stride;  // in bytes
};

}  // namespace
}  // namespace octavo
