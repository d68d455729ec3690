// Products of small float32 matrices that lie in the nearest caches: out = A B, sides a multiple
// of 32. An operand type says how factors are stored: `Singles` as float32, `Pairs` as bfloat16,
// two neighbours along the summed index in one unit, for the instruction that adds both products.
#pragma once

#include "products/rows.h"

#if defined(__AVX512BF16__)
#define EVERSTREAM_PAIRS 1
#else
#define EVERSTREAM_PAIRS 0
#endif

namespace everstream {
namespace EVERSTREAM_LEVEL {

struct Singles {
    using Unit = float;
    static constexpr int SIZE = 1;
    static F multiply_add(F sum, const float* a, const float* b) {
        return fma(F::set(*a), F::load(b), sum);
    }
    // The units of x [rows][columns] along its columns, [rows][columns / SIZE], and along its
    // rows, [rows / SIZE][columns].
    static const float* along_columns(float*, const float* x, int, int) { return x; }
    static const float* along_rows(float*, const float* x, int, int) { return x; }
};

#if EVERSTREAM_PAIRS
struct Pairs {
    using Unit = uint32_t;
    static constexpr int SIZE = 2;
    static F multiply_add(F sum, const uint32_t* a, const uint32_t* b) {
        return {_mm512_dpbf16_ps(
            sum.v, (__m512bh)_mm512_set1_epi32(int(*a)), (__m512bh)_mm512_loadu_si512(b))};
    }
    static const uint32_t* along_columns(uint32_t* to, const float* x, int rows, int columns) {
        auto* half = reinterpret_cast<uint16_t*>(to);
        for (int i = 0; i < rows * columns; i += 32)
            _mm512_storeu_si512(
                half + i, (__m512i)_mm512_cvtne2ps_pbh(
                              _mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
        return to;
    }
    static const uint32_t* along_rows(uint32_t* to, const float* x, int rows, int columns) {
        const __m512i order = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
            4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (int i = 0; i < rows; i += 2)
            for (int j = 0; j < columns; j += 16) {
                const float* at = x + size_t(i) * columns + j;
                const auto both = (__m512i)_mm512_cvtne2ps_pbh(
                    _mm512_loadu_ps(at + columns), _mm512_loadu_ps(at));
                _mm512_storeu_si512(
                    to + size_t(i / 2) * columns + j, _mm512_permutexvar_epi16(order, both));
            }
        return to;
    }
};
#endif

// The units of x [rows][columns] turned over, [columns][rows].
template <class Unit>
const Unit* turned(Unit* to, const Unit* x, int rows, int columns) {
    for (int i = 0; i < rows; i += 16)
        for (int j = 0; j < columns; j++)
            for (int r = 0; r < 16; r++) to[size_t(j) * rows + i + r] = x[size_t(i + r) * columns + j];
    return to;
}

// A left factor [m][k]: units along its columns, or along the rows of its transpose [k][m].
template <class Unit>
struct Left {
    const Unit* units;
    int step_m, step_k;
};
template <class Op>
Left<typename Op::Unit> left(const typename Op::Unit* along_columns, int k) {
    return {along_columns, k / Op::SIZE, 1};
}
template <class Op>
Left<typename Op::Unit> transposed(const typename Op::Unit* along_rows, int m) {
    return {along_rows, 1, m};
}

// What of a product is computed or read: all, the part of the result on and below the diagonal
// (with some above it), or the part of a triangular left factor that is not zero.
enum class Part { all, lower_result, lower_left, upper_left };

constexpr int TILE_ROWS = EVERSTREAM_REGISTERS == 32 ? 8 : 4, TILE_COLUMNS = 2 * F::W;

// out[m][n] = A[m][k] B[k][n] or, with ADD, that added to it; B is stored along its rows.
template <class Op, bool ADD = false>
void multiply(
    float* out, int m, int n, int k, Left<typename Op::Unit> a, const typename Op::Unit* b,
    Part part = Part::all) {
    for (int i = 0; i < m; i += TILE_ROWS) {
        const int first = part == Part::upper_left ? i / Op::SIZE : 0;
        const int last = (part == Part::lower_left ? i + TILE_ROWS : k) / Op::SIZE;
        const int columns = part == Part::lower_result ? i + TILE_ROWS : n;
        for (int j = 0; j < columns; j += TILE_COLUMNS) {
            F sums[TILE_ROWS][2];
#pragma GCC unroll 8
            for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
                for (int c = 0; c < 2; c++)
                    sums[r][c] = ADD ? F::load(out + size_t(i + r) * n + j + c * F::W) : F::set(0.0f);
            const auto* at = a.units + size_t(i) * a.step_m + size_t(first) * a.step_k;
            const auto* bt = b + size_t(first) * n + j;
            for (int u = first; u < last; u++, at += a.step_k, bt += n) {
#pragma GCC unroll 8
                for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
                    for (int c = 0; c < 2; c++)
                        sums[r][c] = Op::multiply_add(sums[r][c], at + size_t(r) * a.step_m, bt + c * F::W);
            }
#pragma GCC unroll 8
            for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 2
                for (int c = 0; c < 2; c++) sums[r][c].store(out + size_t(i + r) * n + j + c * F::W);
        }
    }
}

// Solves (I + A) X = Y, or (I + A^T) X = Y, in place of Y [n][width], by substitution in float32.
// A [n][n] has zeros on and above the diagonal.
template <bool TRANSPOSED>
void solve_unit_triangular(const float* a, float* y, int n, int width) {
    constexpr int R = 4;
    const auto factor = [&](int i, int j) {
        return F::set(-(TRANSPOSED ? a[size_t(j) * n + i] : a[size_t(i) * n + j]));
    };
    for (int step = 0; step < n; step += R) {
        const int i = TRANSPOSED ? n - R - step : step;
        for (int c = 0; c < width; c += 2 * F::W) {
            F x[R][2];
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2; v++) x[r][v] = F::load(y + size_t(i + r) * width + c + v * F::W);
            for (int j = TRANSPOSED ? i + R : 0; j < (TRANSPOSED ? n : i); j++) {
                const float* known = y + size_t(j) * width + c;
                const F k0 = F::load(known), k1 = F::load(known + F::W);
                for (int r = 0; r < R; r++) {
                    const F f = factor(i + r, j);
                    x[r][0] = fma(f, k0, x[r][0]), x[r][1] = fma(f, k1, x[r][1]);
                }
            }
            for (int p = 0; p < R; p++) {
                const int r = TRANSPOSED ? R - 1 - p : p;
                for (int q = 0; q < p; q++) {
                    const int s = TRANSPOSED ? R - 1 - q : q;
                    const F f = factor(i + r, i + s);
                    for (int v = 0; v < 2; v++) x[r][v] = fma(f, x[s][v], x[r][v]);
                }
                for (int v = 0; v < 2; v++) x[r][v].store(y + size_t(i + r) * width + c + v * F::W);
            }
        }
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
