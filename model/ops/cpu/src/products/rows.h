// Rows of float32 or bfloat16 numbers, worked on as float32 in buffers that stay in the nearest cache.
#pragma once

#include <cstdlib>
#include <initializer_list>

#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

struct Bf16 {
    uint16_t bits;
};

constexpr int to16(int n) { return (n + 15) / 16 * 16; }

inline F load(const float* p) { return F::load(p); }
inline F load(const Bf16* p) { return F::bf16(&p->bits); }
inline void store(float* p, F x) { x.store(p); }
inline void store(Bf16* p, F x) { x.store_bf16(&p->bits); }

// Copies n numbers and fills up with zeros to a multiple of 16.
template <class T>
inline void widen(float* to, const T* from, int n) {
    int i = 0;
    for (; i + F::W <= n; i += F::W) load(from + i).store(to + i);
    if (i < n) {
        T rest[F::W] = {};
        std::memcpy(rest, from + i, size_t(n - i) * sizeof(T));
        load(rest).store(to + i);
        i += F::W;
    }
    for (; i < to16(n); i += F::W) F::set(0.0f).store(to + i);
}

template <class T>
inline void narrow(T* to, const float* from, int n) {
    int i = 0;
    for (; i + F::W <= n; i += F::W) store(to + i, F::load(from + i));
    if (i < n) {
        T rest[F::W];
        store(rest, F::load(from + i));
        std::memcpy(to + i, rest, size_t(n - i) * sizeof(T));
    }
}

// f(i) for each vector of a buffer of n numbers.
template <class Fn>
inline void vectors(int n, Fn f) {
    for (int i = 0; i < n; i += F::W) f(i);
}

inline void add_to(float* to, const float* from, int n) {
    vectors(n, [&](int i) { (F::load(to + i) + F::load(from + i)).store(to + i); });
}

// Zeroed and aligned memory of one call, handed out in pieces.
class Workspace {
  public:
    explicit Workspace(size_t bytes) : begin_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {
        if (!begin_) std::abort();
        std::memset(begin_, 0, bytes);
        next_ = static_cast<char*>(begin_);
    }
    ~Workspace() { std::free(begin_); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    template <class T = float>
    T* take(size_t n) {
        T* piece = reinterpret_cast<T*>(next_);
        next_ += (n * sizeof(T) + 63) / 64 * 64;
        return piece;
    }

  private:
    void* begin_;
    char* next_;
};

// The derivative of silu.
inline F silu_slope(F x) {
    const F one = F::set(1.0f), s = sigmoid(x);
    return s * fma(x, one - s, one);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
