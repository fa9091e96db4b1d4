#include "pool.hpp"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <sched.h>
#endif

namespace octavo {
namespace {

// Long enough for the gap between two operations of a step. A thread that spins longer takes the core from a process
// that has work to do, and then all wait for whatever the system runs instead of this step.
constexpr int64_t kSpinNanoseconds = 50'000;
constexpr int kSpinsBetweenClocks = 64;
// How long a thread waits for others before it does their items: this long, or a part of the time that the phase took.
constexpr int64_t kPatienceNanoseconds = 15'000;
constexpr int kPatiencePart = 4;
// How often a thread offers its core to others, which costs 0.2 microseconds where nobody wants it, and the part of its
// time, saved up to a while, that it gives away so: who always wants a core must wait for the system's turns.
constexpr int64_t kNanosecondsBetweenOffers = 100'000;
constexpr int kOfferedPart = 4;
constexpr int64_t kMaxOfferedNanoseconds = 10'000'000;
constexpr auto kSleepTime = std::chrono::microseconds(30);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// Spins until `is_done()` for about so long; whether it is.
template <class IsDone>
bool spin_until(int64_t num_nanoseconds, const IsDone& is_done) {
    const int64_t end = nanoseconds() + num_nanoseconds;
    do {
        for (int spin = 0; spin < kSpinsBetweenClocks; ++spin) {
            if (is_done()) return true;
            pause();
        }
    } while (nanoseconds() < end);
    return is_done();
}

// ---- Cores -----------------------------------------------------------------------------------------------------------

#if defined(__linux__)
std::vector<int> allowed_cores() {
    cpu_set_t allowed;
    std::vector<int> cores;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    return cores;
}

void stay_on(int core) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof(only), &only);
}

// Moves this thread to a core, from which the system may move it again.
void go_to(int core) {
    cpu_set_t allowed;
    if (sched_getcpu() == core || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    stay_on(core);
    sched_setaffinity(0, sizeof(allowed), &allowed);
}
#else
std::vector<int> allowed_cores() { return {}; }
void stay_on(int) {}
void go_to(int) {}
#endif

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads),
      next_items_((size_t)num_threads),
      num_done_((size_t)num_threads),
      offers_((size_t)num_threads),
      seats_((size_t)num_threads) {
    // With a thread for each core each has its own. Left to itself a system wakes two on one core and keeps them there for
    // seconds while another is idle: a virtual machine's idle core can look as if it were taken away (Linux 6.18 on KVM).
    if (num_threads > 1) cores_ = allowed_cores();
    if (cores_.size() != (size_t)num_threads) cores_.clear();
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    is_stopping_ = true;
    generation_.value.fetch_add(1, std::memory_order_release);
    generation_.value.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

// ---- Work ------------------------------------------------------------------------------------------------------------

void Pool::reserve_items(size_t max_items) {
    if (max_items <= takings_.size()) return;
    takings_ = std::vector<std::atomic<uint64_t>>(max_items);
}

void Pool::invite(const std::function<void(int)>& work) {
    work_ = &work;
    // The last share ends with its phase.
    first_item_ = next_items_.back().value.load(std::memory_order_relaxed);
    next_number_.value.store(0, std::memory_order_relaxed);
    if (num_threads_ == 1) return;
    for (Flag& seat : seats_) seat.value.store(kInvited, std::memory_order_release);
    generation_.value.fetch_add(1, std::memory_order_release);
    generation_.value.notify_all();
}

void Pool::run(const std::function<void(int)>& work) {
    invite(work);
    if (!cores_.empty()) go_to(cores_[0]);
    work(0);
    for (int thread = 1; thread < num_threads_; ++thread) {
        std::atomic<uint32_t>& seat = seats_[(size_t)thread].value;
        uint32_t found = kInvited;
        // Who has not come by now need not come.
        if (!seat.compare_exchange_strong(found, kEmpty, std::memory_order_acq_rel) && found == kTaken)
            wait_while(seat, kTaken);
    }
}

void Pool::run_on_all(const std::function<void(int)>& work) {
    invite(work);
    if (!cores_.empty()) go_to(cores_[0]);
    work(0);
    for (int thread = 1; thread < num_threads_; ++thread)
        for (const Seat seat : {kInvited, kTaken}) wait_while(seats_[(size_t)thread].value, seat);
}

void Pool::serve(int thread) {
    if (!cores_.empty()) stay_on(cores_[(size_t)thread]);
    std::atomic<uint32_t>& seat = seats_[(size_t)thread].value;
    for (uint32_t seen = 0;;) {
        wait_while(generation_.value, seen);
        seen = generation_.value.load(std::memory_order_acquire);
        if (is_stopping_) return;
        uint32_t found = kInvited;
        if (!seat.compare_exchange_strong(found, kTaken, std::memory_order_acq_rel)) continue;
        seat.notify_all();
        (*work_)(thread);
        seat.store(kEmpty, std::memory_order_release);
        seat.notify_all();
    }
}

void Pool::wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    const auto has_changed = [&] { return value.load(std::memory_order_acquire) != old; };
    if (!spin_until(kSpinNanoseconds, has_changed)) value.wait(old, std::memory_order_acquire);
}

// ---- Phases ----------------------------------------------------------------------------------------------------------

int64_t Pool::now() const { return nanoseconds(); }

// What a thread wrote in one phase lies in its own caches in the next.
Range Pool::claim(const Phase& phase, int thread, int grain) {
    offer_core(thread);
    for (int i = 0; i < num_threads_; ++i) {
        const Range items = claim_of_share(phase, (thread + i) % num_threads_, (uint64_t)grain);
        if (items.first < items.end) return items;
    }
    return {0, 0};
}

// Processes that share the cores have little to do and are urgent: each first token goes through three of them. Without
// being offered one they get a core when the system takes it from a thread, which is late, and mostly amid an item. Between
// two claims a thread holds nothing that others would wait for, and these do its part.
void Pool::offer_core(int thread) {
#if defined(__linux__)
    Offer& offer = offers_[(size_t)thread];
    const int64_t now = nanoseconds(), since = now - offer.ended;
    if (since < kNanosecondsBetweenOffers) return;
    offer.left = std::min(offer.left + since / kOfferedPart, kMaxOfferedNanoseconds);
    offer.ended = now;
    if (offer.left < 0) return;
    sched_yield();
    offer.ended = nanoseconds();
    offer.left -= offer.ended - now;
#endif
}

// Claims become smaller towards the end, so that all come to it at about the same time.
Range Pool::claim_of_share(const Phase& phase, int owner, uint64_t grain) {
    const Shares shares = {phase.end - phase.first, (int)grain, num_threads_};
    const uint64_t first = phase.first + shares.first_of(owner), end = phase.first + shares.first_of(owner + 1);
    std::atomic<uint64_t>& next_item = next_items_[(size_t)owner].value;
    uint64_t next = next_item.load(std::memory_order_relaxed);
    while (next < end) {
        const uint64_t begin = std::max(next, first), left = end - begin;
        const uint64_t count = std::min(std::max(left / 2 / grain * grain, grain), left);
        if (next_item.compare_exchange_weak(next, begin + count, std::memory_order_relaxed))
            return {(int)(begin - phase.first), (int)(begin + count - phase.first)};
    }
    return {0, 0};
}

bool Pool::is_taken(const Phase& phase, int item) const {
    return takings_[(size_t)item].load(std::memory_order_relaxed) >= phase.end;
}

// Of a phase that is over all items were taken then or later.
bool Pool::take(const Phase& phase, int item) {
    std::atomic<uint64_t>& taking = takings_[(size_t)item];
    uint64_t last = taking.load(std::memory_order_relaxed);
    return last < phase.end && taking.compare_exchange_strong(last, phase.end, std::memory_order_acq_rel);
}

void Pool::finish(int thread, int count) {
    // No other thread writes this one's.
    std::atomic<uint64_t>& num_done = num_done_[(size_t)thread].value;
    num_done.store(num_done.load(std::memory_order_relaxed) + (uint64_t)count, std::memory_order_release);
}

bool Pool::is_over(const Phase& phase) const {
    uint64_t num_done = 0;
    for (const Counter& counter : num_done_) num_done += counter.value.load(std::memory_order_acquire);
    return num_done >= phase.end;
}

bool Pool::wait_for_others(const Phase& phase, Ahead& ahead) const {
    if (is_over(phase)) return true;
    const int64_t spent = nanoseconds() - phase.started;
    return spin_until(std::max(kPatienceNanoseconds, spent / kPatiencePart), [&] {
        ahead.ask_for_some();
        return is_over(phase);
    });
}

// Comes here only while another thread is displaced as it writes an item's results; nobody would wake this one.
void Pool::wait(const Phase& phase) const {
    while (!spin_until(kSpinNanoseconds, [&] { return is_over(phase); })) std::this_thread::sleep_for(kSleepTime);
}

}  // namespace octavo
