// RWKV-7's time mix, which more than one family has; the equations are in
// model/families/rwkv7/network.py.
//
// D is the width, H the number of heads, N the size of a head.
#pragma once

#include "runtime/model.h"

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
    // [rank, D] and [D, rank] with a bias; none of both in layer 0's value_mix and without a gate
    Matrix down, up;
};

struct TimeMix {
    Norm norm;                         // of what goes into it
    Norm group_norm;                   // no weight where the heads' outputs are not normed
    const float* shift_mix = nullptr;  // [6][D], or [5][D] without a gate
    Matrix receptance, key, value, output;
    LowRank low[LowRanks::num];
    const float *k_k = nullptr, *k_a = nullptr, *r_k = nullptr;  // [D]
    // Byte offsets of S [H][N key][N value] and of the last input of the token shift [D].
    size_t S = 0, shift = 0;
};

// The buffers of a step, by their place in `Batch::buffers`; each is [tokens][D] where nothing else
// is said. `shifted` is [6][tokens][D], `low` is [4][tokens][largest rank], and `hidden` the inside
// of what follows the time mix.
struct TimeMixBuffers {
    enum { shifted, r, k, v, v_first, low, decay, rate, value_mix, gate, mixed, hidden, num };
};

struct TimeMixModel : Model {
    int num_heads = 0, head_size = 0;  // H and N
    int num_shifted = Shifted::num;    // less one without a gate
    int rank[LowRanks::num] = {};
    int largest_rank = 0;
    float group_eps = 64e-5f;
    const TimeMix* time_mixes = nullptr;  // of each layer
};

}  // namespace everstream
