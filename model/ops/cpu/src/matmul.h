// y = x W^T for packed W. Each output is summed over k in order from 0, in one accumulator, so
// its bits depend neither on how many rows share a call nor on how the work is divided.
//
// bfloat16: the weights are widened and x stays float32, except at the level with bfloat16 dot
// products, which rounds x to bfloat16. int8 and int4: x is rounded to int8 with one scale per row;
// the integer sums are exact. Those of int4 are of 32 weights that share a scale, and are added in
// float32.
#pragma once

#include <array>
#include <cmath>
#include <type_traits>
#include <utility>

#include "tiles.h"
#include "tiles_gguf.h"
#include "tiles_int4.h"
#include "tiles_q4k.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Rows of one task.
constexpr int TASK_ROWS = 96;

// Where the products go, row by row.
enum class Into { store, add, swiglu, gelu, tanh, sigmoid, square_relu };
struct Output {
    float* y;
    int stride;
    Into into = Into::store;
};

inline void finish_row(const Matrix& w, int panel, float* tmp, const Output& out, int row) {
    const int begin = panel * PANEL, n = w.n - begin < PANEL ? w.n - begin : PANEL;
    if (w.bias) map(tmp, tmp, w.bias + begin, PANEL, [](F a, F b) { return a + b; });
    float* y = out.y + size_t(row) * out.stride;
    switch (out.into) {
        case Into::store: map(y + begin, tmp, n, [](F a) { return a; }); break;
        case Into::add: map(y + begin, y + begin, tmp, n, [](F a, F b) { return a + b; }); break;
        case Into::gelu: map(y + begin, tmp, n, [](F a) { return gelu(a); }); break;
        case Into::tanh: map(y + begin, tmp, n, [](F a) { return tanh(a); }); break;
        case Into::sigmoid: map(y + begin, tmp, n, [](F a) { return sigmoid(a); }); break;
        case Into::square_relu: {
            const F zero = F::set(0.0f);
            const auto square = [zero](F a) { return max(zero, a) * max(zero, a); };
            map(y + begin, tmp, n, square);
            break;
        }
        case Into::swiglu: {  // y has room for whole half panels
            const auto glu = [](F gate, F value) { return silu(gate) * value; };
            map(y + begin / 2, tmp, tmp + PANEL / 2, PANEL / 2, glu);
            break;
        }
    }
}

// The outputs of `panel` from vector `j` on, N of them, for MR rows from `row` on.
template <int MR, int N, class Look>
inline void tile(
    const Matrix& w, const Input& x, int row, int panel, int j, Look ahead, float* tmp) {
    const size_t parts = size_t(w.k_padded) * PART;  // weights from part to part
    const size_t begin = size_t(panel * NV + j) / TALL_NV * parts;
    const float* f = x.f + size_t(row) * x.stride;
    const int output = panel * PANEL + j * F::W;
    tmp += j * F::W;
    switch (w.precision) {
        case Precision::float32:
            tile_float<MR, N>(f, x.stride, (const float*)w.data + begin, parts, w.k, ahead, tmp);
            break;
        case Precision::bfloat16: {
            const uint16_t* weights = (const uint16_t*)w.data + begin;
#if EVERSTREAM_DOT
            const uint16_t* half = x.half + size_t(row) * x.stride;
            tile_dot<MR, N>(half, x.stride, weights, parts, w.k, ahead, tmp);
#else
            tile_bf16<MR, N>(f, x.stride, weights, parts, w.k_padded, ahead, tmp);
#endif
            break;
        }
        case Precision::int8: {
            tile_int8<MR, N>(
                x.quads(row), integer_bytes(x.stride), x.scale + row,
                (const uint8_t*)w.data + begin, parts, w.k_padded, w.scale + output, x.sums(row),
                ahead, tmp);
            break;
        }
        case Precision::int4: {
            const int groups = w.k_padded / GROUP;
            const size_t bytes = size_t(groups) * GROUP_BYTES;  // from part to part
            tile_int4<MR, N>(
                x.quads(row), integer_bytes(x.stride), x.scale + row,
                (const uint8_t*)w.data + size_t(panel * NV + j) / TALL_NV * bytes, bytes, groups,
                x.sums(row), ahead, tmp);
            break;
        }
        case Precision::q4_k: {
            const int blocks = w.k_padded / BLOCK;
            const size_t bytes = size_t(blocks) * BLOCK_BYTES;  // from part to part
            tile_q4k<MR, N>(
                x.quads(row), integer_bytes(x.stride), x.scale + row,
                (const uint8_t*)w.data + size_t(panel * NV + j) / TALL_NV * bytes, bytes, blocks,
                x.short_sums(row), ahead, tmp);
            break;
        }
        default: tile_gguf(w, x, row, MR, panel, j, N, ahead, tmp); break;
    }
}

template <class Look>
using Tile = void (*)(
    const Matrix&, const Input&, int row, int panel, int j, Look ahead, float* tmp);

// Tiles of FIRST rows and more.
template <int FIRST, int N, class Look, size_t... MR>
constexpr auto tiles_of_heights(std::index_sequence<MR...>) {
    return std::array<Tile<Look>, sizeof...(MR)>{tile<FIRST + int(MR), N, Look>...};
}

// Weights along k that a tile multiplies between two looks ahead.
inline int weights_of_look(Precision precision) {
    switch (precision) {
        case Precision::float32: return 1;
        case Precision::bfloat16: return 2;
        case Precision::int8: return 4;
        case Precision::int4:
        case Precision::q4_k: return 8;
        default: return GROUP;
    }
}

// Products with nothing between their tiles; see updates.h.
struct NoUpdates {
    using Along = NoPieces;
    NoUpdates share(int, int) const { return {}; }
    NoPieces before_tile(int, int, int) { return {}; }
    void after_tile() {}
};

// The heights of tiles with updates between them, which are only made for many rows.
constexpr int MIN_UPDATED_ROWS = 2 * TALL_ROWS, FIRST_UPDATED = TALL_ROWS / 2 + 1;

// One panel of outputs for `rows` (at most TASK_ROWS) rows from `row` on; `products` has room for
// them. Meanwhile the panel `ahead`, which this thread will probably need next, is asked for, and
// the states of `updates`, which are made between the tiles of at least MIN_UPDATED_ROWS rows.
template <class Updates>
inline void matmul_task(
    const Matrix& w, const Input& x, int row, int rows, int panel, int ahead, const Output& out,
    float* products, Updates updates) {
    using Look = Ahead<typename Updates::Along>;
    constexpr bool updated = !std::is_same_v<Updates, NoUpdates>;
    constexpr int first = updated ? FIRST_UPDATED : 1;
    static constexpr auto tall_tiles = tiles_of_heights<first, TALL_NV, Look>(
        std::make_index_sequence<TALL_ROWS + 1 - first>());
    // Of a last panel that is at most half full only that half is read.
    const int vectors = w.n - panel * PANEL > PART ? NV : TALL_NV;
    const bool tall = updated || rows > FLAT_ROWS || vectors == TALL_NV;
    const ptrdiff_t distance = (ahead - panel) * ptrdiff_t(w.panel_bytes);
    const int height = tall ? TALL_ROWS : FLAT_ROWS, width = tall ? TALL_NV : NV;
    const int blocks = (rows + height - 1) / height, parts = blocks * (vectors / width);
    const int looks = w.k_padded / weights_of_look(w.precision);
    for (int part = 0; part < parts; part++) {
        const int b = part % blocks, j = part / blocks * width;
        const int begin = rows * b / blocks, end = rows * (b + 1) / blocks;
        const auto along = updates.before_tile(part, parts, looks / blocks);
        // A single tile is over before the next panel is needed: it looks ahead in its own.
        const Look next = parts == 1 ? Look{along, near_of(w.precision), 1, 0}
                                     : Look{along, distance, blocks, b};
        float* tmp = products + begin * PANEL;
        if constexpr (!updated) {
            static constexpr auto flat_tiles =
                tiles_of_heights<1, NV, Look>(std::make_index_sequence<FLAT_ROWS>());
            const Tile<Look>* tiles = tall ? tall_tiles.data() : flat_tiles.data();
            tiles[end - begin - first](w, x, row + begin, panel, j, next, tmp);
        } else {
            tall_tiles[size_t(end - begin - first)](w, x, row + begin, panel, j, next, tmp);
        }
        updates.after_tile();
    }
    for (int r = 0; r < rows; r++) finish_row(w, panel, products + r * PANEL, out, row + r);
}

inline void look_up_int4(const Table& table, int row, float* out) {
    const int groups = padded(table.k, GROUP) / GROUP;
    const uint8_t* p = (const uint8_t*)table.data + size_t(row) * groups * (GROUP / 2 + 2);
    for (int i = 0; i < table.k; i += GROUP, p += GROUP / 2 + 2) {
        const int n = table.k - i < GROUP ? table.k - i : GROUP;
        uint16_t half;
        std::memcpy(&half, p + GROUP / 2, 2);
        const float scale = from_half(half);
        for (int j = 0; j < n; j++) {
            const int byte = p[j / 8 * 4 + j % 4], code = j % 8 < 4 ? byte & 15 : byte >> 4;
            out[i + j] = float(code - 8) * scale;
        }
    }
}

// One row of a table as float32.
inline void look_up(const Table& table, int row, float* out) {
    const size_t at = size_t(row) * table.k;
    switch (table.precision) {
        case Precision::float32: std::memcpy(out, (const float*)table.data + at, size_t(table.k) * 4); break;
        case Precision::bfloat16: {
            const uint16_t* p = (const uint16_t*)table.data + at;
            for (int i = 0; i < table.k; i++) {
                const uint32_t u = uint32_t(p[i]) << 16;
                std::memcpy(out + i, &u, 4);
            }
            break;
        }
        case Precision::int8: {
            const int8_t* p = (const int8_t*)table.data + at;
            for (int i = 0; i < table.k; i++) out[i] = float(p[i]) * table.scale[row];
            break;
        }
        case Precision::int4: look_up_int4(table, row, out); break;
        default: break;  // no table is
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
