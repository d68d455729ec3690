// Products with blocks of GGUF's Q4_K: codes of 0 to 15 times their group's step, less its bound; steps
// and bounds are integers of 6 bits times the block's float16 of each.
//
// A block's sums are exact: of the groups' products times their steps, and of the inputs times their
// bounds. Two numbers of float32 are added to an output for each block.
#pragma once

#include "tiles_int4.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Where the parts of a block begin; see `Matrix`.
constexpr int STEPS_AT = BLOCK_GROUPS * SCALES_AT, BOUNDS_AT = STEPS_AT + BLOCK_GROUPS * PART;
constexpr int HALVES_AT = BOUNDS_AT + BLOCK_GROUPS * PART, BLOCK_BYTES = HALVES_AT + 4 * PART;

// total += the sums of the groups' inputs, at x_sums for each row, times their bounds.
template <int MR, int N>
inline void add_bounds(
    const int16_t* x_sums, size_t stride, const uint8_t* w, size_t parts, I (&total)[MR][N]) {
    for (int word = 0; word < BLOCK_GROUPS / 4; word++, x_sums += 4)
        for (int j = 0; j < N; j++) {
            const I bounds = I::load(vector_at(w + BOUNDS_AT + word * PART * 4, parts, j));
            const I even = bounds.even_bytes(), odd = bounds.odd_bytes();
            for (int r = 0; r < MR; r++) {
                const char* sums = (const char*)x_sums + r * stride;
                total[r][j] = dot_pairs(total[r][j], even, I::spread(sums));
                total[r][j] = dot_pairs(total[r][j], odd, I::spread(sums + 4));
            }
        }
}

// See tiles.h and tile_int4; `short_sums` as in `Input`.
template <int MR, int N, class Look>
inline void tile_q4k(
    const uint8_t* x, size_t stride, const float* x_scale, const uint8_t* w, size_t parts,
    int blocks, const int16_t* short_sums, Look ahead, float* tmp) {
    if constexpr (N > TALL_NV && MR > 2) {
        tile_q4k<MR, TALL_NV>(x, stride, x_scale, w, parts, blocks, short_sums, ahead, tmp);
        return tile_q4k<MR, TALL_NV>(
            x, stride, x_scale, w + parts, parts, blocks, short_sums, ahead, tmp + PART);
    }
    if constexpr (MR > FLAT_ROWS) {
        constexpr int HALF = MR / 2;
        tile_q4k<HALF, N>(x, stride, x_scale, w, parts, blocks, short_sums, ahead, tmp);
        return tile_q4k<MR - HALF, N>(
            x + HALF * stride, stride, x_scale + HALF, w, parts, blocks,
            (const int16_t*)((const char*)short_sums + HALF * stride), ahead, tmp + HALF * PANEL);
    }
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int b = 0; b < blocks; b++, w += BLOCK_BYTES, short_sums += BLOCK_GROUPS) {
        I block[MR][N];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < N; j++) block[r][j] = I::zero();
        for (int g = 0; g < BLOCK_GROUPS; g++, x += GROUP / 4 * QUAD_BYTES) {
            Sums4 total[MR][N];
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < N; j++) total[r][j] = sums_from(0);
            add_group<MR, N>(x, stride, w + g * SCALES_AT, parts, ahead, total);
            for (int j = 0; j < N; j++) {
                const uint8_t* steps = w + size_t(j / TALL_NV) * parts + STEPS_AT;
                const I step = I::bytes(steps + g * PART + j % TALL_NV * F::W);
                for (int r = 0; r < MR; r++)
                    block[r][j] = block[r][j] + to_integers(total[r][j]) * step;
            }
        }
        ahead.template prefetch_bytes<N>(w + STEPS_AT, parts, BLOCK_BYTES - STEPS_AT);
        I bounds[MR][N];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < N; j++) bounds[r][j] = I::zero();
        add_bounds<MR, N>(short_sums, stride, w, parts, bounds);
        for (int j = 0; j < N; j++) {
            const uint8_t* halves = w + size_t(j / TALL_NV) * parts + HALVES_AT;
            const uint16_t* at = (const uint16_t*)halves + j % TALL_NV * F::W;
            const F step = F::half(at), bound = F::set(0.0f) - F::half(at + PART);
            for (int r = 0; r < MR; r++) {
                acc[r][j] = fma(block[r][j].to_float(), step, acc[r][j]);
                acc[r][j] = fma(bounds[r][j].to_float(), bound, acc[r][j]);
            }
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++)
            (acc[r][j] * F::set(x_scale[r])).store(tmp + r * PANEL + j * F::W);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
