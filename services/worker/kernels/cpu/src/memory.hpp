// Memory for vectors.
//
// Owns alignment and huge pages. It must not know what lies in it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace octavo {

constexpr size_t kAlignment = 64;

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
