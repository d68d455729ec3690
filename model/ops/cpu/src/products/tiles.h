// Tiles: products of a few rows with some outputs' packed weights.
#pragma once

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

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define EVERSTREAM_AMX 1
#else
#define EVERSTREAM_AMX 0
#endif

// Whether AMX multiplies a product of so many rows. Fewer wait for memory, and vectors, which give the same
// bits, wait less.
constexpr int AMX_ROWS = 16, MIN_AMX_INT8_ROWS = 2 * AMX_ROWS, MIN_AMX_BF16_ROWS = 3;
constexpr bool multiplies_by_amx(Precision p, int rows) {
    return EVERSTREAM_AMX && ((p == Precision::bfloat16 && rows >= MIN_AMX_BF16_ROWS) ||
                              (p == Precision::int8 && rows >= MIN_AMX_INT8_ROWS));
}

// How the rows of a task are divided into tiles. Those of AMX are equally high, since its shapes cost as
// much to set as some steps of a tile; rows that two of them share are the same in both.
struct TileHeights {
    int rows, most, tiles;
    bool equal;

    TileHeights(int rows, int most, bool equal)
        : rows(rows), most(most), tiles((rows + most - 1) / most), equal(equal) {}
    int begin(int tile) const {
        if (!equal) return rows * tile / tiles;
        const int height = (rows + tiles - 1) / tiles, last = rows - height;
        return tile * height < last ? tile * height : last;
    }
    int end(int tile) const {
        return equal ? begin(tile) + (rows + tiles - 1) / tiles : begin(tile + 1);
    }
};

// The most rows of a tile of a part, and of one of a panel, in a product of so many rows.
struct TileRows {
    int tall, flat;
};
constexpr TileRows tile_rows(Precision p, int rows) {
    return multiplies_by_amx(p, rows) ? TileRows{2 * AMX_ROWS, AMX_ROWS}
                                      : TileRows{TALL_ROWS, FLAT_ROWS};
}

// How far ahead of its work a row alone asks for weights, in bytes. Most blocks of GGUF take longer to
// unpack, so that what is near is asked for too late.
constexpr ptrdiff_t near_of(Precision p) {
    const bool is_far = p == Precision::q5_k || p == Precision::q6_k || p == Precision::iq4_xs;
    return is_far ? 8192 : 4096;
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

// Tiles with pieces are only made of products of so many rows: none is lower than FIRST_UPDATED.
constexpr int MIN_UPDATED_ROWS = 2 * TALL_ROWS, FIRST_UPDATED = TALL_ROWS / 2 + 1;

// The product of a task with w, and who multiplies it, from the first tile to the last.
class Multiplier {
public:
    Multiplier(const Matrix& w, const Input& x, int rows)
        : w_(w), x_(x), amx_(multiplies_by_amx(w.precision, rows)) {}
    ~Multiplier() {
        if (is_set_) release();
    }
    Multiplier(const Multiplier&) = delete;

    // `tmp` [rows][PANEL] = x w for `rows` rows from `row` on, and `vectors` (TALL_NV or NV) vectors of
    // outputs of `panel` from vector j on. At most as many rows as `tile_rows` says; by AMX the same
    // number in every call, for which its shapes are set once. Compiled in tiles_kernels.cpp, and not
    // with every family.
    template <class Prefetch>
    void multiply(int row, int rows, int panel, int j, int vectors, Prefetch ahead, float* tmp);

private:
    void release();

    const Matrix& w_;
    const Input& x_;
    bool amx_, is_set_ = false;
};
extern template void Multiplier::multiply(int, int, int, int, int, Ahead<NoPieces>, float*);
extern template void Multiplier::multiply(int, int, int, int, int, Ahead<WithPieces>, float*);

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
