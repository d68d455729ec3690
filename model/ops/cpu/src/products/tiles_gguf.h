// Tiles of GGUF's types; see gguf_blocks.h. Compiled in tiles_gguf_kernels.cpp.
//
// A block's sums are exact: of the groups' products times their steps, and of the inputs times their
// bounds. One number of float32 or two are added to an output for each block.
#pragma once

#include "products/gguf_blocks.h"
#include "products/tiles.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// The outputs of `panel` from vector `j` on, `vectors` of them, for `rows` rows from `row` on, as
// in matmul.h; rows are at most TALL_ROWS, and at most FLAT_ROWS where vectors are not TALL_NV.
template <class Prefetch>
void tile_gguf(
    const Matrix& w, const Input& x, int row, int rows, int panel, int j, int vectors, Prefetch ahead,
    float* tmp);
extern template void tile_gguf(
    const Matrix&, const Input&, int, int, int, int, int, Ahead<NoPieces>, float*);
extern template void tile_gguf(
    const Matrix&, const Input&, int, int, int, int, int, Ahead<WithPieces>, float*);

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
