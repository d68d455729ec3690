// The attention layers of a step through a model with a bounded past.
//
// Queries and keys of all rows are normed and turned first. Where no row is beyond the bound, keys
// and values are written then, and parts of a text are attended at the same time: a row sees what
// lies at its own place and before. Beyond the bound a row takes the place of another that rows
// before it see: there a text's rows go in order, and each is written when its turn comes.
#pragma once

#include "bounded_attention.h"
#include "mlp_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Rows of a text that share what is read of the past.
constexpr int ATTENTION_ROWS = 8;

class BoundedStep : protected MlpStep {
protected:
    BoundedStep(const BoundedModel& m, const Batch& b, Worker& w)
        : MlpStep(m, b, w), m(m), queries((Query*)p.own) {}

    static size_t private_bytes(const BoundedModel& m) {
        return size_t(ATTENTION_ROWS * m.group()) * sizeof(Query);
    }
    static constexpr int ATTENTION_PHASES = 6;

    void begin() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
            if (!m.context) return;  // no layer is attention
            const int half = m.rotary_size / 2;
            float* at = buffer(B::angles, row);
            rotation(b.positions[row], m.frequencies, half, at, at + half);
            if (is_beyond(row))
                rotation(m.context - 1, m.frequencies, half, at + 2 * half, at + 3 * half);
        });
    }

    void attention(const BoundedAttention& l, const Norm& norm) {
        const int G = m.num_kv_heads;
        products(normed(norm), {{&l.in, into(B::in)}});
        w.each(b.num_rows * G, [&](int task) { bring(l, task / G, task % G); });
        // At least as many as there are parts, in the order of the texts.
        const int parts = b.num_rows / ATTENTION_ROWS + b.num_sequences;
        w.each(parts * G, [&](int task) { attend_part(l, task / G, task % G); });
        products(plain(B::attended, m.num_heads * m.head_size), {{&l.out, onto_x()}});
    }

private:
    using B = BoundedBuffers;

    bool is_beyond(int row) const { return b.positions[row] >= m.context; }
    bool turns(int sequence) const { return is_beyond(b.first_row[sequence + 1] - 1); }
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
    float* keys(const BoundedAttention& l, int sequence, int kv, int block) const {
        char* at = b.pasts[sequence] + l.k + size_t(block) * m.group_bytes;
        return (float*)at + size_t(kv) * m.head_size * POSITION_BLOCK;
    }
    float* values(const BoundedAttention& l, int sequence, int kv, int block) const {
        char* at = b.pasts[sequence] + l.v + size_t(block) * m.group_bytes;
        return (float*)at + size_t(kv) * m.head_size * POSITION_BLOCK;
    }

    // Norms and turns the queries and the key of a row, for one key head.
    void bring(const BoundedAttention& l, int row, int kv) {
        const int n = m.head_size, turning = m.rotary_size / 2, half = l.rotates ? turning : 0;
        const float* angles = buffer(B::angles, row);
        const float *sine = angles + turning, *near = sine + turning, *near_sine = near + turning;
        const float root = 1.0f / std::sqrt(float(n));
        for (int head = kv * m.group(); head < (kv + 1) * m.group(); head++) {
            float* q = query(row, head);
            if (l.q_norm) rms_norm(q, l.q_norm, m.eps, n);
            scale(q, root, n);
            if (is_beyond(row)) {
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
        if (!turns(sequence)) keep(l, sequence, row, kv);
    }

    // Writes the row's key and value into its place.
    void keep(const BoundedAttention& l, int sequence, int row, int kv) {
        const int place = m.place(b.positions[row]), n = m.head_size;
        const int block = place / POSITION_BLOCK, at = place % POSITION_BLOCK;
        float* to = keys(l, sequence, kv, block) + at;
        const float* k = key(row, kv);
        for (int i = 0; i < n; i++) to[i * POSITION_BLOCK] = k[i];
        std::memcpy(values(l, sequence, kv, block) + at * n, value(row, kv), size_t(n) * 4);
    }

    void attend_part(const BoundedAttention& l, int part, int kv) {
        const int sequence = sequence_at(part, [this](int sequence) { return first_part(sequence); });
        const int end = b.first_row[sequence + 1];
        int row = b.first_row[sequence] + (part - first_part(sequence)) * ATTENTION_ROWS;
        if (row >= end) return;
        if (!turns(sequence)) {
            attend(l, sequence, kv, row, row + ATTENTION_ROWS < end ? row + ATTENTION_ROWS : end);
        } else if (row == b.first_row[sequence]) {
            for (; row < end; row += ATTENTION_ROWS)
                attend(l, sequence, kv, row, row + ATTENTION_ROWS < end ? row + ATTENTION_ROWS : end);
        }
    }

    // Some rows of a sequence over all that they see.
    void attend(const BoundedAttention& l, int sequence, int kv, int begin, int end) {
        const int n = m.head_size, group = m.group();
        for (int row = begin; row < end; row++)
            for (int i = 0; i < group; i++) {
                const int head = kv * group + i;
                begin_query(
                    queries[(row - begin) * group + i], query(row, head),
                    is_beyond(row) ? buffer(B::near, row) + head * n : nullptr,
                    buffer(B::attended, row) + head * n, n);
            }
        const int used = m.used(b.positions[end - 1]);
        for (int first = 0; first < used; first += ATTENTION_TILE) {
            const auto is_here = [&](int row) {
                const int place = m.place(b.positions[row]) - first;
                return place >= 0 && place < ATTENTION_TILE;
            };
            bool any = false;
            for (int row = begin; row < end; row++) any = any || is_here(row);
            if (!any) {
                tile(l, sequence, kv, first, used, 0, (end - begin) * group);
                continue;
            }
            for (int row = begin; row < end; row++) {
                if (is_here(row) && turns(sequence)) keep(l, sequence, row, kv);
                const int seen = m.used(b.positions[row]);
                if (seen > first) tile(l, sequence, kv, first, seen, (row - begin) * group, group);
            }
        }
        for (int row = begin; row < end; row++)
            for (int i = 0; i < group; i++)
                end_query(
                    queries[(row - begin) * group + i],
                    m.gated ? query(row, kv * group + i) + n : nullptr, n);
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
        const int sinks = m.sinks < past.count ? m.sinks : past.count;
        attend_tile(queries + query, num, past, m.head_size, first == 0 ? sinks : 0);
    }

    const BoundedModel& m;
    Query* queries;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
