// A whole step of a batch through a model of our own block, by all threads of a team together.
#pragma once

#include "attention.h"
#include "step.h"

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
        for (int i = 0; i < m.num_layers; i++) layer(m.layers[i]);
        finish();
    }

    static size_t private_bytes(const BlockModel& m, const Strides&) { return size_t(head_room(m)) * (6 * 4 + 8); }
    static int max_phases(const BlockModel& m) { return 8 + 9 * m.num_layers; }

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
            rotation(position, m.rope_theta, m.key / 2, buffer(B::cos, row), buffer(B::sin, row));
    }

    void attention(const Layer& l, int task) {
        const int sequence = task / m.num_heads, h = task % m.num_heads;
        const Head x{m, l, b.states[sequence], h, head};
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            const Token token{
                buffer(B::in, row), buffer(B::extra, row), buffer(B::cos, row),
                buffer(B::sin, row), b.positions[row]};
            attend(x, token, buffer(B::attended, row) + h * m.value);
        }
    }

    void layer(const Layer& l) {
        const Matrix* extra = l.extra.n ? &l.extra : nullptr;
        products(normed(l.attention_norm), {{&l.in, into(B::in)}, {extra, into(B::extra)}});
        w.each(b.num_sequences * m.num_heads, [&](int task) { attention(l, task); });
        products(plain(B::attended, m.num_heads * m.value), {{&l.out, onto_x()}});
        products(
            normed(l.mlp_norm), {{&l.up, into(B::hidden, m.gelu ? Into::gelu : Into::swiglu)}});
        products(plain(B::hidden, m.intermediate), {{&l.down, onto_x()}});
    }

    using B = BlockBuffers;
    const BlockModel& m;
    HeadScratch head;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
