// The attention layers of a step through a model with a bounded past.
//
// Queries and keys of all rows are normed and turned first. Where no row is beyond the bound, keys
// and values are written then, and parts of a text are attended at the same time: a row sees what
// lies at its own place and before. Beyond the bound a row takes the place of another that rows
// before it see: there a text's rows go in order, and each is written when its turn comes. Where a
// layer has a far part, what leaves the window for some rows is summed before these are attended.
#pragma once

#include "families/bounded/attention.h"
#include "families/llama/far_part.h"
#include "runtime/mlp_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Rows of a text that share what is read of the past.
constexpr int ATTENTION_ROWS = 8;

class BoundedStep : protected MlpStep {
protected:
    BoundedStep(const BoundedModel& m, const Batch& b, Worker& w)
        : MlpStep(m, b, w), m(m), queries((Query*)p.own) {
        float* room = (float*)(queries + ATTENTION_ROWS * m.group());
        const int n = padded(m.head_size, 16);
        leaving = {room, room + n, room + 4 * n};
        angles = room + 2 * n, unread = room + 3 * n;
    }

    static size_t private_bytes(const BoundedModel& m) {
        const int room = 4 * padded(m.head_size, 16) + m.features;
        return size_t(ATTENTION_ROWS * m.group()) * sizeof(Query) + size_t(room) * sizeof(float);
    }
    static constexpr int ATTENTION_PHASES = 6;

    void begin() {
        w.each(b.num_rows, [&](int row) {
            float* x = b.x + size_t(row) * s.x;
            look_up(m.embedding, b.tokens[row], x);
            if (m.embedding_scale != 1.0f) scale(x, m.embedding_scale, m.hidden);
            if (!m.farthest) return;  // no layer is attention
            const int half = m.rotary_size / 2;
            float* at = buffer(B::angles, row);
            rotation(b.positions[row], m.frequencies, half, at, at + half);
            if (is_far(row))
                rotation(m.farthest - 1, m.frequencies, half, at + 2 * half, at + 3 * half);
            if (m.window_frequencies)
                rotation(b.positions[row], m.window_frequencies, half, at + 4 * half, at + 5 * half);
        });
    }

    void attention(const BoundedAttention& l, const Norm& norm, const Norm& post = {}) {
        const int G = m.num_kv_heads;
        products(
            normed(norm), {{&l.in, into(B::in)}}, l.in_state ? b.num_sequences * G : 0,
            [&](int task) { enter(l, task / G, task % G); });
        attend_and_leave(l, post);
    }

    // What follows the products with `in`.
    void attend_and_leave(const BoundedAttention& l, const Norm& post = {}) {
        const int G = m.num_kv_heads;
        w.each(b.num_rows * G, [&](int task) { bring(l, task / G, task % G); });
        // At least as many as there are parts, in the order of the texts.
        const int parts = b.num_rows / ATTENTION_ROWS + b.num_sequences;
        w.each(parts * G, [&](int task) { attend_part(l, task / G, task % G); });
        add_to_x(plain(B::attended, m.num_heads * m.head_size), l.out, post, B::in);
    }

private:
    using B = BoundedBuffers;

    // Whether the row takes the place of another.
    static bool is_beyond(const BoundedAttention& l, int64_t position) { return position >= l.context; }
    // Whether the row sees the sinks by queries of their own.
    bool is_far(int row) const { return b.positions[row] >= m.farthest; }
    bool is_far(const BoundedAttention& l, int row) const { return l.sinks && is_far(row); }
    bool turns(const BoundedAttention& l, int sequence) const {
        return is_beyond(l, b.positions[b.first_row[sequence + 1] - 1]);
    }
    // The first part of a sequence's rows.
    int first_part(int sequence) const {
        return b.first_row[sequence] / ATTENTION_ROWS + sequence;
    }
    // The last sequence for which `first(sequence)` is not above `at`.
    template <class First>
    int sequence_at(int at, First first) const {
        int sequence = 0, end = b.num_sequences;
        while (end - sequence > 1) {
            const int middle = (sequence + end) / 2;
            (first(middle) <= at ? sequence : end) = middle;
        }
        return sequence;
    }

    float* query(int row, int head) const { return buffer(B::in, row) + head * m.query_size(); }
    float* key(int row, int kv) const {
        return buffer(B::in, row) + m.num_heads * m.query_size() + kv * m.head_size;
    }
    float* value(int row, int kv) const { return key(row, m.num_kv_heads + kv); }
    float* far_of(int row, int head) const { return buffer(B::far, row) + head * m.far_width(); }
    float& far_weight_of(int row, int head) const {
        return buffer(B::far, row)[m.num_heads * m.far_width() + head];
    }
    uint16_t* past(const BoundedAttention& l, size_t offset, int sequence, int kv, int block) const {
        char* state = l.in_state ? b.states[sequence] : b.pasts[sequence];
        char* at = state + offset + size_t(block) * l.block_bytes;
        return (uint16_t*)at + size_t(kv) * m.head_size * POSITION_BLOCK;
    }
    uint16_t* keys(const BoundedAttention& l, int sequence, int kv, int block) const {
        return past(l, l.k, sequence, kv, block);
    }
    uint16_t* values(const BoundedAttention& l, int sequence, int kv, int block) const {
        return past(l, l.v, sequence, kv, block);
    }

    // All that a key head of a layer of constant state has.
    void enter(const BoundedAttention& l, int sequence, int kv) {
        const size_t bytes = size_t(m.head_size) * POSITION_BLOCK * sizeof(uint16_t);
        for (const size_t offset : {l.k, l.v})
            enter_state(sequence, offset + kv * bytes, bytes, l.num_blocks(), l.block_bytes);
        if (l.far.kind == FarPart::none) return;
        const size_t features = size_t(l.far.features) * sizeof(float), sums = far_bytes(l);
        enter_state(sequence, l.far.S + kv * sums, sums);
        if (l.far.kind == FarPart::relative) enter_state(sequence, l.far.z + kv * features, features);
    }

    // Of S of a key head's far part.
    size_t far_bytes(const BoundedAttention& l) const {
        return m.sum_bytes(size_t(l.far.features) * m.head_size);
    }

    // Norms and turns the queries and the key of a row, for one key head.
    void bring(const BoundedAttention& l, int row, int kv) {
        const int n = m.head_size, turning = m.rotary_size / 2, half = l.rotates ? turning : 0;
        const float* angles = buffer(B::angles, row) + l.angles;
        const float *sine = angles + turning, *near = sine + turning, *near_sine = near + turning;
        for (int head = kv * m.group(); head < (kv + 1) * m.group(); head++) {
            float* q = query(row, head);
            if (l.q_norm) rms_norm(q, l.q_norm, m.eps, n);
            if (l.far.kind != FarPart::none && is_beyond(l, b.positions[row])) {
                const float* map = l.far.query_map + size_t(head) * n * (l.far.features / 2);
                far_features(l.far, map, q, n, far_of(row, head));
                far_weight_of(row, head) = far_weight(l.far, head, q, n);
            }
            scale(q, m.score_scale, n);
            if (is_far(l, row)) {
                float* to_sinks = buffer(B::near, row) + head * n;
                std::memcpy(to_sinks, q, size_t(n) * 4);
                rotate(to_sinks, near, near_sine, half);
            }
            rotate(q, angles, sine, half);
        }
        float* k = key(row, kv);
        if (l.k_norm) rms_norm(k, l.k_norm, m.eps, n);
        rotate(k, angles, sine, half);
        const int sequence =
            sequence_at(row, [this](int sequence) { return int(b.first_row[sequence]); });
        if (!turns(l, sequence)) keep(l, sequence, row, kv);
    }

    // Writes the row's key and value into its place.
    void keep(const BoundedAttention& l, int sequence, int row, int kv) {
        const int place = m.place(l, b.positions[row]), n = m.head_size;
        const int block = place / POSITION_BLOCK, at = place % POSITION_BLOCK;
        uint16_t* to = keys(l, sequence, kv, block) + at;
        const float *k = key(row, kv), *v = value(row, kv);
        for (int i = 0; i < n; i++) to[i * POSITION_BLOCK] = to_half(k[i]);
        to = values(l, sequence, kv, block) + at * n;
        int i = 0;
        for (; i + F::W <= n; i += F::W) F::load(v + i).store_half(to + i);
        for (; i < n; i++) to[i] = to_half(v[i]);
    }

    // The token whose place the row takes goes into the far part, which its queries then read.
    void leave(const BoundedAttention& l, int sequence, int row, int kv) {
        const int n = m.head_size, M = l.far.features;
        const int place = m.place(l, b.positions[row]);
        const int block = place / POSITION_BLOCK, at = place % POSITION_BLOCK;
        const uint16_t* k = keys(l, sequence, kv, block) + at;
        const uint16_t* v = values(l, sequence, kv, block) + at * n;
        for (int i = 0; i < n; i++) {
            leaving.k[i] = from_half(k[i * POSITION_BLOCK]);
            leaving.v[i] = from_half(v[i]);
        }
        turn_back(l, row);
        far_features(l.far, l.far.key_map + size_t(kv) * n * (M / 2), leaving.k, n, leaving.features);
        char *state = b.states[sequence], *S = state + l.far.S + size_t(kv) * far_bytes(l);
        if (m.rounds_sums)
            add_and_read(l, row, kv, state, Rounded(state, b.positions[row]), (Rounded::T*)S);
        else
            add_and_read(l, row, kv, state, Single(), (float*)S);
    }

    // What leaves goes into the sums S, which the queries of a row then read as they are kept.
    template <class E>
    void add_and_read(
        const BoundedAttention& l, int row, int kv, char* state, const E& e, typename E::T* S) {
        const int n = m.head_size, M = l.far.features;
        float* z = nullptr;
        if (l.far.kind == FarPart::relative) {
            z = (float*)(state + l.far.z) + size_t(kv) * M;
            add_relative(e, S, z, leaving, M, n);
        } else {
            add_delta(e, l.far, kv, S, leaving, unread, n);
        }
        for (int head = kv * m.group(); head < (kv + 1) * m.group(); head++) {
            float *features = far_of(row, head), &weight = far_weight_of(row, head);
            const float by = weight;
            if (z) weight *= dot(features, z, M);
            add_rows(e, unread, features, S, M, n);
            map(features, unread, n, [by](F x) { return x * F::set(by); });
        }
    }

    // The leaving key without its rotation: turned by the window's length less the row's position.
    void turn_back(const BoundedAttention& l, int row) {
        if (!l.rotates) return;
        const int half = m.rotary_size / 2;
        const float *cos = buffer(B::angles, row), *sin = cos + half;
        const float *back = l.far.back, *back_sine = l.far.back_sine;
        float *to = angles, *to_sine = angles + half;
        for (int i = 0; i < half; i++) {
            to[i] = fma1(back[i], cos[i], back_sine[i] * sin[i]);
            to_sine[i] = fma1(back_sine[i], cos[i], -(back[i] * sin[i]));
        }
        rotate(leaving.k, to, to_sine, half);
    }

    void attend_part(const BoundedAttention& l, int part, int kv) {
        const int sequence = sequence_at(part, [this](int sequence) { return first_part(sequence); });
        const int end = b.first_row[sequence + 1];
        int row = b.first_row[sequence] + (part - first_part(sequence)) * ATTENTION_ROWS;
        if (row >= end) return;
        if (!turns(l, sequence)) {
            attend(l, sequence, kv, row, row + ATTENTION_ROWS < end ? row + ATTENTION_ROWS : end);
        } else if (row == b.first_row[sequence]) {
            for (; row < end; row += ATTENTION_ROWS)
                attend(l, sequence, kv, row, row + ATTENTION_ROWS < end ? row + ATTENTION_ROWS : end);
        }
    }

    // Some rows of a sequence over all that they see.
    void attend(const BoundedAttention& l, int sequence, int kv, int begin, int end) {
        const int n = m.head_size, group = m.group();
        const bool has_far = l.far.kind != FarPart::none;
        for (int row = begin; row < end; row++) {
            if (has_far && is_beyond(l, b.positions[row])) leave(l, sequence, row, kv);
            for (int i = 0; i < group; i++) {
                const int head = kv * group + i;
                begin_query(
                    queries[(row - begin) * group + i], query(row, head),
                    is_far(l, row) ? buffer(B::near, row) + head * n : nullptr,
                    buffer(B::attended, row) + head * n, n);
            }
        }
        const int used = m.used(l, b.positions[end - 1]);
        for (int first = 0; first < used; first += ATTENTION_TILE) {
            const auto is_here = [&](int row) {
                const int place = m.place(l, b.positions[row]) - first;
                return place >= 0 && place < ATTENTION_TILE;
            };
            bool any = false;
            for (int row = begin; row < end; row++) any = any || is_here(row);
            if (!any) {
                tile(l, sequence, kv, first, used, 0, (end - begin) * group);
                continue;
            }
            for (int row = begin; row < end; row++) {
                if (is_here(row) && turns(l, sequence)) keep(l, sequence, row, kv);
                const int seen = m.used(l, b.positions[row]);
                if (seen > first) tile(l, sequence, kv, first, seen, (row - begin) * group, group);
            }
        }
        for (int row = begin; row < end; row++)
            for (int i = 0; i < group; i++) {
                const Query& q = queries[(row - begin) * group + i];
                const int head = kv * group + i;
                const float* gate = m.gated ? query(row, head) + n : nullptr;
                const float* head_gate = buffer(B::in, row) + m.first_gate() + head;
                end_query(q, gate, m.head_gates ? head_gate : nullptr, n);
                if (has_far && is_beyond(l, b.positions[row])) {
                    const F by = F::set(1.0f / (1.0f + far_weight_of(row, head)));
                    map(q.out, q.out, far_of(row, head), n, [by](F y, F far) { return (y + far) * by; });
                }
            }
    }

    // Some of the queries over the tile of places from `first` on, of those below `seen`.
    void tile(
        const BoundedAttention& l, int sequence, int kv, int first, int seen, int query, int num) {
        PastTile past;
        past.count = seen - first < ATTENTION_TILE ? seen - first : ATTENTION_TILE;
        for (int i = 0; i < past.num_blocks(); i++) {
            const int block = first / POSITION_BLOCK + i, next = block + TILE_BLOCKS;
            past.keys[i] = keys(l, sequence, kv, block);
            past.values[i] = values(l, sequence, kv, block);
            past.next_keys[i] =
                next * POSITION_BLOCK < seen ? keys(l, sequence, kv, next) : nullptr;
        }
        const int sinks = l.sinks < past.count ? l.sinks : past.count;
        attend_tile(queries + query, num, past, m.head_size, first == 0 ? sinks : 0);
    }

    const BoundedModel& m;
    Query* queries;
    Leaving leaving;
    float *angles, *unread;  // room for 2 [F / 2] and [F]
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
