// The short causal convolution of a training step with its silu and the unit length of q and k.
#pragma once

#include "products/rows.h"
#include "training/training.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// The last rows of a sequence, in a ring.
class Ring {
  public:
    Ring(float* rows, int size, int width) : rows_(rows), size_(size), width_(width) {}
    float* at(int t) const { return rows_ + size_t((t + size_) % size_) * width_; }
    void clear() { std::memset(rows_, 0, size_t(size_) * width_ * 4); }

  private:
    float* rows_;
    int size_, width_;
};

template <class T>
class ConvolutionPass {
  public:
    explicit ConvolutionPass(const ConvolutionArguments& a)
        : a_(a), n_(a.width), padded_(to16(a.width)),
          space_(size_t(4 * a.size + 5) * (size_t(padded_) * 4 + 64)),
          x_(space_.take(size_t(a.size) * padded_), a.size, padded_),
          grad_(space_.take(size_t(a.size) * padded_), a.size, padded_) {
        for (float** piece : {&y_, &slope_, &out_}) *piece = space_.take(size_t(padded_));
        rows_ = space_.take<const float*>(size_t(a.size));
        later_ = space_.take<const float*>(size_t(a.size));
        weight_ = space_.take(size_t(a.size) * padded_);
        grad_weight_ = space_.take(size_t(a.size) * padded_);
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
            grad_.clear();
            for (int t = 0; t < a_.tokens; t++) {
                convolve(b, t);
                gradient(b, t);
                through_inputs(b, t);
            }
            for (int t = a_.tokens; t < a_.tokens + a_.size - 1; t++) {
                std::memset(grad_.at(t), 0, size_t(padded_) * 4);
                through_inputs(b, t);
            }
        }
        for (int d = 0; d < n_; d++)
            for (int i = 0; i < a_.size; i++)
                a_.grad_weight[size_t(d) * a_.size + i] = grad_weight_[size_t(i) * padded_ + d];
    }

  private:
    size_t offset(int b, int t) const { return (size_t(b) * a_.tokens + t) * n_; }
    int num_unit_heads() const { return 2 * a_.unit / a_.head; }
    float scale_of(int h) const { return h * a_.head < a_.unit ? a_.scale : 1.0f; }

    void begin(int b) {
        const float* state = a_.state + size_t(b) * (a_.size - 1) * n_;
        for (int i = 0; i < a_.size - 1; i++)
            widen(x_.at(i - a_.size + 1), state + size_t(i) * n_, n_);
    }

    // to = sum_i w_i row_i
    void weigh(float* to, const float* const* rows) const {
        vectors(padded_, [&](int d) {
            F sum = F::set(0.0f);
            for (int i = 0; i < a_.size; i++)
                sum = fma(F::load(weight_ + size_t(i) * padded_ + d), F::load(rows[i] + d), sum);
            sum.store(to + d);
        });
    }

    // y: the silu of the convolution's value at token t; slope: its derivative.
    void convolve(int b, int t) {
        widen(x_.at(t), static_cast<const T*>(a_.x) + offset(b, t), n_);
        for (int i = 0; i < a_.size; i++) rows_[i] = x_.at(t - a_.size + 1 + i);
        weigh(slope_, rows_);
        const F one = F::set(1.0f);
        vectors(padded_, [&](int d) {
            const F c = F::load(slope_ + d), s = sigmoid(c), y = c * s;
            y.store(y_ + d);
            fma(y, one - s, s).store(slope_ + d);
        });
    }

    float inverse_length(int h) const {
        return 1.0f / std::sqrt(sum_of_squares(y_ + h * a_.head, a_.head) + a_.epsilon);
    }

    // The gradient of the convolution's value at token t, and what it adds to the weight's.
    void gradient(int b, int t) {
        float* g = grad_.at(t);
        widen(g, static_cast<const T*>(a_.grad_out) + offset(b, t), n_);
        for (int h = 0; h < num_unit_heads(); h++) unit_backward(g + h * a_.head, h);
        vectors(padded_, [&](int d) { (F::load(g + d) * F::load(slope_ + d)).store(g + d); });
        for (int i = 0; i < a_.size; i++) {
            float* sum = grad_weight_ + size_t(i) * padded_;
            vectors(padded_, [&](int d) {
                fma(F::load(g + d), F::load(rows_[i] + d), F::load(sum + d)).store(sum + d);
            });
        }
    }

    void unit_backward(float* g, int h) const {
        const float *y = y_ + h * a_.head, r = inverse_length(h);
        const F by = F::set(r * scale_of(h)), along = F::set(-r * r * dot(g, y, a_.head));
        map(g, g, y, a_.head, [&](F gi, F yi) { return by * fma(yi, along, gi); });
    }

    // The gradient of the input `size - 1` tokens before t, all of whose outputs are done by then.
    // Before the first token that is an input of the state.
    void through_inputs(int b, int t) {
        const int input = t - a_.size + 1;
        for (int i = 0; i < a_.size; i++) later_[i] = grad_.at(t - i);
        weigh(out_, later_);
        if (input >= 0)
            narrow(static_cast<T*>(a_.grad_x) + offset(b, input), out_, n_);
        else
            narrow(a_.grad_state + (size_t(b) * (a_.size - 1) + t) * n_, out_, n_);
    }

    const ConvolutionArguments& a_;
    int n_, padded_;
    Workspace space_;
    Ring x_, grad_;
    float *y_, *slope_, *out_, *weight_, *grad_weight_;
    const float **rows_, **later_;
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
