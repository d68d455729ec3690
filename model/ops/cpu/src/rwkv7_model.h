// An RWKV-7 model; the equations are in model/architectures/rwkv7.
//
// D is the width, H the number of heads, N the size of a head, F the inner width of the channel mix.
#pragma once

#include "model.h"

namespace everstream {

// The shifted inputs of the time mix, in the order of the rows of `shift_mix`.
struct Shifted {
    enum { r, w, k, v, a, g, num };
};

// The low-rank maps: of the decay, the in-context learning rate, the value residual and the gate.
struct LowRanks {
    enum { decay, rate, value_mix, gate, num };
};

struct LowRank {
    Matrix down, up;  // [rank, D] and [D, rank] with a bias; none of both in layer 0's value_mix
};

struct Rwkv7Layer {
    Norm time_norm, channel_norm, group_norm;
    const float* shift_mix = nullptr;  // [6][D]
    Matrix receptance, key, value, output;
    LowRank low[LowRanks::num];
    const float *k_k = nullptr, *k_a = nullptr, *r_k = nullptr;  // [D]
    const float* channel_shift_mix = nullptr;                    // [D]
    Matrix channel_key, channel_value;
    // Byte offsets of S [H][N key][N value] and of the last inputs of the two token shifts [D].
    size_t S = 0, time_shift = 0, channel_shift = 0;
};

// The buffers of a step, by their place in `Batch::buffers`; each is [tokens][D] where nothing else
// is said. `shifted` is [6][tokens][D], `low` is [4][tokens][largest rank].
struct Rwkv7Buffers {
    enum { shifted, r, k, v, v_first, low, decay, rate, value_mix, gate, mixed, hidden, num };
};

struct Rwkv7Model : Model {
    int num_heads = 0, head_size = 0;  // H and N
    int intermediate = 0;         // F
    int rank[LowRanks::num] = {};
    int largest_rank = 0;
    float group_eps = 64e-5f;
    Norm embedding_norm;  // no weight where the rows of the embedding are normed already
    const Rwkv7Layer* layers = nullptr;
};

}  // namespace everstream
