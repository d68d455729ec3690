// Blocks of GGUF's quantised types as a Matrix has them. A block is of groups of GROUP weights; of each
// group it has the codes, of four bits or more, and a step or two, which are integers times the
// block's float16. A block of one group has that float16 alone. Types with two float16 add a bound
// to all weights of a group.
#pragma once

#include "runtime/model.h"

namespace everstream {

struct GgufBlock {
    const char* name;
    int weights;     // of a block
    int bits;        // of a code; the codes of a group take as many words
    int steps;       // of a block, each a byte with a sign
    int bounds;      // of a block, each a byte; where there are none, a bound is the float16
    int halves;      // float16: what steps are multiples of, and what bounds are
    int file_bytes;  // of a block in a file

    constexpr int groups() const { return weights / GROUP; }
    constexpr bool has_bounds() const { return halves == 2; }
    // Bytes of a group's words, and of a block, for each row.
    constexpr int group_bytes() const { return 4 * bits; }
    constexpr int num_bytes() const {
        return groups() * group_bytes() + steps + bounds + 2 * halves;
    }
};

constexpr Precision GGUF_TYPES[] = {
    Precision::q4_1,   Precision::q8_0,   Precision::q4_k, Precision::q5_k, Precision::q6_k,
    Precision::iq4_xs, Precision::iq4_nl};

// Of internal linkage, since each level has its own copy.
static constexpr bool is_gguf(Precision p) { return p >= Precision::q4_1; }
// int4 lies as the blocks of Q4_0.
static constexpr bool has_blocks(Precision p) { return p >= Precision::int4; }

static constexpr GgufBlock gguf_block(Precision p) {
    switch (p) {
        case Precision::int4: return {"Q4_0", GROUP, 4, 0, 0, 1, 18};
        case Precision::q4_1: return {"Q4_1", GROUP, 4, 0, 0, 2, 20};
        case Precision::q8_0: return {"Q8_0", GROUP, 8, 0, 0, 1, 34};
        case Precision::q4_k: return {"Q4_K", BLOCK, 4, 8, 8, 2, 144};
        case Precision::q5_k: return {"Q5_K", BLOCK, 5, 8, 8, 2, 176};
        case Precision::q6_k: return {"Q6_K", BLOCK, 6, 16, 0, 1, 210};
        case Precision::iq4_xs: return {"IQ4_XS", BLOCK, 4, 8, 0, 1, 136};
        default: return {"IQ4_NL", GROUP, 4, 0, 0, 1, 18};
    }
}

// A row of `num` blocks, as row `lane` of a part of P rows. `more` is added to codes of eight bits.
void pack_gguf(
    Precision precision, const uint8_t* blocks, size_t num, int more, char* part, size_t P, size_t lane);

}  // namespace everstream
