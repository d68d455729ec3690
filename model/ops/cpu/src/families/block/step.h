// A whole step of a batch through a model of our own block, by all threads of a team together.
#pragma once

#include "families/block/attention.h"
#include "runtime/step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class BlockStep : Step {
public:
    BlockStep(const BlockModel& m, const Batch& b, Worker& w) : Step(m, b, w), m(m) {
        const size_t room = size_t(head_room(m)) * 4;
        char* at = p.own;
        for (float** buffer : {&head.q, &head.k, &head.v, &head.a, &head.b, &head.c})
            *buffer = (float*)at, at += room;
        head.d = (double*)at;
    }

    void run() {
        w.each(b.num_rows, [&](int row) { embed(row); });
        if (m.head_bytes && goes_in_halves())
            layers_in_halves();
        else
            for (int i = 0; i < m.num_layers; i++) layer(whole(i));
        finish();
    }

    static size_t private_bytes(const BlockModel& m, const Strides&) { return size_t(head_room(m)) * (6 * 4 + 8); }

private:
    static int head_room(const BlockModel& m) {
        int room = m.num_features;
        for (int n : {2 * m.key, m.value, m.window, m.rank}) room = room > n ? room : n;
        return padded(room + 16, 64);
    }

    void embed(int row) {
        float* x = b.x + size_t(row) * s.x;
        look_up(m.embedding, b.tokens[row], x);
        const int64_t position = b.positions[row];
        if (m.positions.n) {
            const int64_t last = m.positions.n - 1;
            look_up(m.positions, int(position < last ? position : last), p.normed);
            map(x, x, p.normed, m.hidden, [](F a, F c) { return a + c; });
        }
        if (m.rotary != Rotary::none)
            rotation(position, m.frequencies, m.key / 2, buffer(B::cos, row), buffer(B::sin, row));
    }

    int num_heads(const Part& part) const { return part.sequences.num * m.num_heads; }

    void attention(const Part& part, int task) {
        const Layer& l = m.layers[part.layer];
        const int sequence = part.sequences.first + task / m.num_heads, h = task % m.num_heads;
        for (int i = 0; i < l.num_pieces; i++) {
            const StatePiece& piece = l.pieces[i];
            const size_t offset = piece.offset + size_t(h) * piece.bytes;
            enter_state(sequence, offset, piece.bytes, piece.num, piece.stride);
        }
        Head x{m, l, b.states[sequence], h, head, nullptr};
        const int first = b.first_row[sequence], num = b.first_row[sequence + 1] - first;
        const auto token = [this, first](int i) {
            const int row = first + i;
            return Token{
                buffer(B::in, row), buffer(B::extra, row), buffer(B::cos, row),
                buffer(B::sin, row), b.positions[row]};
        };
        const auto out = [this, first, h](int i) {
            return buffer(B::attended, first + i) + h * m.value;
        };
        if (m.rounds_sums) {
            for (int i = 0; i < num; i++) {
                const Rounded rounded(x.state, b.positions[first + i]);
                x.rounded = &rounded;
                m.mechanism == Mechanism::delta ? delta_token(x, token(i), out(i))
                                                : attend(x, token(i), out(i));
            }
            return;
        }
        if (m.mechanism == Mechanism::delta) return attend_delta(x, num, token, out);
        for (int i = 0; i < num; i++) attend(x, token(i), out(i));
    }

    template <class Updates>
    void enter(const Part& part, Updates updates) {
        const Layer& l = m.layers[part.layer];
        const Matrix* extra = l.extra.n ? &l.extra : nullptr;
        products(
            normed(l.attention_norm, part.rows), {{&l.in, into(B::in)}, {extra, into(B::extra)}},
            updates);
    }

    // `updates_of(weight)` gives the updates between the products with it.
    template <class UpdatesOf>
    void leave(const Part& part, UpdatesOf updates_of) {
        const Layer& l = m.layers[part.layer];
        const Span rows = part.rows;
        const Into activation = m.gelu ? Into::gelu : Into::swiglu;
        products(
            plain(B::attended, m.num_heads * m.value, rows), {{&l.out, onto_x()}},
            updates_of(l.out));
        products(normed(l.mlp_norm, rows), {{&l.up, into(B::hidden, activation)}}, updates_of(l.up));
        products(plain(B::hidden, m.intermediate, rows), {{&l.down, onto_x()}},
            updates_of(l.down));
    }

    void layer(const Part& all) {
        enter(all, NoUpdates());
        w.each(num_heads(all), [&](int task) { attention(all, task); });
        leave(all, no_updates);
    }

    // S of the heads of a part.
    auto updates(const Part& part, int begin, int end) {
        const size_t bytes = m.head_bytes;
        const auto state = [this, part, bytes](int task) {
            return b.sources[part.sequences.first + task / m.num_heads] +
                   m.layers[part.layer].state.S + size_t(task % m.num_heads) * bytes;
        };
        const auto update = [this, part](int task) { attention(part, task); };
        return Updates<decltype(state), decltype(update)>{begin, end, bytes, state, update};
    }

    // The heads of a part are updated between the products of the part before or after it, as many
    // of them between those with a matrix as is its share of the weights of the first layer; where
    // another layer has matrices of more bytes, there may be none left for the last of them.
    void layers_in_halves() {
        const Layer& l = m.layers[0];
        int64_t total = 0;
        for (const Matrix* weight : {&l.in, &l.out, &l.up, &l.down}) total += bytes_of(*weight);
        Part before;
        int done = 0;  // heads of `before`
        for (int i = 0; i < 2 * m.num_layers; i++) {
            const Part now = half(i / 2, i % 2);
            enter(now, updates(before, done, num_heads(before)));
            done = 0;
            if (i)
                leave(before, [&](const Matrix& weight) {
                    const int begin = done;
                    const int64_t end = done + num_heads(now) * bytes_of(weight) / total;
                    done = end < num_heads(now) ? int(end) : num_heads(now);
                    return updates(now, begin, done);
                });
            before = now;
        }
        w.each(num_heads(before) - done, [&](int task) { attention(before, done + task); });
        leave(before, no_updates);
    }

    using B = BlockBuffers;
    const BlockModel& m;
    HeadScratch head;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
