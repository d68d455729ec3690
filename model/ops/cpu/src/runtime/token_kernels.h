// What a token goes through in more than one family or mechanism: norms, rotation, the short
// convolution, decays. Of one row or head; nothing here knows a model.
#pragma once

#include <cmath>
#include <cstring>

#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// With a mean and a bias; in place.
inline void layer_norm(float* x, const float* weight, const float* bias, float eps, int n) {
    center(x, n);
    rms_norm(x, weight, eps, n);
    map(x, x, bias, n, [](F a, F b) { return a + b; });
}

// x = norm(x) * weight * silu(gate)
inline void gated_norm(float* x, const float* weight, const float* gate, float eps, int n) {
    rms_norm(x, weight, eps, n);
    map(x, x, gate, n, [](F a, F g) { return a * silu(g); });
}

// out = x / max(|x|, floor)
inline void l2_normalize(float* out, const float* x, int n, float floor) {
    const F by = F::set(std::fmax(std::sqrt(sum_of_squares(x, n)), floor));
    map(out, x, n, [by](F a) { return a / by; });
}

// 1 / sqrt(|x|^2 + 1e-6)
inline float inverse_length(const float* x, int n) {
    return float(1.0 / std::sqrt(double(sum_of_squares(x, n)) + 1e-6));
}

// log(1 + e^a)
inline double softplus(double a) { return a > 20.0 ? a : std::log1p(std::exp(a)); }

// expm1 of the log decay rate * log(1 + e^a); the rate is not positive.
inline float softplus_decay(double a, float rate) {
    return float(std::expm1(double(rate) * softplus(a)));
}

// The cosines and sines of a position, [half] each; `frequencies` in radians a position.
inline void rotation(
    int64_t position, const double* frequencies, int half, float* cos, float* sin) {
    for (int i = 0; i < half; i++) {
        const double angle = double(position) * frequencies[i];
        cos[i] = float(std::cos(angle));
        sin[i] = float(std::sin(angle));
    }
}

// Rotates channel i with channel i + half.
inline void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = fma1(a, cos[i], -(b * sin[i]));
        x[i + half] = fma1(b, cos[i], a * sin[i]);
    }
}

// One vector of channels: bias + sum_i w_i x_{t - W + 1 + i}, and the ring moves on by one.
template <class V, class Load, class Store>
inline V convolve_channels(
    int W, size_t width, const float* w, const float* bias, float* ring, V x, Load load,
    Store store) {
    V sum = x * load(w + size_t(W - 1) * width);
    if (bias) sum = sum + load(bias);
    for (int i = 0; i + 1 < W; i++, ring += width, w += width) {
        const V old = load(ring);
        sum = fma(load(w), old, sum);
        if (i) store(ring - width, old);
    }
    store(ring - width, x);
    return sum;
}

// A causal convolution of each of n channels over the last `size` tokens, of which `act` is taken.
// `w` is [size][width] and `ring` [size - 1][width], the inputs before `in`; all begin at the first
// channel, as does `bias`, which may be null. `out` may be `in`.
template <class Act>
inline void convolve(
    const float* w, float* ring, const float* in, int size, size_t width, int n, float* out, Act act,
    const float* bias = nullptr) {
    int j = 0;
    for (; j + F::W <= n; j += F::W)
        act(convolve_channels(
                size, width, w + j, bias ? bias + j : nullptr, ring + j, F::load(in + j),
                [](const float* p) { return F::load(p); }, [](float* p, F v) { v.store(p); }))
            .store(out + j);
    for (; j < n; j++) {  // the same on one lane
        float lane[F::W];
        act(convolve_channels(
                size, width, w + j, bias ? bias + j : nullptr, ring + j, F::set(in[j]),
                [](const float* p) { return F::set(*p); },
                [&lane](float* p, F v) {
                    v.store(lane);
                    *p = lane[0];
                }))
            .store(lane);
        out[j] = lane[0];
    }
}
inline void convolve_silu(
    const float* w, float* ring, const float* in, int size, size_t width, int n, float* out,
    const float* bias = nullptr) {
    convolve(w, ring, in, size, width, n, out, [](F sum) { return silu(sum); }, bias);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
