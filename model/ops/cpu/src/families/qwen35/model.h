// A Qwen3.5 model; the equations are in model/families/qwen35.
//
// D is the width; a layer of the gated delta net has P key heads of size K, R value heads of size V
// and C = 2 P K + R V channels of its convolution over W tokens.
#pragma once

#include "families/bounded/model.h"

namespace everstream {

struct DeltaNet {
    // The rows of `in`: what goes through the convolution, queries, keys and values in this order,
    // then the gates of the output [R V]. Those of `rates`: b, then a, [R] each.
    Matrix in, rates, out;
    const float* conv = nullptr;                         // [W][C]
    const float *decay_rate = nullptr, *bias = nullptr;  // [R]; the rate is -exp(A_log)
    const float* norm = nullptr;                         // [V]
    // Byte offsets of the last inputs of the convolution [W - 1][C] and of S [R][K][V].
    size_t ring = 0, S = 0;
};

struct Qwen35Layer : BoundedLayer {
    DeltaNet delta;  // where it is not attention
};

// After the buffers of the attention: b and a of the delta net, and what its heads give; what `join`
// takes.
struct Qwen35Buffers : BoundedBuffers {
    enum { rates = BoundedBuffers::num, mixed, joined, num };
};

struct Qwen35Model : BoundedModel {
    int num_key_heads = 0, num_value_heads = 0, key_size = 0, value_size = 0;  // P, R, K and V
    int conv_size = 0;                                                         // W
    const Qwen35Layer* layers = nullptr;
    // Of a multi-token head, which takes [2 D] of each row: the token's embedding, then what the final
    // norm of the model that it drafts for gave for the token before.
    Norm embedding_norm, hidden_norm;
    Matrix join;

    bool joins() const { return join.n > 0; }

    int queries() const { return num_key_heads * key_size; }
    int values() const { return num_value_heads * value_size; }
    int channels() const { return 2 * queries() + values(); }
};

}  // namespace everstream
