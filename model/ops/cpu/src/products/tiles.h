// Tiles: products of a few rows with some outputs' packed weights.
#pragma once

#include <array>

#include "products/inputs.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// A panel is NV vectors of outputs. A tile of accumulators leaves registers for its weights and an
// input. Where rows are many a tile takes half a panel and twice the rows, so that each weight
// that was read and widened serves more of them; such a part lies in one piece.
constexpr bool MANY_REGISTERS = EVERSTREAM_REGISTERS == 32;
constexpr int NV = MANY_REGISTERS ? 4 : 2;
constexpr int FLAT_ROWS = 6;
constexpr int TALL_ROWS = MANY_REGISTERS ? 12 : 6, TALL_NV = 2;
constexpr int PANEL = NV * F::W, PART = TALL_NV * F::W;
// How far ahead of its work a row alone asks for weights, in bytes. Most blocks of GGUF take longer to
// unpack, so that what is near is asked for too late.
constexpr ptrdiff_t near_of(Precision p) {
    const bool is_far = p == Precision::q5_k || p == Precision::q6_k || p == Precision::iq4_xs;
    return is_far ? 8192 : 1024;
}
// Vector j of a tile's weights, of four bytes a lane; parts are `stride` weights apart.
template <class T>
inline const T* vector_at(const T* w, size_t stride, int j) {
    return w + size_t(j / TALL_NV) * stride + size_t(j % TALL_NV) * F::W * (4 / sizeof(T));
}

// Pieces of memory of `bytes` each that a thread will need after its tile, asked for some lines at a
// time.
struct Pieces {
    static constexpr int MAX = 16;
    const char* at[MAX];
    int num = 0, bytes = 0, lines = 0;
    int piece = 0, offset = 0;

    void prefetch() {
        for (int i = 0; i < lines && piece < num; i++) {
            __builtin_prefetch(at[piece] + offset, 0, 2);
            offset += 64;
            if (offset >= bytes) piece++, offset = 0;
        }
    }
};

// What else is asked for along with weights: nothing, or pieces.
struct NoPieces {
    void prefetch_pieces() const {}
};
struct WithPieces {
    Pieces* pieces;
    void prefetch_pieces() const { pieces->prefetch(); }
};

// What a thread will read later, `distance` bytes after what it reads now. The tiles over the same
// weights share the asking: each has its turn `every` so many steps, so that memory keeps up.
template <class Along>
struct Ahead : Along {
    ptrdiff_t distance;
    int every, turn;

    // Asks for what follows `num_bytes` at w of the parts that N vectors are in.
    template <int N>
    void prefetch_bytes(const uint8_t* w, size_t parts, int num_bytes) {
        if (turn-- > 0) return;
        turn = every - 1;
        this->prefetch_pieces();
        for (int j = 0; j < N; j += TALL_NV)
            for (int line = 0; line < num_bytes; line += 64)
                __builtin_prefetch((const char*)w + size_t(j / TALL_NV) * parts + distance + line, 0, 2);
    }

    // Asks for what follows N vectors at w.
    template <int N, class T>
    void prefetch(const T* w, size_t stride) {
        if (turn-- > 0) return;
        turn = every - 1;
        this->prefetch_pieces();
        for (int j = 0; j < N; j += TALL_NV)
            for (int line = 0; line < PART * 4; line += 64)
                __builtin_prefetch((const char*)vector_at(w, stride, j) + distance + line, 0, 2);
    }
};

// What row r of a tile has at `p` of the first; rows are `stride` bytes apart.
template <class T>
inline const T* row_at(const T* p, int r, size_t stride) {
    return (const T*)((const char*)p + size_t(r) * stride);
}

// `tmp` [rows][PANEL] = x w for some rows from `row` on, and the outputs of `panel` from vector j on.
template <class Prefetch>
using Tile = void (*)(
    const Matrix& w, const Input& x, int row, int panel, int j, Prefetch ahead, float* tmp);

// The heights of tiles with updates between them, which are only made for many rows.
constexpr int MIN_UPDATED_ROWS = 2 * TALL_ROWS, FIRST_UPDATED = TALL_ROWS / 2 + 1;
constexpr int NUM_UPDATED = TALL_ROWS + 1 - FIRST_UPDATED;

// Compiled in tiles_kernels.cpp, and not with every family. By their rows: from one on, of TALL_NV and
// of NV vectors, and from FIRST_UPDATED on, of TALL_NV vectors, with pieces.
extern const std::array<Tile<Ahead<NoPieces>>, TALL_ROWS> tall_tiles;
extern const std::array<Tile<Ahead<NoPieces>>, FLAT_ROWS> flat_tiles;
extern const std::array<Tile<Ahead<WithPieces>>, NUM_UPDATED> updated_tiles;

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
