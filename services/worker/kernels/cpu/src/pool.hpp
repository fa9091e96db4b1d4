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
    explicit Pool(int num_threads);
    ~Pool() override;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Makes room for phases of so many items; not while work is under way.
    void reserve_items(size_t max_items);

    // Runs `work(thread)` on the caller's thread, which is number 0, and on those of the others that come before it is
    // done; returns when all are. The work must be complete when any of them comes to its end.
    void run(const std::function<void(int)>& work);
    // The same on all threads.
    void run_on_all(const std::function<void(int)>& work);

    // Returns 0, 1, … to the threads of one run, each number once.
    int64_t next_number() { return next_number_.value.fetch_add(1, std::memory_order_relaxed); }

    int num_threads() const override { return num_threads_; }
    uint64_t first_item() const override { return first_item_; }
    int64_t now() const override;
    Range claim(const Phase& phase, int thread, int grain) override;
    bool is_taken(const Phase& phase, int item) const override;
    bool take(const Phase& phase, int item) override;
    void finish(int thread, int count) override;
    bool is_over(const Phase& phase) const override;
    bool wait_for_others(const Phase& phase, Ahead& ahead) const override;
    void wait(const Phase& phase) const override;

   private:
    enum Seat : uint32_t { kEmpty, kInvited, kTaken };

    struct alignas(64) Counter {
        std::atomic<uint64_t> value{0};
    };
    struct alignas(64) Offer {
        int64_t ended = 0;  // when the thread last had its core back, in nanoseconds
        int64_t left = 0;   // for how many nanoseconds others may still have it
    };
    struct alignas(64) Flag {
        std::atomic<uint32_t> value{0};
    };

    void invite(const std::function<void(int)>& work);
    void offer_core(int thread);
    Range claim_of_share(const Phase& phase, int owner, uint64_t grain);
    void serve(int thread);
    static void wait_while(const std::atomic<uint32_t>& value, uint32_t old);

    const int num_threads_;
    std::vector<int> cores_;  // by thread; empty where the system places threads
    uint64_t first_item_ = 0;
    std::vector<Counter> next_items_;  // of each thread's share, that nobody has claimed
    Counter next_number_;
    std::vector<Counter> num_done_;  // by thread; together the items done since the pool began
    std::vector<Offer> offers_;  // by thread, each read and written by its own alone
    // By item, counted from its phase's first: the end of the last phase in which it was taken.
    std::vector<std::atomic<uint64_t>> takings_;
    Flag generation_;
    std::vector<Flag> seats_;
    const std::function<void(int)>* work_ = nullptr;
    bool is_stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
