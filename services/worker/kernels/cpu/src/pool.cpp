#include "pool.hpp"

#include <chrono>

namespace octavo {
namespace {

// Long enough for the gap between two operations of a step. A thread that spins longer takes the core from a process
// that has work to do, and then all wait for whatever the system runs instead of this step.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kSpinsBetweenClocks = 64;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int num_threads, int num_phases) : num_threads_(num_threads), items_(num_phases) {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    is_stopping_ = true;
    generation_.value.fetch_add(1, std::memory_order_release);
    generation_.value.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int spin = 0; spin < kSpinsBetweenClocks; ++spin) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    value.wait(old, std::memory_order_acquire);
}

void Pool::barrier() {
    if (num_threads_ == 1) return;
    const uint32_t number = barriers_.value.load(std::memory_order_acquire);
    if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 < (uint32_t)num_threads_) {
        wait_while(barriers_.value, number);
        return;
    }
    arrived_.value.store(0, std::memory_order_relaxed);
    barriers_.value.store(number + 1, std::memory_order_release);
    barriers_.value.notify_all();
}

int Pool::next_item(int phase) {
    return (int)items_[(size_t)phase].value.fetch_add(1, std::memory_order_relaxed);
}

void Pool::run(const std::function<void(int)>& work) {
    for (Counter& counter : items_) counter.value.store(0, std::memory_order_relaxed);
    work_ = &work;
    generation_.value.fetch_add(1, std::memory_order_release);
    generation_.value.notify_all();
    work(0);
    // All threads come to this barrier, so none is still at work when the caller goes on.
    barrier();
}

void Pool::serve(int thread) {
    for (uint32_t seen = 0;; ++seen) {
        wait_while(generation_.value, seen);
        if (is_stopping_) return;
        (*work_)(thread);
        barrier();
    }
}

}  // namespace octavo
