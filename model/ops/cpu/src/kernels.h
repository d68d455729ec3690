// What one level of vector instructions offers. Each level compiles kernels.cpp with its own flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model.h"
#include "team.h"

namespace everstream {

// One run: `num_rows` tokens of `num_sequences` sequences, in order, and the rows among them whose
// logits are wanted. Buffers are [rows][stride] and zero beyond what is written.
struct Batch {
    int num_rows = 0, num_sequences = 0, num_wanted = 0;
    const int32_t* tokens = nullptr;     // [rows]
    const int64_t* positions = nullptr;  // [rows]
    const int32_t* first_row = nullptr;  // [sequences + 1]
    char* const* states = nullptr;       // [sequences]
    const int32_t* wanted = nullptr;     // [wanted], rows
    float* logits = nullptr;             // [wanted][vocab_stride]
    bool stops_at_norm = false;  // then the wanted rows go to `normed` and get no logits

    float *x = nullptr, *normed = nullptr, *in = nullptr, *extra = nullptr, *attended = nullptr;
    float *hidden = nullptr, *cos = nullptr, *sin = nullptr;
    uint16_t* half = nullptr;
    uint8_t* quads = nullptr;
    float* scales = nullptr;
    char* const* private_room = nullptr;  // [threads], each of Kernels::private_bytes
};

// The strides of a model's buffers, in numbers.
struct Strides {
    int x, in, extra, attended, hidden, widest, vocab;
    explicit Strides(const Model& m) {
        // Rows that are a power of two apart would share their places in a cache.
        const auto to64 = [](int n) { return (n + 63) / 64 * 64 + (n > 0 ? 16 : 0); };
        x = to64(m.hidden);
        in = to64(m.layers[0].in.n);
        extra = to64(m.layers[0].extra.n);
        attended = to64(m.num_heads * m.value);
        hidden = to64(m.intermediate);
        widest = hidden > attended ? hidden : attended;
        widest = widest > x ? widest : x;
        vocab = to64(m.vocab_size);
    }
};

// Weights are summed in blocks of this many, so that a draw can pass over most of them.
constexpr int SAMPLER_BLOCK = 64;

struct Kernels {
    const char* name;
    int panel, part;     // outputs of a packed panel, and of each of its parts
    bool rounds_inputs;  // bfloat16 products take bfloat16 inputs
    size_t (*private_bytes)(const Model&);
    int (*max_phases)(const Model&);
    void (*forward)(const Model&, const Batch&, Worker&);
    // weights[i] = exp((logits[i] - largest) * inverse_temperature)
    void (*softmax_weights)(const float* logits, int n, float inverse_temperature, float* weights);
    bool (*all_finite)(const float* logits, int n);
    int (*arg_max)(const float* logits, int n);
    void (*block_sums)(const float* weights, int n, float* sums);  // of SAMPLER_BLOCK each
    double (*multiply_add_rate)(double seconds, Precision);  // operations per second of one thread
    double (*read_rate)(const float* memory, size_t bytes, double seconds);  // bytes per second
};

extern const Kernels kernels_v2, kernels_v3, kernels_v4, kernels_v4dot, kernels_neon;

}  // namespace everstream
