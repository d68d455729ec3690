// Tiles of float32, bfloat16, int8 and int4, and the tables of all. Compiled once per level; see kernels.cpp.
#include <array>
#include <type_traits>
#include <utility>

#include "products/tiles_amx.h"
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

#if EVERSTREAM_DOT && !EVERSTREAM_AMX
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
#if EVERSTREAM_AMX
            if constexpr (MR < MIN_AMX_BF16_ROWS) {
                const uint16_t* half = x.half + size_t(row) * x.stride;
                constexpr unsigned ZERO = 0x8040;  // of inputs and results
                const unsigned before = _mm_getcsr();
                _mm_setcsr(before | ZERO);
                tile_as_amx<MR, N>(half, x.stride, weights, parts, w.k, ahead, tmp);
                _mm_setcsr(before);
            }
#elif EVERSTREAM_DOT
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

template <class Prefetch>
using Tile = void (*)(
    const Matrix& w, const Input& x, int row, int panel, int j, Prefetch ahead, float* tmp);

// Tiles of FIRST rows and more.
template <int FIRST, int N, class Prefetch, size_t... MR>
constexpr std::array<Tile<Prefetch>, sizeof...(MR)> tiles(std::index_sequence<MR...>) {
    return {tile<FIRST + int(MR), N, Prefetch>...};
}

// Those of a part by their rows, from FIRST on, and of a panel from one row on.
template <class Prefetch>
constexpr int FIRST = std::is_same_v<Prefetch, Ahead<WithPieces>> ? FIRST_UPDATED : 1;
template <class Prefetch>
constexpr auto tall_tiles = tiles<FIRST<Prefetch>, TALL_NV, Prefetch>(
    std::make_index_sequence<size_t(TALL_ROWS + 1 - FIRST<Prefetch>)>());
constexpr auto flat_tiles = tiles<1, NV, Ahead<NoPieces>>(std::make_index_sequence<FLAT_ROWS>());

#if EVERSTREAM_AMX
template <class Prefetch>
void multiply_amx(
    const Matrix& w, const Input& x, int row, int rows, int panel, int j, int vectors, Prefetch ahead,
    float* tmp) {
    const size_t part = size_t(panel * NV + j) / TALL_NV;
    tmp += j * F::W;
    if (w.precision == Precision::bfloat16) {
        const size_t parts = size_t(w.k_padded) * PART * 2, stride = size_t(x.stride) * 2;
        return tile_amx<false>(
            (const uint8_t*)x.half + size_t(row) * stride, stride,
            (const uint8_t*)w.data + part * parts, parts, (w.k + 1) / 2, rows, vectors, ahead, tmp);
    }
    const size_t parts = size_t(w.k_padded) * PART, stride = integer_bytes(x.stride);
    tile_amx<true>(
        x.quads(row), stride, (const uint8_t*)w.data + part * parts, parts, w.k_padded / 4, rows,
        vectors, ahead, tmp);
    const float* scale = w.scale + panel * PANEL + j * F::W;
    scale_sums(tmp, rows, vectors, x.scale + row, scale, x.sums(row), stride);
}
#endif

}  // namespace

template <class Prefetch>
void Multiplier::multiply(
    int row, int rows, int panel, int j, int vectors, Prefetch ahead, float* tmp) {
#if EVERSTREAM_AMX
    if (amx_) {
        if (!is_set_) set_amx_shapes(rows);
        is_set_ = true;
        return multiply_amx(w_, x_, row, rows, panel, j, vectors, ahead, tmp);
    }
#endif
    if constexpr (std::is_same_v<Prefetch, Ahead<NoPieces>>)
        if (vectors > TALL_NV)
            return flat_tiles.data()[rows - 1](w_, x_, row, panel, j, ahead, tmp);
    tall_tiles<Prefetch>.data()[rows - FIRST<Prefetch>](w_, x_, row, panel, j, ahead, tmp);
}
template void Multiplier::multiply(int, int, int, int, int, Ahead<NoPieces>, float*);
template void Multiplier::multiply(int, int, int, int, int, Ahead<WithPieces>, float*);

void Multiplier::release() {
#if EVERSTREAM_AMX
    _tile_release();
#endif
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
