// Tiles of float32, bfloat16, int8 and int4, and the tables of all. Compiled once per level; see kernels.cpp.
#include <utility>

#include "products/tiles_gguf.h"
#include "products/tiles_int4.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {
namespace {

// A tile: `tmp` [MR][PANEL] = x w for MR rows and N vectors of outputs, whose weights begin at w.

template <int MR, int N, class Prefetch>
inline void tile_float(
    const float* x, int stride, const float* w, size_t parts, int k, Prefetch ahead,
    float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i++, w += PART) {
        ahead.template prefetch<N>(w, parts);
        F wv[N];
        for (int j = 0; j < N; j++) wv[j] = F::load(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i]);
            for (int j = 0; j < N; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

template <int MR, int N, class Prefetch>
inline void tile_bf16(
    const float* x, int stride, const uint16_t* w, size_t parts, int k, Prefetch ahead,
    float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i += 2, w += 2 * PART) {
        ahead.template prefetch<N>(w, parts);
        F wv[N];
        for (int j = 0; j < N; j++) wv[j] = F::even(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i]);
            for (int j = 0; j < N; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
        for (int j = 0; j < N; j++) wv[j] = F::odd(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i + 1]);
            for (int j = 0; j < N; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

#if EVERSTREAM_DOT
template <int MR, int N, class Prefetch>
inline void tile_dot(
    const uint16_t* x, int stride, const uint16_t* w, size_t parts, int k, Prefetch ahead,
    float* tmp) {
    __m512 acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = _mm512_setzero_ps();
    for (int i = 0; i < k; i += 2, w += 2 * PART) {
        ahead.template prefetch<N>(w, parts);
        __m512bh wv[N];
        for (int j = 0; j < N; j++) wv[j] = (__m512bh)_mm512_loadu_si512(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const __m512bh xv = (__m512bh)I::spread(x + size_t(r) * stride + i).v;
            for (int j = 0; j < N; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], wv[j], xv);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) _mm512_storeu_ps(tmp + r * PANEL + j * F::W, acc[r][j]);
}
#endif

template <int MR, int N, class Prefetch>
inline void tile_int8(
    const uint8_t* x, size_t stride, const float* x_scale, const uint8_t* w, size_t parts,
    int k, const float* scale, const int32_t* x_sums, Prefetch ahead, float* tmp) {
    Sums4 acc[MR][N];
    for (int r = 0; r < MR; r++) {
        const int32_t first = INT8_OFFSET ? -INT8_OFFSET * *row_at(x_sums, r, stride) : 0;
        for (int j = 0; j < N; j++) acc[r][j] = sums_from(first);
    }
    for (int i = 0; i < k; i += 4, w += 4 * PART, x += QUAD_BYTES) {
        ahead.template prefetch<N>(w, parts);
        add_quad(x, stride, w, parts, acc);
    }
    for (int j = 0; j < N; j++) {
        const F by = F::load(scale + j * F::W);
        for (int r = 0; r < MR; r++)
            (to_integers(acc[r][j]).to_float() * (by * F::set(x_scale[r])))
                .store(tmp + r * PANEL + j * F::W);
    }
}

// The outputs of `panel` from vector `j` on, N of them, for MR rows from `row` on.
template <int MR, int N, class Prefetch>
inline void tile(
    const Matrix& w, const Input& x, int row, int panel, int j, Prefetch ahead, float* tmp) {
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
        default: tile_gguf(w, x, row, MR, panel, j, N, ahead, tmp); break;
    }
}

// Tiles of FIRST rows and more.
template <int FIRST, int N, class Prefetch, size_t... MR>
constexpr std::array<Tile<Prefetch>, sizeof...(MR)> tiles(std::index_sequence<MR...>) {
    return {tile<FIRST + int(MR), N, Prefetch>...};
}

}  // namespace

const std::array<Tile<Ahead<NoPieces>>, TALL_ROWS> tall_tiles =
    tiles<1, TALL_NV, Ahead<NoPieces>>(std::make_index_sequence<TALL_ROWS>());
const std::array<Tile<Ahead<NoPieces>>, FLAT_ROWS> flat_tiles =
    tiles<1, NV, Ahead<NoPieces>>(std::make_index_sequence<FLAT_ROWS>());
const std::array<Tile<Ahead<WithPieces>>, NUM_UPDATED> updated_tiles =
    tiles<FIRST_UPDATED, TALL_NV, Ahead<WithPieces>>(std::make_index_sequence<NUM_UPDATED>());

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
