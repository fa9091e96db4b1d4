#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace octavo {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kArenaPieceBytes = 0;  // Each allocation is a piece, so that an access past its end is found.
#else
constexpr size_t kArenaPieceBytes = size_t{32} << 20;
#endif

size_t rounded_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Buffer::Buffer(size_t num_bytes) { reserve(num_bytes); }

void Buffer::Free::operator()(void* memory) const { std::free(memory); }

void Buffer::reserve(size_t num_bytes) {
    if (num_bytes <= num_bytes_) return;
    memory_.reset();
    num_bytes_ = 0;
    const size_t alignment = num_bytes >= kHugePageBytes ? kHugePageBytes : kAlignment;
    const size_t size = rounded_up(num_bytes, alignment);
    memory_.reset(std::aligned_alloc(alignment, size));
    if (!memory_) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHugePageBytes) madvise(memory_.get(), size, MADV_HUGEPAGE);
#endif
    std::memset(memory_.get(), 0, size);
    num_bytes_ = size;
}

void forbid_gap([[maybe_unused]] void* end_of_gap) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION((char*)end_of_gap - kGapBytes, kGapBytes);
#endif
}

void* Arena::allocate(size_t num_bytes) {
    const size_t size = rounded_up(num_bytes, kAlignment);
    if (size > free_bytes_) {
        free_bytes_ = std::max(size, kArenaPieceBytes);
        pieces_.emplace_back(free_bytes_);
        free_ = pieces_.back().as<char>();
    }
    void* allocated = free_;
    free_ += size;
    free_bytes_ -= size;
    return allocated;
}

}  // namespace octavo
