// A model as the kernels see it: packed matrices, small vectors, and where each part of a
// session's state lies in its block. Plain data; made by a family's builder, never changed after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace everstream {

// Those from q4_1 on are GGUF's, in a model of int4: of matrices, and q8_0 of tables too.
enum class Precision { float32, bfloat16, int8, int4, q4_1, q8_0, q4_k, q5_k, q6_k, iq4_xs, iq4_nl };

// int4 weights that lie next to each other along k and share a float16 scale.
constexpr int GROUP = 32;
// The groups of most blocks of GGUF, and their weights.
constexpr int BLOCK_GROUPS = 8, BLOCK = BLOCK_GROUPS * GROUP;

// y = x W^T for a weight [n, k], packed for one level in panels of `panel` rows of W, each in parts
// of `part` rows:
//   float32   [k][part]
//   bfloat16  [k / 2][part][2]
//   int8      [k / 4][part][4], times `scale` [n]; 128 more at levels with dot products
//   int4      [k / GROUP]: [GROUP / 8][part] words of eight numbers of 0 to 15, which are 8 more, and
//             [part] float16 scales
//   of GGUF   [k / weights of a block]: for each group [GROUP / 8][part] words as in int4, of the low
//             four bits of codes, and [bits - 4][part] high words; [steps][part] bytes; [bounds / 4][part]
//             words of the bounds of four groups, in the order 0 2 1 3; [halves][part] float16, of which
//             the second is added times the bound. See gguf_blocks.h. Quad d of a group, its codes 4 d to
//             4 d + 3, has bits in the bytes of word d / 2, and one more of each in bit d of the high
//             word's bytes, or two in bits d % 4 * 2 and d % 4 * 2 + 1 of high word d / 4. Codes of eight
//             bits are [GROUP / 4][part] words of four instead, as in int8.
// k is padded to `k_padded`, n to a multiple of `panel`, with weights that multiply zeros or are zero.
struct Matrix {
    Precision precision = Precision::float32;
    int n = 0, k = 0, k_padded = 0, panel = 0, part = 0;
    const void* data = nullptr;
    const float* scale = nullptr;
    const float* bias = nullptr;  // [n padded], or null
    size_t panel_bytes = 0;

    int num_panels() const { return (n + panel - 1) / panel; }
};

// Rows that are looked up: [n, k] in float32, bfloat16, int8 times a scale per row, int4: groups of
// [GROUP / 8] words and a scale, as in a Matrix, or q8_0: the file's blocks, a float16 and GROUP int8.
struct Table {
    Precision precision = Precision::float32;
    int n = 0, k = 0;
    const void* data = nullptr;
    const float* scale = nullptr;
};

struct Norm {
    const float* weight = nullptr;
    const float* bias = nullptr;  // a LayerNorm's, which subtracts the mean; null for RMSNorm
};

// down(silu(gate x) * up x) of the normed row; `up` has the rows of both, paired.
struct Mlp {
    Norm norm;
    Matrix up, down;
};

// What the models of all families have; each family extends it.
struct Model {
    Precision precision = Precision::float32;
    int vocab_size = 0, hidden = 0, num_layers = 0;
    float eps = 1e-5f;
    float embedding_scale = 1.0f, residual_scale = 1.0f;  // of rows looked up, of what is added to x
    Table embedding;
    Norm norm;
    Matrix head;
    size_t state_bytes = 0;
    size_t fixed_bytes = 0;  // of these, what does not hold a past
    bool rounds_sums = false;  // whether a state has its sums in bfloat16: see sums.h
    int64_t max_positions = 0;  // of a text whose past is bounded and does not slide; 0: no bound

    // Of a sum in a state's block; `computed` are those that a step has.
    size_t sum_bytes(size_t count, size_t computed = sizeof(float)) const {
        return count * (rounds_sums ? sizeof(uint16_t) : computed);
    }
};

}  // namespace everstream
