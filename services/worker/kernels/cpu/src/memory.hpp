// Memory for vectors.
//
// Owns alignment and huge pages. It must not know what lies in it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace octavo {

constexpr size_t kAlignment = 64;

// Between parts of one piece of memory, where a build checks every access.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGapBytes = kAlignment;
#else
constexpr size_t kGapBytes = 0;
#endif

// Has an access to the gap that ends here reported by such a build.
void forbid_gap(void* end_of_gap);

// Memory aligned for vectors, in huge pages where the system has them.
class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(size_t num_bytes);

    // Makes room for `num_bytes`; what was there is lost if there was too little.
    void reserve(size_t num_bytes);
    template <class T>
    T* as() const {
        return static_cast<T*>(memory_.get());
    }

   private:
    struct Free {
        void operator()(void* memory) const;
    };
    std::unique_ptr<void, Free> memory_;
    size_t num_bytes_ = 0;
};

// Memory for what lives as long as the model, cut from large pieces, so that small weights lie in huge pages too.
class Arena {
   public:
    void* allocate(size_t num_bytes);

   private:
    std::vector<Buffer> pieces_;
    size_t free_bytes_ = 0;
    char* free_ = nullptr;
};

}  // namespace octavo
