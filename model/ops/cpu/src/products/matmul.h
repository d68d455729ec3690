// y = x W^T for packed W. Each output is summed over k in order from 0, in one accumulator, so
// its bits depend neither on how many rows share a call nor on how the work is divided.
//
// bfloat16: the weights are widened and x stays float32, except at the level with bfloat16 dot
// products, which rounds x to bfloat16. int8 and int4: x is rounded to int8 with one scale per row;
// the integer sums are exact. Those of int4 are of 32 weights that share a scale, and are added in
// float32.
#pragma once

#include <cmath>
#include <type_traits>

#include "products/tiles.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Rows of one task.
constexpr int TASK_ROWS = 96;

// Where the products go, row by row; those that are added are times `scale`.
enum class Into { store, add, swiglu, gelu, tanh, sigmoid, square_relu };
struct Output {
    float* y;
    int stride;
    Into into = Into::store;
    float scale = 1.0f;
};

inline void finish_row(const Matrix& w, int panel, float* tmp, const Output& out, int row) {
    const int begin = panel * PANEL, n = w.n - begin < PANEL ? w.n - begin : PANEL;
    if (w.bias) map(tmp, tmp, w.bias + begin, PANEL, [](F a, F b) { return a + b; });
    float* y = out.y + size_t(row) * out.stride;
    switch (out.into) {
        case Into::store: map(y + begin, tmp, n, [](F a) { return a; }); break;
        case Into::add: {  // with a scale of 1 the bits of a + b
            const F scale = F::set(out.scale);
            map(y + begin, y + begin, tmp, n, [scale](F a, F b) { return fma(scale, b, a); });
            break;
        }
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

// Weights along k that a tile multiplies between two prefetches.
inline int weights_of_prefetch(Precision precision) {
    switch (precision) {
        case Precision::float32: return 1;
        case Precision::bfloat16: return 2;
        case Precision::int8:
        case Precision::q8_0: return 4;
        case Precision::int4:
        case Precision::q4_1:
        case Precision::q4_k: return 8;
        default: return GROUP;
    }
}

// Products with nothing between their tiles; see Updates in step.h.
struct NoUpdates {
    using Along = NoPieces;
    NoUpdates share(int, int) const { return {}; }
    NoPieces before_tile(int, int, int) { return {}; }
    void after_tile() {}
};

// One panel of outputs for `rows` (at most TASK_ROWS) rows from `row` on; `products` has room for
// them. Meanwhile the panel `ahead`, which this thread will probably need next, is asked for, and
// the states of `updates`, which are made between the tiles of at least MIN_UPDATED_ROWS rows.
template <class Updates>
inline void matmul_task(
    const Matrix& w, const Input& x, int row, int rows, int panel, int ahead, const Output& out,
    float* products, Updates updates) {
    using Prefetch = Ahead<typename Updates::Along>;
    constexpr bool updated = !std::is_same_v<Updates, NoUpdates>;
    // Of a last panel that is at most half full only that half is read.
    const int vectors = w.n - panel * PANEL > PART ? NV : TALL_NV;
    const TileRows most = tile_rows(w.precision, rows);
    const bool tall = updated || rows > most.flat || vectors == TALL_NV;
    const ptrdiff_t distance = (ahead - panel) * ptrdiff_t(w.panel_bytes);
    const int width = tall ? TALL_NV : NV;
    const bool by_amx = multiplies_by_amx(w.precision, rows);
    const TileHeights heights(rows, tall ? most.tall : most.flat, by_amx);
    const int blocks = heights.tiles, parts = blocks * (vectors / width);
    Multiplier multiplier(w, x, rows);
    const int prefetches = w.k_padded / weights_of_prefetch(w.precision);
    for (int part = 0; part < parts; part++) {
        const int b = part % blocks, j = part / blocks * width;
        const int begin = heights.begin(b), end = heights.end(b);
        const auto along = updates.before_tile(part, parts, prefetches / blocks);
        // A single tile is over before the next panel is needed: it looks ahead in its own. One of AMX
        // takes as much of that at once as would be asked for.
        const bool is_near = parts == 1 && !by_amx;
        const Prefetch next = is_near ? Prefetch{along, near_of(w.precision), 1, 0}
                                      : Prefetch{along, distance, blocks, b};
        multiplier.multiply(
            row + begin, end - begin, panel, j, width, next, products + begin * PANEL);
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

inline void look_up_q8_0(const Table& table, int row, float* out) {
    const uint8_t* p = (const uint8_t*)table.data + size_t(row) * (table.k / GROUP) * (2 + GROUP);
    for (int i = 0; i < table.k; i += GROUP, p += 2 + GROUP) {
        uint16_t half;
        std::memcpy(&half, p, 2);
        const float scale = from_half(half);
        for (int j = 0; j < GROUP; j++) out[i + j] = float(int8_t(p[2 + j])) * scale;
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
        case Precision::q8_0: look_up_q8_0(table, row, out); break;
        default: break;  // no table is
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
