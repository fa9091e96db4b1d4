#include "collective.hpp"

#include <chrono>
#include <stdexcept>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// As long as threads of one process spin for each other: ranks that are alike come within that time.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kSpinsBetweenClocks = 64;
// A group that was broken by a rank that cannot wake others, or from Python, is noticed after so long.
constexpr long kSleepNanoseconds = 5'000'000;
// The word of the group once this rank was waited for in vain: this number and the rank.
constexpr uint32_t kTooLate = 2;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps until the word is no longer `seen`, or for a while.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec most = {0, kSleepNanoseconds};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &most, nullptr, 0);
#else
    (void)word, (void)seen;
    std::this_thread::sleep_for(kSpinTime);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace

Collective::Collective(char* memory, int rank, int num_ranks, size_t parts_offset, size_t part_bytes,
                       double timeout_seconds)
    : memory_(memory),
      rank_(rank),
      num_ranks_(num_ranks),
      parts_offset_(parts_offset),
      part_bytes_(part_bytes),
      timeout_seconds_(timeout_seconds) {
    if (rank < 0 || rank >= num_ranks) throw std::invalid_argument("A rank is one of those of its group.");
    if (parts_offset < 64 * ((size_t)num_ranks + 1) || parts_offset % 64 || part_bytes % 64)
        throw std::invalid_argument("Parts lie behind the words, in whole lines.");
}

void Collective::meet() {
    if (is_broken()) return;
    const uint32_t count = word(rank_).load(std::memory_order_relaxed) + 1;
    word(rank_).store(count, std::memory_order_release);
    wake_all(word(rank_));
    for (int rank = 0; rank < num_ranks_; ++rank) wait_for(rank, count);
    if (group().load(std::memory_order_acquire)) is_broken_.store(true, std::memory_order_relaxed);
}

void Collective::wait_for(int rank, uint32_t count) {
    Word& arrived = word(rank);
    // Counts wrap around; a rank is ahead by one at most.
    const auto has_come = [&] { return (int32_t)(arrived.load(std::memory_order_acquire) - count) >= 0; };
    if (has_come()) return;
    const auto start = Clock::now(), end_of_spin = start + kSpinTime;
    const auto deadline = start + std::chrono::duration<double>(timeout_seconds_);
    while (!has_come() && !group().load(std::memory_order_acquire)) {
        const auto now = Clock::now();
        if (now > deadline) {
            uint32_t unbroken = 0;
            group().compare_exchange_strong(unbroken, kTooLate + (uint32_t)rank);
        } else if (now < end_of_spin) {
            for (int spin = 0; spin < kSpinsBetweenClocks && !has_come(); ++spin) pause();
        } else {
            const uint32_t seen = arrived.load(std::memory_order_acquire);
            if ((int32_t)(seen - count) < 0) sleep_on(arrived, seen);
        }
    }
    wait_seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace octavo
