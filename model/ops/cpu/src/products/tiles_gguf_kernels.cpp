// Compiled once per level; see kernels.cpp.
#include <array>
#include <type_traits>
#include <utility>

#include "products/tiles_gguf.h"
#include "products/tiles_int4.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {
namespace {

// In one function GCC 12 keeps the sums in registers; of so many calls it would leave some out.
#define EVERSTREAM_INLINE inline __attribute__((always_inline))

// What IQ4_NL and IQ4_XS have codes of, 128 more where weights must not be negative.
constexpr int TABLE_OFFSET = EVERSTREAM_DOT ? 128 : 0;
struct Table16 {
    uint8_t bytes[16];
};
constexpr Table16 iq4_table() {
    constexpr int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    Table16 table = {};
    for (int i = 0; i < 16; i++) table.bytes[i] = uint8_t(values[i] + TABLE_OFFSET);
    return table;
}
constexpr Table16 IQ4_TABLE = iq4_table();

constexpr bool has_table(Precision p) {
    return p == Precision::iq4_xs || p == Precision::iq4_nl;
}
// What a weight is less than its code here.
constexpr int offset_of(Precision p) {
    if (has_table(p)) return TABLE_OFFSET;
    if (p == Precision::q8_0) return INT8_OFFSET;
    return p == Precision::q6_k ? 32 : 0;
}
// Whether codes are what is multiplied, so that a group's loop is that of int4 or int8.
constexpr bool is_plain(Precision p) {
    return p == Precision::q4_1 || p == Precision::q8_0 || p == Precision::q4_k;
}

// Four weights along k of each output, as they are multiplied.
#if EVERSTREAM_DOT
struct Quad {
    I bytes;
};
inline Quad quad_of(I bytes) { return {bytes}; }
inline Sums4 add_products(Sums4 sums, Quad quad, const uint8_t* x) {
    return (Sums4)_mm512_dpbusd_epi32((__m512i)sums, quad.bytes.v, I::spread(x).v);
}
#else
struct Quad {
    I even, odd;
};
inline Quad quad_of(I bytes) { return {bytes.even_bytes(), bytes.odd_bytes()}; }
inline Sums4 add_products(Sums4 sums, Quad quad, const uint8_t* x) {
    return dot_pairs(dot_pairs(sums, quad.even, I::spread(x)), quad.odd, I::spread(x + 4));
}
#endif

// Quad D of a group at w, of vector j.
template <Precision P, int D>
EVERSTREAM_INLINE Quad quad_at(const uint8_t* w, size_t parts, int j) {
    constexpr int BITS = gguf_block(P).bits;
    const auto word = [&](int i) { return I::load(vector_at(w + i * PART * 4, parts, j)); };
    I codes = word(D / 2).template bits<D % 2 * 4, 15>();
    if constexpr (BITS == 5) codes = codes | word(GROUP_WORDS).template bits<D - 4, 16>();
    if constexpr (BITS == 6)
        codes = codes | word(GROUP_WORDS + D / 4).template bits<D % 4 * 2 - 4, 48>();
    if constexpr (has_table(P)) codes = I::repeat(IQ4_TABLE.bytes).shuffled(codes);
    return quad_of(codes);
}

// total += the products of the quads D to END of a group.
template <Precision P, int D, int END, int MR, int N>
EVERSTREAM_INLINE void add_quads(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, Sums4 (&total)[MR][N]) {
    Quad quads[N];
    for (int j = 0; j < N; j++) quads[j] = quad_at<P, D>(w, parts, j);
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++)
            total[r][j] = add_products(total[r][j], quads[j], x + r * stride + D * QUAD_BYTES);
    if constexpr (D + 1 < END) add_quads<P, D + 1, END>(x, stride, w, parts, total);
}

// total += the sums of the groups' inputs, at x_sums for each row, times their bounds, at w.
template <int MR, int N>
EVERSTREAM_INLINE void add_bounds(
    const int16_t* x_sums, size_t stride, const uint8_t* w, size_t parts, I (&total)[MR][N]) {
    for (int word = 0; word < BLOCK_GROUPS / 4; word++, x_sums += 4)
        for (int j = 0; j < N; j++) {
            const I bounds = I::load(vector_at(w + word * PART * 4, parts, j));
            const I even = bounds.even_bytes(), odd = bounds.odd_bytes();
            for (int r = 0; r < MR; r++) {
                const int16_t* sums = row_at(x_sums, r, stride);
                total[r][j] = dot_pairs(total[r][j], even, I::spread(sums));
                total[r][j] = dot_pairs(total[r][j], odd, I::spread(sums + 2));
            }
        }
}

// Where the vectors of a tile have what is smaller than a word: `bytes` of each lane.
inline const uint8_t* lanes_at(const uint8_t* w, size_t parts, int j, int bytes) {
    return w + size_t(j / TALL_NV) * parts + j % TALL_NV * F::W * bytes;
}

// The inputs of a block in the first row of a tile, and their sums; see `Input`.
struct BlockInputs {
    const uint8_t* quads;
    const int32_t* sums;
    const int16_t *short_sums, *half_sums;

    void advance(int weights) {
        quads += weights / 4 * QUAD_BYTES;
        sums += weights / GROUP, short_sums += weights / GROUP, half_sums += 2 * weights / GROUP;
    }
};

// block = the sums of a block's groups, times their steps; w is the block's.
template <Precision P, int MR, int N, class Prefetch>
EVERSTREAM_INLINE void sum_groups(
    const BlockInputs& in, size_t stride, const uint8_t* w, size_t parts, Prefetch& ahead,
    I (&block)[MR][N]) {
    constexpr GgufBlock format = gguf_block(P);
    constexpr int SPLIT = format.steps > format.groups() ? 2 : 1, QUADS = GROUP / 4 / SPLIT;
    constexpr int OFFSET = offset_of(P), WORDS_BYTES = format.group_bytes() * PART;
    const uint8_t *x = in.quads, *steps = w + format.groups() * WORDS_BYTES;
    // The sum of the inputs of part s of group g, for row r.
    const auto x_sum = [&](int r, int g, int s) -> int32_t {
        if (SPLIT == 1) return *row_at(in.sums + g, r, stride);
        return *row_at(in.half_sums + 2 * g + s, r, stride);
    };
    const auto add = [&](int g, int s, const Sums4 (&total)[MR][N]) {
        for (int j = 0; j < N; j++) {
            const uint8_t* at = lanes_at(steps + (g * SPLIT + s) * PART, parts, j, 1);
            for (int r = 0; r < MR; r++)
                block[r][j] = format.steps ? block[r][j] + to_integers(total[r][j]) * I::signed_bytes(at)
                                           : to_integers(total[r][j]);
        }
    };
    for (int g = 0; g < format.groups(); g++, w += WORDS_BYTES, x += GROUP / 4 * QUAD_BYTES) {
        Sums4 total[MR][N];
        const auto start = [&](int s) {
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < N; j++)
                    total[r][j] = sums_from(OFFSET ? -OFFSET * x_sum(r, g, s) : 0);
        };
        if constexpr (is_plain(P)) {
            start(0);
            if constexpr (format.bits == 8)
                for (int d = 0; d < GROUP / 4; d++) {
                    ahead.template prefetch_bytes<N>(w + d * PART * 4, parts, PART * 4);
                    add_quad(x + d * QUAD_BYTES, stride, w + d * PART * 4, parts, total);
                }
            else
                add_group<MR, N>(x, stride, w, parts, ahead, total);
            add(g, 0, total);
        } else {
            // Once and first: GCC 12 moves products behind a later branch, and stores what they need.
            ahead.template prefetch_bytes<N>(w, parts, WORDS_BYTES);
            start(0);
            add_quads<P, 0, QUADS>(x, stride, w, parts, total);
            add(g, 0, total);
        }
        if constexpr (SPLIT == 2) {
            start(1);
            add_quads<P, QUADS, 2 * QUADS>(x, stride, w, parts, total);
            add(g, 1, total);
        }
    }
}

template <Precision P, int MR, int N, class Prefetch>
void tile_of(
    const Input& x, int row, const uint8_t* w, size_t parts, int blocks, Prefetch ahead, float* tmp) {
    constexpr GgufBlock format = gguf_block(P);
    constexpr int STEPS = format.groups() * format.group_bytes() * PART;
    constexpr int BOUNDS = STEPS + format.steps * PART, HALVES = BOUNDS + format.bounds * PART;
    constexpr int BYTES = format.num_bytes() * PART;
    const size_t stride = integer_bytes(x.stride);
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    BlockInputs in{x.quads(row), x.sums(row) + 1, x.short_sums(row), x.half_sums(row)};
    for (int b = 0; b < blocks; b++, w += BYTES, in.advance(format.weights)) {
        I block[MR][N], bounds[MR][N];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < N; j++) block[r][j] = bounds[r][j] = I::zero();
        // Behind the products of a block of one group GCC 12 would store their inputs; see `sum_groups`.
        if constexpr (P != Precision::q4_k)
            ahead.template prefetch_bytes<N>(w + STEPS, parts, BYTES - STEPS);
        sum_groups<P>(in, stride, w, parts, ahead, block);
        if constexpr (P == Precision::q4_k)
            ahead.template prefetch_bytes<N>(w + STEPS, parts, BYTES - STEPS);
        if constexpr (format.bounds > 0)
            add_bounds(in.short_sums, stride, w + BOUNDS, parts, bounds);
        else if constexpr (format.has_bounds())
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < N; j++) bounds[r][j] = I::spread(row_at(in.sums, r, stride));
        for (int j = 0; j < N; j++) {
            const auto* at = (const uint16_t*)lanes_at(w + HALVES, parts, j, 2);
            const F step = F::half(at);
            for (int r = 0; r < MR; r++) acc[r][j] = fma(block[r][j].to_float(), step, acc[r][j]);
            if constexpr (format.has_bounds()) {
                const F bound = F::half(at + PART);
                for (int r = 0; r < MR; r++)
                    acc[r][j] = fma(bounds[r][j].to_float(), bound, acc[r][j]);
            }
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++)
            (acc[r][j] * F::set(x.scale[row + r])).store(tmp + r * PANEL + j * F::W);
}

// Tiles that fit the registers: few rows of a panel, or up to FLAT_ROWS of a part.
constexpr int WIDE_ROWS = NV > TALL_NV ? 2 : 0;
template <class Prefetch>
using TileOf = void (*)(const Input&, int, const uint8_t*, size_t, int, Prefetch, float*);

template <Precision P, int FIRST, int N, class Prefetch, size_t... MR>
constexpr auto tiles_of(std::index_sequence<MR...>) {
    return std::array<TileOf<Prefetch>, sizeof...(MR)>{tile_of<P, FIRST + int(MR), N, Prefetch>...};
}

template <Precision P, class Prefetch>
void run(
    const Matrix& w, const Input& x, int row, int rows, size_t part, int vectors, Prefetch ahead,
    float* tmp) {
    constexpr bool updated = std::is_same_v<Prefetch, Ahead<WithPieces>>;
    constexpr int FIRST = !updated ? 1 : FIRST_UPDATED > FLAT_ROWS ? FIRST_UPDATED / 2 : FIRST_UPDATED;
    static constexpr auto narrow =
        tiles_of<P, FIRST, TALL_NV, Prefetch>(std::make_index_sequence<FLAT_ROWS + 1 - FIRST>());
    const int blocks = w.k_padded / gguf_block(P).weights;
    const size_t parts = size_t(blocks) * size_t(gguf_block(P).num_bytes()) * PART;
    const uint8_t* weights = (const uint8_t*)w.data + part * parts;
    if constexpr (!updated) {
        static constexpr auto wide =
            tiles_of<P, 1, NV, Prefetch>(std::make_index_sequence<WIDE_ROWS>());
        if (vectors > TALL_NV && rows <= WIDE_ROWS)
            return wide.data()[rows - 1](x, row, weights, parts, blocks, ahead, tmp);
    }
    for (int j = 0; j < vectors; j += TALL_NV, weights += parts)
        for (int half = 0, num = rows > FLAT_ROWS ? 2 : 1; half < num; half++) {
            const int begin = rows * half / num, end = rows * (half + 1) / num;
            narrow.data()[end - begin - FIRST](
                x, row + begin, weights, parts, blocks, ahead, tmp + begin * PANEL + j * F::W);
        }
}

}  // namespace

template <class Prefetch>
void tile_gguf(
    const Matrix& w, const Input& x, int row, int rows, int panel, int j, int vectors, Prefetch ahead,
    float* tmp) {
    const size_t part = size_t(panel * NV + j) / TALL_NV;
    switch (w.precision) {
        case Precision::q4_1: return run<Precision::q4_1>(w, x, row, rows, part, vectors, ahead, tmp);
        case Precision::q8_0: return run<Precision::q8_0>(w, x, row, rows, part, vectors, ahead, tmp);
        case Precision::q4_k: return run<Precision::q4_k>(w, x, row, rows, part, vectors, ahead, tmp);
        case Precision::q5_k: return run<Precision::q5_k>(w, x, row, rows, part, vectors, ahead, tmp);
        case Precision::q6_k: return run<Precision::q6_k>(w, x, row, rows, part, vectors, ahead, tmp);
        case Precision::iq4_xs:
            return run<Precision::iq4_xs>(w, x, row, rows, part, vectors, ahead, tmp);
        case Precision::iq4_nl:
            return run<Precision::iq4_nl>(w, x, row, rows, part, vectors, ahead, tmp);
        default: return;
    }
}

template void tile_gguf(
    const Matrix&, const Input&, int, int, int, int, int, Ahead<NoPieces>, float*);
template void tile_gguf(
    const Matrix&, const Input&, int, int, int, int, int, Ahead<WithPieces>, float*);

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
