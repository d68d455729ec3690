// Mamba-1's recurrence for one vector of channels and one token (model/families/mamba):
//
//   h_n = exp(delta A_n) h_n + delta x b_n;  y = (sum_n c_n h_n + D x) silu(z)
//
// Lanes run over channels and sums over n in order, so bits do not depend on the vector's width.
#pragma once

#include <cstring>

#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// A vector at p of which `num` lanes are there; the others are zeros.
inline F load_lanes(const float* p, int num) {
    if (num >= F::W) return F::load(p);
    float lanes[F::W] = {};
    std::memcpy(lanes, p, size_t(num) * 4);
    return F::load(lanes);
}
inline void store_lanes(float* p, int num, F x) {
    if (num >= F::W) return x.store(p);
    float lanes[F::W];
    x.store(lanes);
    std::memcpy(p, lanes, size_t(num) * 4);
}

// log(1 + e^x)
inline F softplus(F x) {
    const F zero = F::set(0.0f);
    return zero - log_sigmoid(zero - x);
}

// S and `rate` begin at the first channel, and have N rows `width` apart; `num` channels are there.
inline F scan_token(
    float* S, const float* rate, int N, size_t width, int num, F x, F delta, F skip, F gate,
    const float* b, const float* c) {
    const F written = delta * x;
    F y = skip * x;
    for (int n = 0; n < N; n++, S += width, rate += width) {
        F h = load_lanes(S, num);
        h = fma(h, expm1(delta * load_lanes(rate, num)), h);
        h = fma(F::set(b[n]), written, h);
        store_lanes(S, num, h);
        y = fma(F::set(c[n]), h, y);
    }
    return y * silu(gate);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
