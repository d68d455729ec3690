// Blocks of GGUF's types as a Matrix has them: the same numbers in another order.
#pragma once

#include "products/gguf_blocks.h"

namespace everstream {

// A row of `num` blocks, as row `lane` of a part of P rows. `more` is added to codes of eight bits.
void pack_gguf(
    Precision precision, const uint8_t* blocks, size_t num, int more, char* part, size_t P, size_t lane);

}  // namespace everstream
