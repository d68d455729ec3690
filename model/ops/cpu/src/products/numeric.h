// Elementary functions and sums on vectors, the same bits at every level with a fused multiply-add.
#pragma once

#include <cmath>

#include "products/simd.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline double fma1(double a, double b, double c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// n / ln 2 rounded to an integer in the low bits of a float (1.5 * 2^23 + n).
struct Exponent {
    F bits, r;
};
inline Exponent split_exponent(F x) {
    const F magic = F::set(12582912.0f);
    const F bits = fma(x, F::set(1.44269504088896341f), magic);
    const F n = bits - magic;
    const F r = fma(n, F::set(-0.693145751953125f), x);
    return {bits, fma(n, F::set(-1.42860682030941723e-6f), r)};
}

// expm1(r) for |r| <= ln(2) / 2: r + r^2 p(r), Taylor to the seventh power.
inline F small_expm1(F r) {
    F p = F::set(1.98412698e-4f);
    p = fma(p, r, F::set(1.38888889e-3f));
    p = fma(p, r, F::set(8.33333333e-3f));
    p = fma(p, r, F::set(4.16666667e-2f));
    p = fma(p, r, F::set(1.66666667e-1f));
    p = fma(p, r, F::set(0.5f));
    return fma(p, r * r, r);
}

// Zero below e^-86, infinity above the largest number.
inline F exp(F x) {
    const F low = F::set(-86.0f), high = F::set(88.72283f);
    const Exponent e = split_exponent(min(max(x, low), high));
    F y = scale_by_bits(F::set(0.5f) * (small_expm1(e.r) + F::set(1.0f)), e.bits);
    y = y + y;
    y = select_less(x, low, F::set(0.0f), y);
    y = select_less(high, x, F::set(INFINITY), y);
    return select_less(x, F::set(INFINITY), y, x + x);  // NaN stays, as does +inf
}

// For x <= 0.
inline F expm1(F x) {
    const Exponent e = split_exponent(max(F::set(-80.0f), x));
    const F two_n = scale_by_bits(F::set(1.0f), e.bits);
    return fma(two_n, small_expm1(e.r), two_n - F::set(1.0f));
}

// log(1 + u) for 0 <= u <= 1: 2 artanh(u / (2 + u)) as a series.
inline F log1p_unit(F u) {
    const F s = u / (u + F::set(2.0f)), t = s * s;
    F p = F::set(2.0f / 15);
    p = fma(p, t, F::set(2.0f / 13));
    p = fma(p, t, F::set(2.0f / 11));
    p = fma(p, t, F::set(2.0f / 9));
    p = fma(p, t, F::set(2.0f / 7));
    p = fma(p, t, F::set(2.0f / 5));
    p = fma(p, t, F::set(2.0f / 3));
    return fma(p, t * s, s + s);
}

inline F sigmoid(F x) { return F::set(1.0f) / (F::set(1.0f) + exp(F::set(0.0f) - x)); }
inline F silu(F x) { return x / (F::set(1.0f) + exp(F::set(0.0f) - x)); }

// The tanh form of GPT-2.
inline F gelu(F x) {
    const F inner = F::set(0.7978845608028654f) * fma(F::set(0.044715f) * x * x, x, x);
    return x * sigmoid(inner + inner);
}

// By expm1, so that small numbers keep all their digits.
inline F tanh(F x) {
    const F zero = F::set(0.0f), minus = zero - x;
    const F e = expm1(select_less(x, zero, x + x, minus + minus));  // of -2 |x|
    const F t = (zero - e) / (e + F::set(2.0f));
    return select_less(x, zero, zero - t, t);
}

inline F log_sigmoid(F x) {
    const F zero = F::set(0.0f), negative = min(x, zero - x);
    return min(x, zero) - log1p_unit(exp(negative));
}

// out[i] = f(a[i], ...), whole vectors and then a padded one.
template <class Fn>
inline void map(float* out, const float* a, int n, Fn f) {
    int i = 0;
    for (; i + F::W <= n; i += F::W) f(F::load(a + i)).store(out + i);
    if (i < n) {
        float t[F::W] = {};
        std::memcpy(t, a + i, size_t(n - i) * 4);
        f(F::load(t)).store(t);
        std::memcpy(out + i, t, size_t(n - i) * 4);
    }
}
template <class Fn>
inline void map(float* out, const float* a, const float* b, int n, Fn f) {
    int i = 0;
    for (; i + F::W <= n; i += F::W) f(F::load(a + i), F::load(b + i)).store(out + i);
    if (i < n) {
        float s[F::W] = {}, t[F::W] = {};
        std::memcpy(s, a + i, size_t(n - i) * 4);
        std::memcpy(t, b + i, size_t(n - i) * 4);
        f(F::load(s), F::load(t)).store(t);
        std::memcpy(out + i, t, size_t(n - i) * 4);
    }
}
template <class Fn>
inline void map(float* out, const float* a, const float* b, const float* c, int n, Fn f) {
    int i = 0;
    for (; i + F::W <= n; i += F::W)
        f(F::load(a + i), F::load(b + i), F::load(c + i)).store(out + i);
    if (i < n) {
        float s[3][F::W] = {};
        std::memcpy(s[0], a + i, size_t(n - i) * 4);
        std::memcpy(s[1], b + i, size_t(n - i) * 4);
        std::memcpy(s[2], c + i, size_t(n - i) * 4);
        f(F::load(s[0]), F::load(s[1]), F::load(s[2])).store(s[0]);
        std::memcpy(out + i, s[0], size_t(n - i) * 4);
    }
}

typedef float Four __attribute__((vector_size(16)));

// A sum over an index in sixteen interleaved parts, joined in one order at every level.
struct Sum {
    static constexpr int PARTS = 16 / F::W;
    F part[PARTS];
    Sum() {
        for (F& p : part) p = F::set(0.0f);
    }
    // Of each part and the eighth after it, of these sums and the fourth after it, and so on.
    float total() const {
        Four t[4];
        for (int j = 0; j < PARTS; j++) part[j].store((float*)t + j * F::W);
        const Four sum = (t[0] + t[2]) + (t[1] + t[3]);
        return (sum[0] + sum[2]) + (sum[1] + sum[3]);
    }
};
// sum_i f(a_i) with f(zero) = 0; `add` is sum = add(value, sum).
template <class Add>
inline float sum_of(const float* a, int n, Add add) {
    Sum sum;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < Sum::PARTS; j++) sum.part[j] = add(F::load(a + i + j * F::W), sum.part[j]);
    if (i < n) {
        float t[16] = {};
        std::memcpy(t, a + i, size_t(n - i) * 4);
        for (int j = 0; j < Sum::PARTS; j++) sum.part[j] = add(F::load(t + j * F::W), sum.part[j]);
    }
    return sum.total();
}
inline float sum(const float* a, int n) {
    return sum_of(a, n, [](F x, F s) { return s + x; });
}
inline float sum_of_squares(const float* a, int n) {
    return sum_of(a, n, [](F x, F s) { return fma(x, x, s); });
}
inline float dot(const float* a, const float* b, int n) {
    Sum sum;
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < Sum::PARTS; j++)
            sum.part[j] = fma(F::load(a + i + j * F::W), F::load(b + i + j * F::W), sum.part[j]);
    if (i < n) {
        float s[16] = {}, t[16] = {};
        std::memcpy(s, a + i, size_t(n - i) * 4);
        std::memcpy(t, b + i, size_t(n - i) * 4);
        for (int j = 0; j < Sum::PARTS; j++)
            sum.part[j] = fma(F::load(s + j * F::W), F::load(t + j * F::W), sum.part[j]);
    }
    return sum.total();
}
inline float largest(const float* a, int n) {
    F best = F::set(-INFINITY);
    int i = 0;
    for (; i + F::W <= n; i += F::W) best = max(F::load(a + i), best);
    Four t[F::W / 4];
    best.store((float*)t);
    for (int width = F::W / 8; width; width /= 2)
        for (int j = 0; j < width; j++) t[j] = t[j] > t[j + width] ? t[j] : t[j + width];
    float result = -INFINITY;
    for (int j = 0; j < 4; j++) result = t[0][j] > result ? t[0][j] : result;
    for (; i < n; i++) result = a[i] > result ? a[i] : result;
    return result;
}

inline float exp1(float x) {
    float lanes[F::W];
    exp(F::set(x)).store(lanes);
    return lanes[0];
}

inline void scale(float* x, float by, int n) {
    const F s = F::set(by);
    map(x, x, n, [s](F a) { return a * s; });
}

// x = exp(x - max), returns the sum.
inline float exp_relative(float* x, float maximum, int n) {
    const F m = F::set(maximum);
    map(x, x, n, [m](F a) { return exp(a - m); });
    return sum(x, n);
}
inline void softmax(float* x, int n) {
    const float total = exp_relative(x, largest(x, n), n);
    scale(x, 1.0f / total, n);
}

inline void rms_norm(float* x, const float* weight, float eps, int n) {
    const F by = F::set(1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps));
    map(x, x, weight, n, [by](F a, F w) { return a * by * w; });
}

inline void center(float* x, int n) {
    const F mean = F::set(sum(x, n) / float(n));
    map(x, x, n, [mean](F a) { return a - mean; });
}

// out[j] = bias[j] + sum_i x[i] w[i][j]
inline void project(float* out, const float* x, const float* w, const float* bias, int k, int n) {
    int j = 0;
    for (; j + 4 * F::W <= n; j += 4 * F::W) {
        F acc[4];
        for (int c = 0; c < 4; c++) acc[c] = bias ? F::load(bias + j + c * F::W) : F::set(0.0f);
        for (int i = 0; i < k; i++) {
            const F xi = F::set(x[i]);
            for (int c = 0; c < 4; c++)
                acc[c] = fma(xi, F::load(w + size_t(i) * n + j + c * F::W), acc[c]);
        }
        for (int c = 0; c < 4; c++) acc[c].store(out + j + c * F::W);
    }
    for (; j < n; j++) {
        float acc = bias ? bias[j] : 0.0f;
        for (int i = 0; i < k; i++) acc = fma1(x[i], w[size_t(i) * n + j], acc);
        out[j] = acc;
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
