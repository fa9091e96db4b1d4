// Where the ranks of a tensor-parallel group meet within a step: memory that their processes share.
//
// Owns waiting for the others, within a bound, and where each rank's part of a sum lies. It must not know what is added
// or how the processes came to share memory. The layout is said a second time in services/worker/exchange.py, which
// makes the memory and computes the same for torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace octavo {

class Collective {
 public:
    // The memory begins with a line of 64 bytes for the group and one for each rank, whose first four bytes are a word:
    // that of the group is 0 while it holds, that of a rank counts its arrivals. From `parts_offset` on lie two times
    // `num_ranks` parts of `part_bytes`. The memory must outlive this object.
    Collective(char* memory, int rank, int num_ranks, size_t parts_offset, size_t part_bytes, double timeout_seconds);

    // Returns when all ranks have come here as often as this one, or when the group is broken. One thread at a time calls
    // it.
    void meet();

    // Begins a step, in which all ranks meet once for each operation and once more. Parts are written before an
    // operation's meeting and read after it. They take turns in two places, so that a rank that goes on writes nothing
    // that another still reads.
    void begin_step() { first_turn_ = word(rank_).load(std::memory_order_relaxed); }
    const float* part(int rank, int operation) const { return place(rank, operation); }
    float* own_part(int operation) const { return place(rank_, operation); }

    // Whether a rank had left or was too late at the last meeting; results since then mean nothing.
    bool is_broken() const { return is_broken_.load(std::memory_order_relaxed); }
    int num_ranks() const { return num_ranks_; }
    size_t part_bytes() const { return part_bytes_; }
    // Time spent waiting for other ranks since the beginning.
    double wait_seconds() const { return wait_seconds_; }

 private:
    using Word = std::atomic<uint32_t>;

    Word& group() const { return *reinterpret_cast<Word*>(memory_); }
    Word& word(int rank) const { return *reinterpret_cast<Word*>(memory_ + 64 * (rank + 1)); }
    float* place(int rank, int operation) const {
        const uint32_t turn = (first_turn_ + (uint32_t)operation) & 1;
        return reinterpret_cast<float*>(memory_ + parts_offset_ +
                                        (size_t)(turn * (uint32_t)num_ranks_ + (uint32_t)rank) * part_bytes_);
    }
    void wait_for(int rank, uint32_t count);

    char* const memory_;
    const int rank_, num_ranks_;
    const size_t parts_offset_, part_bytes_;
    const double timeout_seconds_;
    uint32_t first_turn_ = 0;
    std::atomic<bool> is_broken_{false};
    double wait_seconds_ = 0.0;
};

}  // namespace octavo
