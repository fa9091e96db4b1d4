// A persistent team of threads: spins for a while, then sleeps.
//
// Owns waking, waiting and dividing. It must not know what the threads compute.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "plan.hpp"

namespace octavo {

class Pool final : public Team {
   public:
    Pool(int num_threads, int num_phases);
    ~Pool() override;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const override { return num_threads_; }
    void barrier() override;
    int next_item(int phase) override;

    // Runs `work(thread)` on all threads, the caller's among them, and returns when all are done.
    void run(const std::function<void(int)>& work);

   private:
    struct alignas(64) Counter {
        std::atomic<uint32_t> value{0};
    };

    void serve(int thread);
    static void wait_while(const std::atomic<uint32_t>& value, uint32_t old);

    const int num_threads_;
    std::vector<Counter> items_;
    Counter generation_;
    Counter arrived_;
    Counter barriers_;
    const std::function<void(int)>* work_ = nullptr;
    bool is_stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
