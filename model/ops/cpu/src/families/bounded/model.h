// Models with layers of softmax attention over a bounded past; the equations are those of
// model/architectures/decoder.py, the places those of model/architectures/hybrid.py.
//
// H is the number of heads, G that of key and value heads, F the size of a head, M the features of a
// far part.
#pragma once

#include "runtime/model.h"

namespace everstream {

// Positions whose keys and values lie next to each other: POSITION_BLOCK of model/tensor_spec.py.
constexpr int POSITION_BLOCK = 16;

// What a layer sums of the tokens that left its window; model/families/llama/network.py and
// delta.py have the equations.
struct FarPart {
    enum Kind { none, relative, delta } kind = none;
    int features = 0;  // M
    const float *key_map = nullptr, *query_map = nullptr;    // [G][F][M / 2] and [H][F][M / 2]
    const float *scale = nullptr, *bias = nullptr;           // [H][F], over the root of F; [H]
    const float *gates = nullptr, *gate_bias = nullptr;      // [G][2][2 F], over the root of F; [G][2]
    const float *back = nullptr, *back_sine = nullptr;       // of the window's length, [F / 2] each
    size_t S = 0, z = 0;  // byte offsets of S [G][M][F] and of z [G][M]
};

struct BoundedAttention {
    // The rows of `in`: queries [H][F], each before its gate [F] where there is one; keys [G][F] and
    // values [G][F]; then the gates of the heads [H] where there are some.
    Matrix in, out;
    const float *q_norm = nullptr, *k_norm = nullptr;  // [F], or null where there are none
    bool rotates = true;  // whether queries and keys have positions
    // Byte offsets of the first block's keys [G][F][positions] and values [G][positions][F], in
    // float16, and bytes from a block to the next.
    size_t k = 0, v = 0, block_bytes = 0;
    int context = 0;        // positions that are held
    int sinks = 0;          // of these, the first ones, which never lose their place
    int angles = 0;         // where those of its rotation begin in BoundedBuffers::angles
    bool in_state = false;  // whether keys and values are of the state proper, at any length
    FarPart far;

    int num_blocks() const { return (context + POSITION_BLOCK - 1) / POSITION_BLOCK; }
};

// A layer, which a family extends where its mixer may be another one.
struct BoundedLayer {
    Norm norm;
    bool is_attention = false;
    BoundedAttention attention;
    Mlp mlp;
};

struct BoundedModel : Model {
    int num_heads = 0, num_kv_heads = 0, head_size = 0;  // H, G and F
    int rotary_size = 0;  // channels that turn
    const double* frequencies = nullptr;  // of the pairs that turn, in radians a position
    float score_scale = 0.0f;  // of the scores: 1 / sqrt(F) in most families
    const double* window_frequencies = nullptr;  // those of layers with a window, if they differ
    bool gated = false;
    bool head_gates = false;  // whether each head has a gate, for all of its channels
    int sinks = 0;        // positions that never lose their place
    int farthest = 0;     // the sinks are seen no farther away; 0 where no layer is attention
    bool slides = false;  // whether later positions take the places of the oldest
    int features = 0;     // M of the layer with most
    int most_places = 0;  // of a layer whose keys and values are of the state proper, in whole blocks

    int group() const { return num_heads / num_kv_heads; }
    int query_size() const { return gated ? 2 * head_size : head_size; }
    int first_gate() const { return num_heads * query_size() + 2 * num_kv_heads * head_size; }
    int rows_of_in() const { return first_gate() + (head_gates ? num_heads : 0); }
    static int place(const BoundedAttention& l, int64_t position) {
        const int n = l.context;
        return int(position < n ? position : l.sinks + (position - l.sinks) % (n - l.sinks));
    }
    // Places that are taken after `position`.
    static int used(const BoundedAttention& l, int64_t position) {
        return int(position < l.context ? position + 1 : l.context);
    }
    // Of a row's results of far parts: weighted values [H][F] where the features [H][M] were, and
    // their weights [H].
    int far_width() const { return features > head_size ? features : head_size; }
    int far_stride() const { return features ? num_heads * (far_width() + 1) : 0; }
};

// The first buffers of a step, by their place in `Batch::buffers`. `angles` has the cosines and sines
// of the position, then those of the last one that is not beyond the bound, then those of the position
// for layers with a window; `near` the queries that see the sinks; `far` what BoundedModel::far_stride
// says.
struct BoundedBuffers {
    enum { in, attended, angles, near, far, hidden, num };
};

}  // namespace everstream
