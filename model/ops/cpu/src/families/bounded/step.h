// The attention layers of a step through a model with a bounded past.
//
// Queries and keys of all rows are normed and turned first. Where no row is beyond the bound, keys
// and values are written then, and parts of a text are attended at the same time: a row sees what
// lies at its own place and before. Beyond the bound a row takes the place of another that rows
// before it see: there a text's rows go in order, some at a time, and these are written after they were
// attended together. Where a layer has a far part, what leaves the window for them is summed before. A
// long text goes in segments at the same time, each on a copy of the window as it is where it begins.
#pragma once

#include "families/bounded/attention.h"
#include "families/llama/far_part.h"
#include "runtime/mlp_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Rows of a text that share what is read of the past.
constexpr int ATTENTION_ROWS = 8;
static_assert(ATTENTION_ROWS <= POSITION_BLOCK);
// Of a long text, for each thread.
constexpr int SEGMENTS = 4;

class BoundedStep : protected MlpStep {
public:
    static size_t private_bytes(const BoundedModel& m, const Strides&) {
        const int n = padded(m.head_size, 16), places = POSITION_BLOCK + ATTENTION_ROWS + 2 * m.most_places;
        return size_t(ATTENTION_ROWS * m.group()) * sizeof(Query) +
               size_t(4 * n + m.features) * sizeof(float) + size_t(places) * n * sizeof(uint16_t);
    }

protected:
    BoundedStep(const BoundedModel& m, const Batch& b, Worker& w)
        : MlpStep(m, b, w), m(m), queries((Query*)p.own) {
        float* room = (float*)(queries + ATTENTION_ROWS * m.group());
        const int n = padded(m.head_size, 16);
        leaving = {room, room + n, room + 4 * n};
        angles = room + 2 * n, unread = room + 3 * n;
        own_keys = (uint16_t*)(room + 4 * n + m.features);
        own_values = own_keys + POSITION_BLOCK * n;
        copy = own_values + ATTENTION_ROWS * n;
    }

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
        if (may_have_segments(l) && l.far.kind != FarPart::none)
            w.each(b.num_sequences * G, [&](int task) { leave_all(l, task / G, task % G); });
        // At least as many as there are parts, in the order of the texts.
        const int parts = b.num_rows / ATTENTION_ROWS + b.num_sequences;
        w.each(parts * G, [&](int task) { attend_part(l, task / G, task % G); });
        if (may_have_segments(l))
            w.each(b.num_sequences * G, [&](int task) { keep_last(l, task / G, task % G); });
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
    // Where a key head's keys [F][positions] and values [positions][F] are, by blocks of places.
    struct Places {
        char *keys, *values;
        size_t block_bytes;
        uint16_t* key(int block) const { return (uint16_t*)(keys + size_t(block) * block_bytes); }
        uint16_t* value(int block) const { return (uint16_t*)(values + size_t(block) * block_bytes); }
    };
    size_t bytes_of_block() const { return size_t(m.head_size) * POSITION_BLOCK * sizeof(uint16_t); }
    Places places_of(const BoundedAttention& l, int sequence, int kv) const {
        char* state = (l.in_state ? b.states[sequence] : b.pasts[sequence]) + kv * bytes_of_block();
        return {state + l.k, state + l.v, l.block_bytes};
    }

    // All that a key head of a layer of constant state has.
    void enter(const BoundedAttention& l, int sequence, int kv) {
        const size_t bytes = bytes_of_block();
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
        if (!turns(l, sequence)) keep(l, places_of(l, sequence, kv), row, kv);
    }

    // Writes the row's key and value into its place.
    void keep(const BoundedAttention& l, const Places& to, int row, int kv) {
        const int place = m.place(l, b.positions[row]);
        const int block = place / POSITION_BLOCK, at = place % POSITION_BLOCK;
        to_halves(key(row, kv), to.key(block) + at, POSITION_BLOCK);
        to_halves(value(row, kv), to.value(block) + at * m.head_size, 1);
    }
    // The numbers of a head as float16, `stride` apart.
    void to_halves(const float* x, uint16_t* to, int stride) {
        const int n = m.head_size;
        int i = 0;
        for (; i + F::W <= n; i += F::W) {
            uint16_t lanes[F::W];
            F::load(x + i).store_half(stride == 1 ? to + i : lanes);
            for (int j = 0; stride > 1 && j < F::W; j++) to[(i + j) * stride] = lanes[j];
        }
        for (; i < n; i++) to[i * stride] = to_half(x[i]);
    }
    // Those of a head from float16.
    void from_halves(const uint16_t* from, int stride, float* to) {
        const int n = m.head_size;
        int i = 0;
        for (; i + F::W <= n; i += F::W) {
            uint16_t lanes[F::W];
            for (int j = 0; j < F::W; j++) lanes[j] = from[(i + j) * stride];
            F::half(lanes).store(to + i);
        }
        for (; i < n; i++) to[i] = from_half(from[i * stride]);
    }

    // The token whose place the row takes goes into the far part, which its queries then read.
    void leave(const BoundedAttention& l, const Places& past, int sequence, int row, int kv) {
        const int place = m.place(l, b.positions[row]);
        const int block = place / POSITION_BLOCK, at = place % POSITION_BLOCK;
        from_halves(past.key(block) + at, POSITION_BLOCK, leaving.k);
        from_halves(past.value(block) + at * m.head_size, 1, leaving.v);
        add_leaving(l, sequence, row, kv);
    }
    // The same for all rows of a sequence in segments, in order.
    void leave_all(const BoundedAttention& l, int sequence, int kv) {
        if (!in_segments(l, sequence)) return;
        const int begin = b.first_row[sequence], turn = l.context - l.sinks;
        for (int row = begin; row < b.first_row[sequence + 1]; row++) {
            if (!is_beyond(l, b.positions[row])) continue;
            if (row - turn < begin) {
                leave(l, places_of(l, sequence, kv), sequence, row, kv);
                continue;
            }
            to_halves(key(row - turn, kv), own_values, 1);
            from_halves(own_values, 1, leaving.k);
            to_halves(value(row - turn, kv), own_values, 1);
            from_halves(own_values, 1, leaving.v);
            add_leaving(l, sequence, row, kv);
        }
    }
    void add_leaving(const BoundedAttention& l, int sequence, int row, int kv) {
        const int n = m.head_size, M = l.far.features;
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

    // The rows of a segment: such that there are some tasks for each thread, and no fewer than turn the
    // places once.
    int segment_rows(const BoundedAttention& l, int sequence) const {
        const int rows = b.first_row[sequence + 1] - b.first_row[sequence], turn = l.context - l.sinks;
        const int wanted = rows * m.num_kv_heads / (SEGMENTS * w.count());
        return padded(wanted > turn ? wanted : turn, ATTENTION_ROWS);
    }
    // Whether that of the longest sequence is long enough: no phase may depend on what else is in arrays.
    bool may_have_segments(const BoundedAttention& l) const {
        const int least = padded(l.context - l.sinks, ATTENTION_ROWS);
        return l.in_state && w.count() > 1 && b.most_rows >= 2 * least;
    }
    bool in_segments(const BoundedAttention& l, int sequence) const {
        const int rows = b.first_row[sequence + 1] - b.first_row[sequence];
        return l.in_state && w.count() > 1 && turns(l, sequence) && rows >= 2 * segment_rows(l, sequence);
    }

    void attend_part(const BoundedAttention& l, int part, int kv) {
        const int sequence = sequence_at(part, [this](int sequence) { return first_part(sequence); });
        const int begin = b.first_row[sequence], end = b.first_row[sequence + 1];
        const int row = begin + (part - first_part(sequence)) * ATTENTION_ROWS;
        if (row >= end) return;
        const Places past = places_of(l, sequence, kv);
        const auto before_end = [end](int row) { return row < end ? row : end; };
        if (!turns(l, sequence))
            return attend(l, past, sequence, kv, row, before_end(row + ATTENTION_ROWS));
        if (!in_segments(l, sequence)) {
            if (row == begin) attend_all(l, past, sequence, kv, begin, end);
            return;
        }
        const int rows = segment_rows(l, sequence);
        if ((row - begin) % rows == 0)
            attend_all(l, copied(l, past, sequence, kv, row), sequence, kv, row, before_end(row + rows));
    }
    // Rows of a sequence that turns, in order. No two that are attended together take the same place.
    void attend_all(
        const BoundedAttention& l, const Places& past, int sequence, int kv, int row, int end) {
        const int turn = l.context - l.sinks, num = turn < ATTENTION_ROWS ? turn : ATTENTION_ROWS;
        for (; row < end; row += num)
            attend(l, past, sequence, kv, row, row + num < end ? row + num : end);
    }
    // A copy of a sequence's places as they are before `row`.
    Places copied(const BoundedAttention& l, const Places& past, int sequence, int kv, int row) {
        const size_t bytes = bytes_of_block();
        const Places result = {(char*)copy, (char*)copy + bytes, 2 * bytes};
        for (int block = 0; block < l.num_blocks(); block++) {
            std::memcpy(result.key(block), past.key(block), bytes);
            std::memcpy(result.value(block), past.value(block), bytes);
        }
        keep_rows(l, result, sequence, kv, row);
        return result;
    }
    // Of a sequence's rows before `end` those whose places no other one of them takes.
    void keep_rows(const BoundedAttention& l, const Places& to, int sequence, int kv, int end) {
        const int turn = l.context - l.sinks;
        for (int row = b.first_row[sequence]; row < end; row++)
            if (row >= end - turn || b.positions[row] < l.sinks) keep(l, to, row, kv);
    }
    void keep_last(const BoundedAttention& l, int sequence, int kv) {
        if (in_segments(l, sequence))
            keep_rows(l, places_of(l, sequence, kv), sequence, kv, b.first_row[sequence + 1]);
    }

    // Some rows of a sequence over all that they see, of which `past` has what was before.
    void attend(
        const BoundedAttention& l, const Places& past, int sequence, int kv, int begin, int end) {
        const int n = m.head_size, group = m.group();
        const bool has_far = l.far.kind != FarPart::none, in_turn = turns(l, sequence);
        const bool leaves = has_far && !in_segments(l, sequence);
        for (int row = begin; row < end; row++) {
            const bool replaces = is_beyond(l, b.positions[row]);
            if (leaves && replaces) leave(l, past, sequence, row, kv);
            if (replaces) {
                to_halves(key(row, kv), own_keys + row - begin, POSITION_BLOCK);
                to_halves(value(row, kv), own_values + (row - begin) * n, 1);
            } else if (in_turn) {
                keep(l, past, row, kv);
            }
            for (int i = 0; i < group; i++) {
                const int head = kv * group + i;
                begin_query(
                    queries[(row - begin) * group + i], query(row, head),
                    is_far(l, row) ? buffer(B::near, row) + head * n : nullptr,
                    buffer(B::attended, row) + head * n, n, row - begin, m.used(l, b.positions[row]));
            }
        }
        const int used = m.used(l, b.positions[end - 1]);
        for (int first = 0; first < used; first += ATTENTION_TILE)
            tile(l, past, first, used, begin, end);
        for (int row = begin; row < end; row++)
            if (is_beyond(l, b.positions[row])) keep(l, past, row, kv);
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

    // The queries of some rows over the tile of places from `first` on, of those below `used`.
    void tile(
        const BoundedAttention& l, const Places& places, int first, int used, int begin, int end) {
        const int n = m.head_size;
        Taken taken[ATTENTION_ROWS];
        PastTile past;
        past.first = first;
        past.count = used - first < ATTENTION_TILE ? used - first : ATTENTION_TILE;
        for (int i = 0; i < past.num_blocks(); i++) {
            const int block = first / POSITION_BLOCK + i, next = block + TILE_BLOCKS;
            past.keys[i] = places.key(block);
            past.values[i] = places.value(block);
            past.next_keys[i] = next * POSITION_BLOCK < used ? places.key(next) : nullptr;
        }
        past.taken = taken, past.num_taken = 0, past.own_keys = nullptr;
        for (int row = begin; row < end; row++) {
            const int at = m.place(l, b.positions[row]) - first;
            if (at < 0 || at >= past.count) continue;
            const uint16_t* here = past.value(at, n);
            const bool replaces = is_beyond(l, b.positions[row]);
            if (replaces) past.own_keys = own_keys;
            int i = past.num_taken++;
            for (; i > 0 && taken[i - 1].at > at; i--) taken[i] = taken[i - 1];
            const int own = row - begin;
            if (replaces) taken[i] = {at, own, own_values + own * n, here};
            else taken[i] = {at, own, here, nullptr};
        }
        const int sinks = l.sinks < past.count ? l.sinks : past.count;
        attend_tile(queries, (end - begin) * m.group(), past, n, first == 0 ? sinks : 0);
    }

    const BoundedModel& m;
    Query* queries;
    Leaving leaving;
    float *angles, *unread;  // room for 2 [F / 2] and [F]
    // Of rows that are attended together and take the places of others: [F][positions], [rows][F].
    uint16_t *own_keys, *own_values;
    uint16_t* copy;  // room for the places of a key head of a layer of constant state
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
