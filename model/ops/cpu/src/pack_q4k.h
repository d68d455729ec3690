// Blocks of GGUF's Q4_K as a Matrix of q4_k has them: the same numbers in another order.
//
// A block of 256 weights: float16 d and m; 12 bytes with the 6-bit steps and bounds of 8 groups of 32;
// 128 bytes of codes, of which group 2i has the low halves of 32 bytes and group 2i + 1 the high ones.
// A weight is d step code - m bound.
#pragma once

#include "model.h"

namespace everstream {

constexpr size_t Q4K_BYTES = 144;

// A row of `num` blocks, as row `lane` of a part of P rows.
void pack_q4k(const uint8_t* blocks, size_t num, char* part, size_t P, size_t lane);

}  // namespace everstream
