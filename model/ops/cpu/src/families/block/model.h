// A model of our own block: one of the mechanisms of model/attention, and an MLP.
#pragma once

#include "runtime/model.h"

namespace everstream {

enum class Mechanism {
    elu, relu, softmax_map, cosine,                // positive features over one denominator
    performer, performer_simplified, rbf, soft_vq,  // exponential features, running maximum
    efficient, window_linear, vq, cosformer,
    normed, retnet, dijiang, gated,                 // a norm instead of a denominator
    delta,
};

enum class Rotary { none, before, after };
enum class FeatureMap { product, elu, relu, identity };

// Byte offsets into a session's block; those that a mechanism lacks are not read. S of vq are its sums.
struct StateOffsets {
    size_t S = 0, z = 0, max = 0, conv = 0, k = 0, v = 0, code = 0, count = 0;
    size_t S_before = 0, z_before = 0;
};

// What a head has of a tensor of the state: `num` parts of `bytes` bytes, `stride` bytes apart, those
// of head h from offset + h bytes on.
struct StatePiece {
    size_t offset = 0, bytes = 0;
    int num = 1;
    size_t stride = 0;
};

struct Layer {
    Norm attention_norm, mlp_norm;
    Matrix in;                       // q, k, v and, where there is one, the output gate
    Matrix extra;                    // decay_down, or beta and decay; float32
    Matrix out, up, down;
    const float* conv = nullptr;        // [W][H (2 K + V)]
    const float* norm_weight = nullptr;  // [V]
    const float* decay_up = nullptr;     // [H][rank][K]
    const float* decay_bias = nullptr;   // gated [H K]; delta [H]
    const float* decay_rate = nullptr;   // delta: -exp(A) [H]
    const float* decay = nullptr;        // retnet, dijiang: expm1 of the log decay, [H K]
    const float* features = nullptr;     // projection, codebook, DCT times weight: [H][K][F]
    const float* feature_bias = nullptr;  // added to a key's log features, [H][F]
    const float* window_bias = nullptr;  // vq: [H][W], by distance
    const float* q_map = nullptr;        // normed: [K][2 K] and its bias [2 K]
    const float* q_map_bias = nullptr;
    const float* k_map = nullptr;
    const float* k_map_bias = nullptr;
    StateOffsets state;
    const StatePiece* pieces = nullptr;  // [num_pieces]: all that a head has of the state
    int num_pieces = 0;
};

// The buffers of a step, by their place in `Batch::buffers`.
struct BlockBuffers {
    enum { in, extra, attended, hidden, cos, sin, num };
};

struct BlockModel : Model {
    Mechanism mechanism = Mechanism::elu;
    int num_heads = 0;
    int key = 0, value = 0;          // K and V of a head
    int num_features = 0;            // F, codewords C for vq
    int intermediate = 0;
    int window = 0, conv_size = 0, rank = 0;
    int64_t epoch = 0;               // cosformer: half its horizon
    float beta = 1.0f;               // soft_vq
    float max_beta = 1.0f;           // delta
    const double* frequencies = nullptr;  // of rotary positions [key / 2]
    Rotary rotary = Rotary::none;
    FeatureMap map = FeatureMap::product;
    bool gelu = false, xpos = false;
    bool gated = true;  // whether there is an output gate after q, k and v in Layer::in
    Table positions;  // no rows: none is added
    bool single = false;    // whether sums are computed in float32, for they decay or begin again
    size_t head_bytes = 0;  // of S of a head, where it is `single` and there is nothing else of that size
    const Layer* layers = nullptr;

    int sum_count() const { return num_features * value; }
    size_t sum_number() const { return single ? sizeof(float) : sizeof(double); }
    int qkv() const { return num_heads * (2 * key + value); }
};

}  // namespace everstream
