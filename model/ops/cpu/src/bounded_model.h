// Models with layers of softmax attention over a bounded past; the equations are those of
// model/architectures/bounded_attention.py, the places those of model/architectures/bounded.py.
//
// H is the number of heads, G that of key and value heads, F the size of a head.
#pragma once

#include "model.h"

namespace everstream {

// Positions whose keys and values lie next to each other: POSITION_BLOCK of model/tensor_spec.py.
constexpr int POSITION_BLOCK = 16;

struct BoundedAttention {
    // The rows of `in`: queries [H][F], each before its gate [F] where there is one; keys [G][F] and
    // values [G][F].
    Matrix in, out;
    const float *q_norm = nullptr, *k_norm = nullptr;  // [F], or null where there are none
    bool rotates = true;  // whether queries and keys have positions
    // Byte offsets of the first block's keys [G][F][positions] and values [G][positions][F].
    size_t k = 0, v = 0;
};

struct BoundedModel : Model {
    int num_heads = 0, num_kv_heads = 0, head_size = 0;  // H, G and F
    int rotary_size = 0;  // channels that turn
    const double* frequencies = nullptr;  // of the pairs that turn, in radians a position
    bool gated = false;
    int context = 0, sinks = 0;  // positions, and those that never lose their place
    bool slides = false;         // whether later positions take the places of the oldest
    size_t group_bytes = 0;      // from a block of positions to the next

    int group() const { return num_heads / num_kv_heads; }
    int query_size() const { return gated ? 2 * head_size : head_size; }
    int rows_of_in() const { return num_heads * query_size() + 2 * num_kv_heads * head_size; }
    int place(int64_t position) const {
        return int(position < context ? position : sinks + (position - sinks) % (context - sinks));
    }
    // Places that are taken after `position`.
    int used(int64_t position) const { return int(position < context ? position + 1 : context); }
};

// The first buffers of a step, by their place in `Batch::buffers`. `angles` has the cosines and sines
// of the position, then those of the last one that is not beyond the bound; `near` the queries that
// see the sinks.
struct BoundedBuffers {
    enum { in, attended, angles, near, hidden, num };
};

}  // namespace everstream
