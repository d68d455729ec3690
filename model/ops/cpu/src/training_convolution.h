// The short causal convolution of a training step with its silu and the unit length of q and k.
#pragma once

#include "rows.h"
#include "training.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// The rows of one sequence around a token, and what one pass over them needs.
template <class T>
class ConvolutionPass {
  public:
    explicit ConvolutionPass(const ConvolutionArguments& a)
        : a_(a), n_(a.width), padded_(to16(a.width)),
          space_(size_t(4 * a.size + 3) * size_t(padded_) * 4 + 64 * size_t(4 * a.size + 3)) {
        for (float** piece : {&y_, &g_, &c_}) *piece = space_.take(size_t(padded_));
        weight_ = space_.take(size_t(a.size) * padded_);
        grad_weight_ = space_.take(size_t(a.size) * padded_);
        x_ = space_.take(size_t(a.size) * padded_);
        grad_x_ = space_.take(size_t(a.size) * padded_);
        for (int d = 0; d < n_; d++)
            for (int i = 0; i < a.size; i++)
                weight_[size_t(i) * padded_ + d] = a.weight[size_t(d) * a.size + i];
    }

    void forward() {
        for (int b = 0; b < a_.batch; b++) {
            begin(b);
            for (int t = 0; t < a_.tokens; t++) {
                convolve(b, t);
                for (int h = 0; h < num_unit_heads(); h++)
                    scale(y_ + h * a_.head, inverse_length(h) * scale_of(h), a_.head);
                narrow(static_cast<T*>(a_.out) + offset(b, t), y_, n_);
            }
        }
    }

    void backward() {
        for (int b = 0; b < a_.batch; b++) {
            begin(b);
            std::memset(grad_x_, 0, size_t(a_.size) * padded_ * 4);
            for (int t = 0; t < a_.tokens; t++) {
                convolve(b, t);
                widen(g_, static_cast<const T*>(a_.grad_out) + offset(b, t), n_);
                for (int h = 0; h < num_unit_heads(); h++) unit_backward(h);
                vectors(padded_, [&](int i) {
                    (F::load(g_ + i) * silu_slope(F::load(c_ + i))).store(g_ + i);
                });
                spread(t);
                finish(b, t - a_.size + 1);
            }
            for (int t = a_.tokens - a_.size + 1; t < a_.tokens; t++) finish(b, t);
        }
        for (int d = 0; d < n_; d++)
            for (int i = 0; i < a_.size; i++)
                a_.grad_weight[size_t(d) * a_.size + i] = grad_weight_[size_t(i) * padded_ + d];
    }

  private:
    size_t offset(int b, int t) const { return (size_t(b) * a_.tokens + t) * n_; }
    int num_unit_heads() const { return 2 * a_.unit / a_.head; }
    float scale_of(int h) const { return h * a_.head < a_.unit ? a_.scale : 1.0f; }
    // The places of the inputs, and of their gradients, from token `t - size + 1` to token t.
    float* at(float* rows, int t) const {
        return rows + size_t((t + a_.size) % a_.size) * padded_;
    }

    void begin(int b) {
        const float* state = a_.state + size_t(b) * (a_.size - 1) * n_;
        for (int i = 0; i < a_.size - 1; i++)
            widen(at(x_, i - a_.size + 1), state + size_t(i) * n_, n_);
    }

    // The convolution's value to c and its silu to y.
    void convolve(int b, int t) {
        widen(at(x_, t), static_cast<const T*>(a_.x) + offset(b, t), n_);
        std::memset(c_, 0, size_t(padded_) * 4);
        for (int i = 0; i < a_.size; i++) {
            const float *w = weight_ + size_t(i) * padded_, *x = at(x_, t - a_.size + 1 + i);
            vectors(padded_, [&](int d) {
                fma(F::load(w + d), F::load(x + d), F::load(c_ + d)).store(c_ + d);
            });
        }
        vectors(padded_, [&](int d) { silu(F::load(c_ + d)).store(y_ + d); });
    }

    float inverse_length(int h) const {
        return 1.0f / std::sqrt(sum_of_squares(y_ + h * a_.head, a_.head) + a_.epsilon);
    }

    void unit_backward(int h) {
        float *y = y_ + h * a_.head, *g = g_ + h * a_.head;
        const float r = inverse_length(h);
        const F by = F::set(r * scale_of(h)), along = F::set(-r * r * dot(g, y, a_.head));
        map(g, g, y, a_.head, [&](F gi, F yi) { return by * fma(yi, along, gi); });
    }

    // From the gradient of the convolution's value at token t.
    void spread(int t) {
        for (int i = 0; i < a_.size; i++) {
            const float *w = weight_ + size_t(i) * padded_, *x = at(x_, t - a_.size + 1 + i);
            float *gw = grad_weight_ + size_t(i) * padded_, *gx = at(grad_x_, t - a_.size + 1 + i);
            vectors(padded_, [&](int d) {
                const F g = F::load(g_ + d);
                fma(g, F::load(x + d), F::load(gw + d)).store(gw + d);
                fma(g, F::load(w + d), F::load(gx + d)).store(gx + d);
            });
        }
    }

    // Writes the gradient of the input at token t, or of the state before the first token.
    void finish(int b, int t) {
        float* gx = at(grad_x_, t);
        if (t >= 0)
            narrow(static_cast<T*>(a_.grad_x) + offset(b, t), gx, n_);
        else if (t >= 1 - a_.size)
            narrow(a_.grad_state + (size_t(b) * (a_.size - 1) + t + a_.size - 1) * n_, gx, n_);
        std::memset(gx, 0, size_t(padded_) * 4);
    }

    const ConvolutionArguments& a_;
    int n_, padded_;
    Workspace space_;
    float *y_, *g_, *c_, *weight_, *grad_weight_, *x_, *grad_x_;
};

template <class T>
void convolution(const ConvolutionArguments& a) {
    ConvolutionPass<T>(a).forward();
}
template <class T>
void convolution_backward(const ConvolutionArguments& a) {
    ConvolutionPass<T>(a).backward();
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
