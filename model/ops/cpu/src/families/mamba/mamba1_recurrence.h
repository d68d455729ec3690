// Mamba-1's recurrence for one vector of channels and one token (model/families/mamba):
//
//   h_n = exp(delta A_n) h_n + delta x b_n;  y = (sum_n c_n h_n + D x) silu(z)
//
// Lanes run over channels and sums over n in order, so bits do not depend on the vector's width.
#pragma once

#include "runtime/sums.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// log(1 + e^x)
inline F softplus(F x) {
    const F zero = F::set(0.0f);
    return zero - log_sigmoid(zero - x);
}

// S, kept as E says, and `rate` begin at the first channel, and have N rows `width` apart; `num` channels are there.
template <class E>
inline F scan_token(
    const E& e, typename E::T* S, const float* rate, int N, size_t width, int num, F x, F delta, F skip, F gate,
    const float* b, const float* c) {
    const F written = delta * x;
    F y = skip * x;
    for (int n = 0; n < N; n++, S += width, rate += width) {
        F h = load_lanes(e, S, num);
        h = fma(h, expm1(delta * load_lanes(Single(), rate, num)), h);
        h = fma(F::set(b[n]), written, h);
        store_lanes(e, S, num, h);
        y = fma(F::set(c[n]), h, y);
    }
    return y * silu(gate);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
