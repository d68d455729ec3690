// Softmax attention of a key head's queries over the blocks of a bounded past, whose keys and values
// are float16.
//
// Lanes run over the positions of a block for scores, and over channels for values; sums over
// channels and over positions go in order. A query takes the places in tiles of ATTENTION_TILE with
// a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax",
// arXiv 1805.02867). So its bits depend neither on the vector's width nor on the queries next to it.
#pragma once

#include <type_traits>

#include "families/bounded/model.h"
#include "products/half.h"
#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

constexpr int ATTENTION_TILE = 64;
constexpr int TILE_BLOCKS = ATTENTION_TILE / POSITION_BLOCK;
// Queries whose sums are in registers, and vectors of channels of each; of fewer queries more blocks of
// positions and more channels, so that sums do not wait for each other.
constexpr int QUERIES = F::W == 16 ? 8 : EVERSTREAM_REGISTERS == 32 || F::W == 8 ? 4 : 2;
constexpr int CHANNELS = F::W >= 8 ? 2 : 4, MOST_CHANNELS = 4;
constexpr int blocks_of(int queries) {
    return QUERIES / queries < TILE_BLOCKS ? QUERIES / queries : TILE_BLOCKS;
}
constexpr int channels_of(int queries) {
    const int channels = CHANNELS * QUERIES / queries;
    return channels < MOST_CHANNELS ? channels : MOST_CHANNELS;
}

// A query in the course of its softmax: weighted values in `out`, their weights' sum in `total`.
struct Query {
    const float *q, *near;  // [F]; `near` is null where the sinks see q itself
    float* out;             // [F]
    int row, seen;          // among the rows that are attended together; places that it sees
    float largest, total;
    alignas(64) float scores[ATTENTION_TILE];
};

// A place of a tile that one of the rows attended together takes. The queries of this row and of later
// ones see `value`; those of earlier ones see what was there before, or nothing where `before` is null.
struct Taken {
    int at, row;
    const uint16_t *value, *before;  // [F]
};

// The head's keys and values of up to ATTENTION_TILE places, from a block's first on. What is read
// next is asked for meanwhile: the values with the scores, the next tile's keys with the values, as
// memory keeps up with one line of each for a line that is read.
struct PastTile {
    const uint16_t *keys[TILE_BLOCKS], *values[TILE_BLOCKS];
    const uint16_t* next_keys[TILE_BLOCKS];  // of the next tile, or null
    int first, count;                        // its first place, and places that some query sees
    const Taken* taken;                      // in the order of their places
    int num_taken;
    const uint16_t* own_keys;  // [F][positions] of rows whose places have a value before theirs, or null

    int num_blocks() const { return (count + POSITION_BLOCK - 1) / POSITION_BLOCK; }
    int seen_by(const Query& query) const {
        const int seen = query.seen - first;
        return seen < count ? seen : count;
    }
    const uint16_t* value(int at, int n) const {
        return values[at / POSITION_BLOCK] + size_t(at % POSITION_BLOCK) * n;
    }

    // Calls `all(at)` for each place that all queries see alike, and `own(taken)` for the others, in order.
    template <class All, class Own>
    void each_place(All all, Own own) const {
        int at = 0;
        for (int i = 0; i < num_taken; i++) {
            for (; at < taken[i].at; at++) all(at);
            own(taken[i]);
            at++;
        }
        for (; at < count; at++) all(at);
    }
};

// The scores of N queries for the positions of some blocks: keys [n][positions] each. `next`, which may
// be null, are as long and read later.
template <int N, int BLOCKS, class Channel>
inline void score_blocks(
    const uint16_t* const* keys, const uint16_t* const* next, int n, Channel channel,
    float* const (&scores)[N]) {
    constexpr int VECTORS = POSITION_BLOCK / F::W;
    F acc[N][BLOCKS * VECTORS];
    for (int i = 0; i < N; i++)
        for (F& sum : acc[i]) sum = F::set(0.0f);
    for (int d = 0; d < n; d++) {
        F key[BLOCKS * VECTORS];
        for (int j = 0; j < BLOCKS * VECTORS; j++)
            key[j] = F::half(keys[j / VECTORS] + d * POSITION_BLOCK + j % VECTORS * F::W);
        for (int j = 0; next && j < BLOCKS; j++) __builtin_prefetch(next[j] + d * POSITION_BLOCK, 0, 2);
        for (int i = 0; i < N; i++) {
            const F q = F::set(channel(i, d));
            for (int j = 0; j < BLOCKS * VECTORS; j++) acc[i][j] = fma(q, key[j], acc[i][j]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < BLOCKS * VECTORS; j++) acc[i][j].store(scores[i] + j * F::W);
}

template <int N>
inline void score_queries(Query* queries, const PastTile& past, int n, bool is_first) {
    const float* q[N];
    float* scores[N];
    for (int i = 0; i < N; i++) q[i] = queries[i].q, scores[i] = queries[i].scores;
    const auto channel = [&q](int i, int d) { return q[i][d]; };
    int block = 0;
    const auto score = [&](auto blocks) {
        constexpr int BLOCKS = decltype(blocks)::value;
        for (; block + BLOCKS <= past.num_blocks(); block += BLOCKS) {
            const uint16_t* const* next = is_first ? past.values + block : nullptr;
            score_blocks<N, BLOCKS>(past.keys + block, next, n, channel, scores);
            for (float*& to : scores) to += BLOCKS * POSITION_BLOCK;
        }
    };
    score(std::integral_constant<int, blocks_of(N)>());
    if constexpr (blocks_of(N) > 1) score(std::integral_constant<int, 1>());
    if (!past.own_keys) return;
    alignas(64) float own[N][POSITION_BLOCK];
    for (int i = 0; i < N; i++) scores[i] = own[i];
    score_blocks<N, 1>(&past.own_keys, nullptr, n, channel, scores);
    for (int i = 0; i < past.num_taken; i++) {
        const Taken& taken = past.taken[i];
        for (int j = 0; taken.before && j < N; j++)
            if (taken.row <= queries[j].row) queries[j].scores[taken.at] = own[j][taken.row];
    }
}

// out += sum_i weight_i value_i over the places of a tile, for J vectors of channels.
template <int N, int J>
inline void add_columns(Query* queries, const PastTile& past, int n, int channel, bool is_first) {
    F acc[N][J];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < J; j++) acc[i][j] = F::load(queries[i].out + channel + j * F::W);
    const auto add = [&](int i, int at, const F (&v)[J]) {
        const F weight = F::set(queries[i].scores[at]);
        for (int j = 0; j < J; j++) acc[i][j] = fma(weight, v[j], acc[i][j]);
    };
    const auto load = [&](const uint16_t* value, F (&v)[J]) {
        for (int j = 0; j < J; j++) v[j] = F::half(value + channel + j * F::W);
    };
    past.each_place(
        [&](int at) {
            const uint16_t* next = is_first ? past.next_keys[at / POSITION_BLOCK] : nullptr;
            if (next)
                __builtin_prefetch(
                    next + channel * POSITION_BLOCK + at % POSITION_BLOCK * J * F::W, 0, 2);
            F v[J];
            load(past.value(at, n), v);
            for (int i = 0; i < N; i++) add(i, at, v);
        },
        [&](const Taken& taken) {
            F now[J], before[J];
            load(taken.value, now);
            load(taken.before ? taken.before : taken.value, before);
            for (int i = 0; i < N; i++) {
                if (taken.row <= queries[i].row) add(i, taken.at, now);
                else if (taken.before) add(i, taken.at, before);
            }
        });
    for (int i = 0; i < N; i++)
        for (int j = 0; j < J; j++) acc[i][j].store(queries[i].out + channel + j * F::W);
}

template <int N>
inline void add_values(Query* queries, const PastTile& past, int n, bool is_first) {
    constexpr int J = channels_of(N);
    int channel = 0;
    for (; channel + J * F::W <= n; channel += J * F::W)
        add_columns<N, J>(queries, past, n, channel, is_first);
    for (; channel + F::W <= n; channel += F::W)
        add_columns<N, 1>(queries, past, n, channel, is_first);
    for (; channel < n; channel++)
        for (int i = 0; i < N; i++) {
            float acc = queries[i].out[channel];
            const auto add = [&](int at, const uint16_t* value) {
                acc = fma1(queries[i].scores[at], from_half(value[channel]), acc);
            };
            past.each_place(
                [&](int at) { add(at, past.value(at, n)); },
                [&](const Taken& taken) {
                    if (taken.row <= queries[i].row) add(taken.at, taken.value);
                    else if (taken.before) add(taken.at, taken.before);
                });
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

inline void begin_query(
    Query& query, const float* q, const float* near, float* out, int n, int row, int seen) {
    query.q = q, query.near = near, query.out = out, query.row = row, query.seen = seen;
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
        const int seen = past.seen_by(queries[i]);
        if (seen <= 0) continue;
        if (sinks && queries[i].near) {
            float scores[POSITION_BLOCK];
            float* const to[1] = {scores};
            const float* near = queries[i].near;
            score_blocks<1, 1>(past.keys, nullptr, n, [near](int, int d) { return near[d]; }, to);
            std::memcpy(queries[i].scores, scores, size_t(sinks) * 4);
        }
        weigh(queries[i], seen, n);
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
