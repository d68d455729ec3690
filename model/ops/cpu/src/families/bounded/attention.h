// Softmax attention of a key head's queries over the blocks of a bounded past, whose keys and values
// are float16.
//
// Lanes run over the positions of a block for scores, and over channels for values; sums over
// channels and over positions go in order. A query takes the places in tiles of ATTENTION_TILE with
// a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax",
// arXiv 1805.02867). So its bits depend neither on the vector's width nor on the queries next to it.
#pragma once

#include "families/bounded/model.h"
#include "products/half.h"
#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

constexpr int ATTENTION_TILE = 64;
constexpr int TILE_BLOCKS = ATTENTION_TILE / POSITION_BLOCK;
// Queries whose sums are in registers, and vectors of channels of each.
constexpr int QUERIES = F::W == 16 ? 8 : EVERSTREAM_REGISTERS == 32 || F::W == 8 ? 4 : 2;
constexpr int CHANNELS = F::W >= 8 ? 2 : 4;

// A query in the course of its softmax: weighted values in `out`, their weights' sum in `total`.
struct Query {
    const float *q, *near;  // [F]; `near` is null where the sinks see q itself
    float* out;             // [F]
    float largest, total;
    alignas(64) float scores[ATTENTION_TILE];
};

// The head's keys and values of up to ATTENTION_TILE places, from a block's first on. What is read
// next is asked for meanwhile: the values with the scores, the next tile's keys with the values, as
// memory keeps up with one line of each for a line that is read.
struct PastTile {
    const uint16_t *keys[TILE_BLOCKS], *values[TILE_BLOCKS];
    const uint16_t* next_keys[TILE_BLOCKS];  // of the next tile, or null
    int count;                               // places that are seen

    int num_blocks() const { return (count + POSITION_BLOCK - 1) / POSITION_BLOCK; }
    int seen_of(int block) const {
        const int left = count - block * POSITION_BLOCK;
        return left < POSITION_BLOCK ? left : POSITION_BLOCK;
    }
};

// The scores of N queries for the positions of one block: keys [n][positions]. `next`, which may be
// null, is as long and read later.
template <int N, class Channel>
inline void score_block(
    const uint16_t* keys, const uint16_t* next, int n, Channel channel, float* const (&scores)[N]) {
    constexpr int VECTORS = POSITION_BLOCK / F::W;
    F acc[N][VECTORS];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < VECTORS; j++) acc[i][j] = F::set(0.0f);
    for (int d = 0; d < n; d++, keys += POSITION_BLOCK) {
        if (next) __builtin_prefetch(next + d * POSITION_BLOCK, 0, 2);
        F key[VECTORS];
        for (int j = 0; j < VECTORS; j++) key[j] = F::half(keys + j * F::W);
        for (int i = 0; i < N; i++) {
            const F q = F::set(channel(i, d));
            for (int j = 0; j < VECTORS; j++) acc[i][j] = fma(q, key[j], acc[i][j]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < VECTORS; j++) acc[i][j].store(scores[i] + j * F::W);
}

template <int N>
inline void score_queries(Query* queries, const PastTile& past, int n, bool is_first) {
    for (int block = 0; block < past.num_blocks(); block++) {
        const float* q[N];
        float* scores[N];
        for (int i = 0; i < N; i++) {
            q[i] = queries[i].q;
            scores[i] = queries[i].scores + block * POSITION_BLOCK;
        }
        const uint16_t* next = is_first ? past.values[block] : nullptr;
        score_block<N>(past.keys[block], next, n, [&q](int i, int d) { return q[i][d]; }, scores);
    }
}

// out += sum_i weight_i value_i over the places of a tile, for J vectors of channels.
template <int N, int J>
inline void add_columns(Query* queries, const PastTile& past, int n, int channel, bool is_first) {
    F acc[N][J];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < J; j++) acc[i][j] = F::load(queries[i].out + channel + j * F::W);
    for (int block = 0; block < past.num_blocks(); block++) {
        const uint16_t* value = past.values[block] + channel;
        const int end = block * POSITION_BLOCK + past.seen_of(block);
        const uint16_t* next = is_first ? past.next_keys[block] : nullptr;
        if (next) next += channel * POSITION_BLOCK;
        for (int at = block * POSITION_BLOCK; at < end; at++, value += n) {
            if (next) {
                __builtin_prefetch(next, 0, 2);
                next += J * F::W;
            }
            F v[J];
            for (int j = 0; j < J; j++) v[j] = F::half(value + j * F::W);
            for (int i = 0; i < N; i++) {
                const F weight = F::set(queries[i].scores[at]);
                for (int j = 0; j < J; j++) acc[i][j] = fma(weight, v[j], acc[i][j]);
            }
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < J; j++) acc[i][j].store(queries[i].out + channel + j * F::W);
}

template <int N>
inline void add_values(Query* queries, const PastTile& past, int n, bool is_first) {
    int channel = 0;
    for (; channel + CHANNELS * F::W <= n; channel += CHANNELS * F::W)
        add_columns<N, CHANNELS>(queries, past, n, channel, is_first);
    for (; channel + F::W <= n; channel += F::W)
        add_columns<N, 1>(queries, past, n, channel, is_first);
    for (; channel < n; channel++)
        for (int i = 0; i < N; i++) {
            float acc = queries[i].out[channel];
            for (int at = 0; at < past.count; at++) {
                const uint16_t* values = past.values[at / POSITION_BLOCK];
                const float value = from_half(values[at % POSITION_BLOCK * n + channel]);
                acc = fma1(queries[i].scores[at], value, acc);
            }
            queries[i].out[channel] = acc;
        }
}

// Turns the tile's scores into weights relative to the largest so far.
inline void weigh(Query& query, int count, int n) {
    const float top = largest(query.scores, count);
    if (top > query.largest) {
        const float by = exp1(query.largest - top);
        query.largest = top;
        query.total *= by;
        scale(query.out, by, n);
    }
    query.total += exp_relative(query.scores, query.largest, count);
}

inline void begin_query(Query& query, const float* q, const float* near, float* out, int n) {
    query.q = q, query.near = near, query.out = out;
    query.largest = -INFINITY, query.total = 0.0f;
    std::memset(out, 0, size_t(n) * 4);
}

// The queries whose number is known when compiled, then the rest by halves.
template <int N, class Work>
inline void in_groups(Query* queries, int num, Work work) {
    for (; num >= N; num -= N, queries += N) work.template run<N>(queries);
    if constexpr (N > 1) in_groups<N / 2>(queries, num, work);
}
struct ScoreWork {
    const Query* first;  // with which the rest of the past is asked for
    const PastTile& past;
    int n;
    template <int N>
    void run(Query* queries) const { score_queries<N>(queries, past, n, queries == first); }
};
struct ValueWork {
    const Query* first;
    const PastTile& past;
    int n;
    template <int N>
    void run(Query* queries) const { add_values<N>(queries, past, n, queries == first); }
};

// Goes on with the softmax of all queries over one tile. `sinks` of its places are sinks.
inline void attend_tile(Query* queries, int num, const PastTile& past, int n, int sinks) {
    in_groups<QUERIES>(queries, num, ScoreWork{queries, past, n});
    for (int i = 0; i < num; i++) {
        if (sinks && queries[i].near) {
            float scores[POSITION_BLOCK];
            float* const to[1] = {scores};
            const float* near = queries[i].near;
            score_block<1>(past.keys[0], nullptr, n, [near](int, int d) { return near[d]; }, to);
            std::memcpy(queries[i].scores, scores, size_t(sinks) * 4);
        }
        weigh(queries[i], past.count, n);
    }
    in_groups<QUERIES>(queries, num, ValueWork{queries, past, n});
}

// The weighted mean, times the sigmoid of the gate where there is one: [n], or of all channels.
inline void end_query(const Query& query, const float* gate, const float* head_gate, int n) {
    const F by = F::set(1.0f / query.total);
    if (gate)
        map(query.out, query.out, gate, n, [by](F y, F g) { return y * by * sigmoid(g); });
    else if (head_gate)
        map(query.out, query.out, n, [by, g = sigmoid(F::set(*head_gate))](F y) { return y * by * g; });
    else
        map(query.out, query.out, n, [by](F y) { return y * by; });
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
