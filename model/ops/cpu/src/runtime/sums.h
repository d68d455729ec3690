// How kernels take the sums of a state from its block and put them back: in float32, in float64, or in
// bfloat16, of which a token's position says how they are rounded.
#pragma once

#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Each has the type T of a sum in the block, that of its arithmetic, Number, and vectors V of it; whole
// vectors and single sums in and out of the block; and vectors V of float32 inputs and outputs.
struct Single {
    using T = float;
    using Number = float;
    using V = F;
    static V widen(const float* p) { return F::load(p); }
    static void narrow(V x, float* p) { x.store(p); }
    V load(const T* p) const { return F::load(p); }
    void store(V x, T* p) const { x.store(p); }
    Number one(const T* p) const { return *p; }
    void put(Number x, T* p) const { *p = x; }
};

struct Double {
    using T = double;
    using Number = double;
    using V = D;
    static V widen(const float* p) { return D::widen(p); }
    static void narrow(V x, float* p) { x.narrow(p); }
    V load(const T* p) const { return D::load(p); }
    void store(V x, T* p) const { x.store(p); }
    Number one(const T* p) const { return *p; }
    void put(Number x, T* p) const { *p = x; }
};

// SplitMix64 (Steele et al. 2014).
inline uint64_t split_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Sums in bfloat16 of the state at `state`, which a token at `position` rounds up or down at random;
// model/state_tensors.py says how, and has the same bits.
class Rounded {
public:
    using T = uint16_t;
    using Number = float;
    using V = F;
    Rounded(const char* state, int64_t position) : origin((const T*)state) {
        const uint64_t hash = split_mix(uint64_t(position));
        factor = uint32_t(hash >> 32) | 1, term = uint32_t(hash);
        for (uint32_t lane = 0; lane < uint32_t(F::W); lane++) lanes[lane] = factor * lane + term;
    }
    static V widen(const float* p) { return F::load(p); }
    static void narrow(V x, float* p) { x.store(p); }
    V load(const T* p) const { return F::bf16(p); }
    void store(V x, T* p) const {
        const I random = (I::load(lanes) + I::set(factor * place(p))).high();
        const F up = (I::bits_of(x) + random).as_float();
        I::bits_of(select_less(x, F::set(INFINITY), up, x)).store_high(p);
    }
    Number one(const T* p) const {
        const uint32_t bits = uint32_t(*p) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    void put(Number x, T* p) const {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (x < INFINITY) bits += (factor * place(p) + term) >> 16;
        *p = T(bits >> 16);
    }

private:
    uint32_t place(const T* p) const { return uint32_t(p - origin); }

    const T* origin;
    uint32_t factor, term, lanes[F::W];
};

// The first `num` lanes of a vector at p; the others are zeros.
template <class E>
inline F load_lanes(const E& sums, const typename E::T* p, int num) {
    if (num >= F::W) return sums.load(p);
    float lanes[F::W] = {};
    for (int i = 0; i < num; i++) lanes[i] = sums.one(p + i);
    return F::load(lanes);
}
template <class E>
inline void store_lanes(const E& sums, typename E::T* p, int num, F x) {
    if (num >= F::W) return sums.store(x, p);
    float lanes[F::W];
    x.store(lanes);
    for (int i = 0; i < num; i++) sums.put(lanes[i], p + i);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
