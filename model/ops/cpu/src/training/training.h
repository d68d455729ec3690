// The fused passes of a training step, for one level of vector instructions and one type of
// activations. All arrays are contiguous; what may be null says so. `void*` is float32 or
// bfloat16, the type that a table of kernels is for; sums are taken in float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace everstream {

// out = rms_norm(x + y) * weight, [rows][width].
struct NormArguments {
    int64_t rows;
    int width;
    float epsilon;
    const float *x, *weight;
    const void* y;  // or null
    float* sum;     // x + y, null without y
    void* out;
};
struct NormGradients {
    int64_t rows;
    int width;
    float epsilon;
    const float *sum, *weight;
    const void* grad_out;
    const float* grad_sum;  // or null
    float* grad_x;
    void* grad_y;  // or null
    float* grad_weight;
};

// out = rms_norm(x) * weight * silu(gate), [rows][width].
struct GatedNormArguments {
    int64_t rows;
    int width;
    float epsilon;
    const void* x;
    const float* weight;
    const void *gate, *grad_out;  // grad_out null forward
    void *out, *grad_x, *grad_gate;
    float* grad_weight;
};

// out = silu(up[:, :width]) * up[:, width:], [rows][width] from [rows][2 width].
struct SwiGLUArguments {
    int64_t rows;
    int width;
    const void *up, *grad_out;  // grad_out null forward
    void *out, *grad_up;
};

// y = silu(sum_i w_i x_{t - size + 1 + i}) per channel, [batch][tokens][width], with the rows of
// `state` [batch][size - 1][width] before the first token. Of y the channels before `2 unit` are
// vectors of `head` channels that get unit length, those before `unit` then times `scale`.
struct ConvolutionArguments {
    int batch, tokens, width, size, unit, head;
    float scale, epsilon;
    const void* x;
    const float *weight, *state;  // weight [width][size]
    const void* grad_out;         // null forward
    void *out, *grad_x;
    float *grad_weight, *grad_state;
};

// The gated delta rule in blocks, see model/ops/delta.py. qkv is [batch][tokens][heads (2 key +
// value)]; beta, log_decay [batch][tokens][heads]; state [batch][heads][key][value]. The backward
// pass reads u [batch][heads][tokens][value] and the states before each block, `starts`.
struct DeltaArguments {
    int batch, tokens, heads, key, value;
    const void* qkv;
    const float *beta, *log_decay, *state;
    void *out, *u;
    float *starts, *new_state;
    const void* grad_out;         // null forward
    const float* grad_new_state;  // or null
    void* grad_qkv;
    float *grad_beta, *grad_log_decay, *grad_state;
};
constexpr int DELTA_BLOCK = 64;

struct TrainingKernels {
    void (*norm)(const NormArguments&);
    void (*norm_backward)(const NormGradients&);
    void (*gated_norm)(const GatedNormArguments&);
    void (*gated_norm_backward)(const GatedNormArguments&);
    void (*swiglu)(const SwiGLUArguments&);
    void (*swiglu_backward)(const SwiGLUArguments&);
    void (*convolution)(const ConvolutionArguments&);
    void (*convolution_backward)(const ConvolutionArguments&);
    void (*delta)(const DeltaArguments&);
    void (*delta_backward)(const DeltaArguments&);
    // Logits [rows][width] become softmax minus one at the target; returns the sum of -log p.
    double (*cross_entropy)(int64_t rows, int width, const int64_t* targets, void* logits);
};

}  // namespace everstream
