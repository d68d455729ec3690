// Norms, activations and the softmax of a training step, a row at a time, forward and backward.
#pragma once

#include "products/rows.h"
#include "training/training.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

inline float inverse_rms(const float* x, int n, float epsilon) {
    return 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + epsilon);
}

// The gradient of x * r * weight with r = inverse_rms(x): in `g` that of the result, replaced by
// that of x. What each row adds to the gradient of the weight goes to `grad_weight`.
inline void norm_row_backward(
    float* g, const float* x, const float* weight, float* grad_weight, float r, int n) {
    const int padded = to16(n);
    const F by = F::set(r);
    vectors(padded, [&](int i) {
        const F xi = F::load(x + i), gi = F::load(g + i);
        fma(gi, xi * by, F::load(grad_weight + i)).store(grad_weight + i);
        (gi * F::load(weight + i)).store(g + i);
    });
    const F along = F::set(-dot(g, x, n) * r * r / float(n));
    vectors(padded, [&](int i) {
        (by * fma(F::load(x + i), along, F::load(g + i))).store(g + i);
    });
}

template <class T>
void norm(const NormArguments& a) {
    const int n = a.width, padded = to16(n);
    Workspace space(size_t(4 * padded + 64) * 4);
    float *x = space.take(padded), *y = space.take(padded), *weight = space.take(padded);
    widen(weight, a.weight, n);
    for (int64_t row = 0; row < a.rows; row++) {
        widen(x, a.x + row * n, n);
        if (a.y) {
            widen(y, static_cast<const T*>(a.y) + row * n, n);
            add_to(x, y, padded);
            narrow(a.sum + row * n, x, n);
        }
        const F r = F::set(inverse_rms(x, n, a.epsilon));
        vectors(padded, [&](int i) { (F::load(x + i) * r * F::load(weight + i)).store(y + i); });
        narrow(static_cast<T*>(a.out) + row * n, y, n);
    }
}

template <class T>
void norm_backward(const NormGradients& a) {
    const int n = a.width, padded = to16(n);
    Workspace space(size_t(5 * padded + 80) * 4);
    float *x = space.take(padded), *g = space.take(padded), *more = space.take(padded);
    float *weight = space.take(padded), *grad_weight = space.take(padded);
    widen(weight, a.weight, n);
    for (int64_t row = 0; row < a.rows; row++) {
        widen(x, a.sum + row * n, n);
        widen(g, static_cast<const T*>(a.grad_out) + row * n, n);
        norm_row_backward(g, x, weight, grad_weight, inverse_rms(x, n, a.epsilon), n);
        if (a.grad_sum) {
            widen(more, a.grad_sum + row * n, n);
            add_to(g, more, padded);
        }
        narrow(a.grad_x + row * n, g, n);
        if (a.grad_y) narrow(static_cast<T*>(a.grad_y) + row * n, g, n);
    }
    narrow(a.grad_weight, grad_weight, n);
}

template <class T>
void gated_norm(const GatedNormArguments& a) {
    const int n = a.width, padded = to16(n);
    Workspace space(size_t(3 * padded + 48) * 4);
    float *x = space.take(padded), *gate = space.take(padded), *weight = space.take(padded);
    widen(weight, a.weight, n);
    for (int64_t row = 0; row < a.rows; row++) {
        widen(x, static_cast<const T*>(a.x) + row * n, n);
        widen(gate, static_cast<const T*>(a.gate) + row * n, n);
        const F r = F::set(inverse_rms(x, n, a.epsilon));
        vectors(padded, [&](int i) {
            (F::load(x + i) * r * F::load(weight + i) * silu(F::load(gate + i))).store(x + i);
        });
        narrow(static_cast<T*>(a.out) + row * n, x, n);
    }
}

template <class T>
void gated_norm_backward(const GatedNormArguments& a) {
    const int n = a.width, padded = to16(n);
    Workspace space(size_t(5 * padded + 80) * 4);
    float *x = space.take(padded), *g = space.take(padded), *gate = space.take(padded);
    float *weight = space.take(padded), *grad_weight = space.take(padded);
    widen(weight, a.weight, n);
    for (int64_t row = 0; row < a.rows; row++) {
        widen(x, static_cast<const T*>(a.x) + row * n, n);
        widen(g, static_cast<const T*>(a.grad_out) + row * n, n);
        widen(gate, static_cast<const T*>(a.gate) + row * n, n);
        const float r = inverse_rms(x, n, a.epsilon);
        vectors(padded, [&](int i) {
            const F z = F::load(gate + i), gi = F::load(g + i);
            const F normed = F::load(x + i) * F::set(r) * F::load(weight + i);
            (gi * normed * silu_slope(z)).store(gate + i);
            (gi * silu(z)).store(g + i);
        });
        narrow(static_cast<T*>(a.grad_gate) + row * n, gate, n);
        norm_row_backward(g, x, weight, grad_weight, r, n);
        narrow(static_cast<T*>(a.grad_x) + row * n, g, n);
    }
    narrow(a.grad_weight, grad_weight, n);
}

template <class T>
void swiglu(const SwiGLUArguments& a) {
    const int n = a.width, padded = to16(n);
    Workspace space(size_t(2 * padded + 32) * 4);
    float *gate = space.take(padded), *value = space.take(padded);
    for (int64_t row = 0; row < a.rows; row++) {
        const T* up = static_cast<const T*>(a.up) + row * 2 * n;
        widen(gate, up, n);
        widen(value, up + n, n);
        vectors(padded, [&](int i) { (silu(F::load(gate + i)) * F::load(value + i)).store(gate + i); });
        narrow(static_cast<T*>(a.out) + row * n, gate, n);
    }
}

template <class T>
void swiglu_backward(const SwiGLUArguments& a) {
    const int n = a.width, padded = to16(n);
    Workspace space(size_t(3 * padded + 48) * 4);
    float *gate = space.take(padded), *value = space.take(padded), *g = space.take(padded);
    for (int64_t row = 0; row < a.rows; row++) {
        const T* up = static_cast<const T*>(a.up) + row * 2 * n;
        T* grad = static_cast<T*>(a.grad_up) + row * 2 * n;
        widen(gate, up, n);
        widen(value, up + n, n);
        widen(g, static_cast<const T*>(a.grad_out) + row * n, n);
        vectors(padded, [&](int i) {
            const F z = F::load(gate + i), gi = F::load(g + i);
            (gi * F::load(value + i) * silu_slope(z)).store(gate + i);
            (gi * silu(z)).store(value + i);
        });
        narrow(grad, gate, n);
        narrow(grad + n, value, n);
    }
}

template <class T>
double cross_entropy(int64_t rows, int width, const int64_t* targets, void* logits) {
    Workspace space(size_t(to16(width)) * 4);
    float* p = space.take(to16(width));
    double total = 0.0;
    for (int64_t row = 0; row < rows; row++) {
        T* at = static_cast<T*>(logits) + row * width;
        widen(p, at, width);
        const float top = largest(p, width), wanted = p[targets[row]];
        const float sum = exp_relative(p, top, width);
        total += double(std::log(sum)) + double(top) - double(wanted);
        scale(p, 1.0f / sum, width);
        p[targets[row]] -= 1.0f;
        narrow(at, p, width);
    }
    return total;
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
