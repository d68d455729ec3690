// What one level of vector instructions offers. Each level compiles kernels.cpp with its own flags.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/model.h"
#include "runtime/team.h"

namespace everstream {

constexpr int MAX_BUFFERS = 16;

// The strides of a model's buffers, in numbers.
struct Strides {
    int x = 0, vocab = 0;
    int widest = 0;    // of the inputs of a product
    int inputs = 1;    // rows that a phase's products take of each token
    int prepared = 0;  // what these take
    int num_buffers = 0;
    int buffers[MAX_BUFFERS] = {};
};

// One run: `num_rows` tokens of `num_sequences` sequences, in order, and the rows among them whose
// logits are wanted. Buffers are [rows][stride] and zero beyond what is written.
struct Batch {
    Strides strides;
    int num_rows = 0, num_sequences = 0, num_wanted = 0;
    const int32_t* tokens = nullptr;     // [rows]
    const int64_t* positions = nullptr;  // [rows]
    const int32_t* first_row = nullptr;  // [sequences + 1]
    char* const* states = nullptr;       // [sequences]: where each state goes
    // [sequences]: where it is before the run, the same address or another one: see Step::enter_state.
    const char* const* sources = nullptr;
    char* const* pasts = nullptr;  // [sequences]: the state with the keys and values, which stay there
    const int32_t* wanted = nullptr;     // [wanted], rows
    float* logits = nullptr;             // [wanted][vocab_stride]
    // [rows][width], of a family whose rows are a token and a hidden state of another model; or null.
    const float* hidden = nullptr;
    bool stops_at_norm = false;  // then the wanted rows go to `normed` and get no logits

    float *x = nullptr, *normed = nullptr;
    float* const* buffers = nullptr;  // what the family has of its own
    // The inputs of products in the form that the precision needs.
    uint16_t* half = nullptr;
    uint8_t* integers = nullptr;
    float* scales = nullptr;
    char* const* private_room = nullptr;  // [threads], each of FamilyKernels::private_bytes
    // For what is no task, above all how many phases there are: a late thread may look after the run, when
    // the arrays are those of another one. The first row of sequence num_sequences / 2, and the most rows
    // of a sequence.
    int middle_row = 0, most_rows = 0;
};

// Weights are summed in blocks of this many, so that a draw can pass over most of them.
constexpr int SAMPLER_BLOCK = 64;

// What a level computes of a family's models; the models are of that family.
struct FamilyKernels {
    size_t (*private_bytes)(const Model&, const Strides&);  // of each thread
    void (*forward)(const Model&, const Batch&, Worker&);
};

enum class Level { v2, v3, v4, v4dot, amx, neon };
constexpr int NUM_LEVELS = 6;

struct Kernels {
    const char* name;
    Level level;
    int panel, part;     // outputs of a packed panel, and of each of its parts
    bool has_dot;        // bfloat16 products take bfloat16 inputs; int8 weights are 128 more
    // weights[i] = exp((logits[i] - largest) * inverse_temperature)
    void (*softmax_weights)(const float* logits, int n, float inverse_temperature, float* weights);
    bool (*all_finite)(const float* logits, int n);
    int (*arg_max)(const float* logits, int n);
    void (*block_sums)(const float* weights, int n, float* sums);  // of SAMPLER_BLOCK each
    // Rounds a row of k weights to int4: [padded k / 8] words and [padded k / GROUP] scales, as in a
    // `Matrix`. A group whose numbers int4 holds exactly keeps them.
    void (*round_int4)(const float* row, int k, uint32_t* words, uint16_t* scales);
    double (*multiply_add_rate)(double seconds, Precision);  // operations per second of one thread
    double (*read_rate)(const float* memory, size_t bytes, double seconds);  // bytes per second
};

}  // namespace everstream
