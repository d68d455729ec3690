// A whole step of a batch through a Qwen3.5 model, by all threads of a team together. The equations
// are those of model/families/qwen35.
#pragma once

#include "families/bounded/step.h"
#include "families/qwen35/gated_delta.h"
#include "families/qwen35/model.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Qwen35Step : BoundedStep {
public:
    Qwen35Step(const Qwen35Model& m, const Batch& b, Worker& w)
        : BoundedStep(m, b, w), m(m), tokens((DeltaToken*)p.own) {}

    void run() {
        begin();
        if (m.joins()) join();
        for (int i = 0; i < m.num_layers; i++) {
            const Qwen35Layer& l = m.layers[i];
            if (l.is_attention)
                attention(l.attention, l.norm);
            else
                delta(l.delta, l.norm);
            mlp(l.mlp, B::hidden);
        }
        finish();
    }

    static size_t private_bytes(const Qwen35Model& m, const Strides& s) {
        const size_t attention = BoundedStep::private_bytes(m, s), delta = ROWS * sizeof(DeltaToken);
        return attention > delta ? attention : delta;
    }

private:
    // Rows that go through a head while a part of its state is in the nearest cache.
    static constexpr int ROWS = 64;

    // Embeddings and hidden states, each normed, into x; without hidden states zeros are in their place.
    void join() {
        w.each(b.num_rows, [&](int row) {
            float *joined = buffer(B::joined, row), *hidden = joined + m.hidden;
            normalize(m, m.embedding_norm, b.x + size_t(row) * s.x, joined);
            std::memset(hidden, 0, size_t(m.hidden) * 4);
            if (b.hidden) normalize(m, m.hidden_norm, b.hidden + size_t(row) * m.hidden, hidden);
        });
        products(plain(B::joined, 2 * m.hidden), {{&m.join, {b.x, s.x, Into::store}}});
    }

    void delta(const DeltaNet& l, const Norm& norm) {
        const int P = m.num_key_heads;
        products(normed(norm), {{&l.in, into(B::in)}, {&l.rates, into(B::rates)}});
        w.each(b.num_sequences * P, [&](int task) { key_head(l, task / P, task % P); });
        products(plain(B::mixed, m.values()), {{&l.out, onto_x()}});
    }

    // All rows of a sequence through a key head and the value heads that read it.
    void key_head(const DeltaNet& l, int sequence, int head) {
        const int end = b.first_row[sequence + 1], group = m.num_value_heads / m.num_key_heads;
        const int K = m.key_size, V = group * m.value_size, queries = m.queries();
        enter_channels(l, sequence, head * K, K);
        enter_channels(l, sequence, queries + head * K, K);
        enter_channels(l, sequence, 2 * queries + head * V, V);
        for (int row = b.first_row[sequence]; row < end; row += ROWS) {
            const int num = end - row < ROWS ? end - row : ROWS;
            for (int i = 0; i < num; i++) bring(l, sequence, row + i, head, group);
            for (int i = 0; i < group; i++) value_head(l, sequence, row, num, head, head * group + i);
        }
    }

    void enter_channels(const DeltaNet& l, int sequence, int begin, int n) {
        enter_ring(sequence, l.ring, m.conv_size, m.channels(), begin, n);
    }

    // The convolution of the channels of a key head and its value heads; queries and keys of length
    // one, queries over the root of their size.
    void bring(const DeltaNet& l, int sequence, int row, int head, int group) {
        const int K = m.key_size, V = m.value_size;
        float* in = buffer(B::in, row);
        float* ring = (float*)(b.states[sequence] + l.ring);
        const auto convolved = [&](int at, int n) {
            const auto width = size_t(m.channels());
            convolve_silu(l.conv + at, ring + at, in + at, m.conv_size, width, n, in + at);
            return in + at;
        };
        float* q = convolved(head * K, K);
        float* k = convolved(m.queries() + head * K, K);
        convolved(2 * m.queries() + head * group * V, group * V);
        scale(q, inverse_length(q, K) / std::sqrt(float(K)), K);
        scale(k, inverse_length(k, K), K);
    }

    void value_head(const DeltaNet& l, int sequence, int row, int num, int head, int j) {
        const int K = m.key_size, V = m.value_size;
        for (int i = 0; i < num; i++) {
            const float *in = buffer(B::in, row + i), *rates = buffer(B::rates, row + i);
            DeltaToken& t = tokens[i];
            t.q = in + head * K;
            t.k = in + m.queries() + head * K;
            t.v = in + 2 * m.queries() + j * V;
            t.y = buffer(B::mixed, row + i) + j * V;
            t.beta = 1.0f / (1.0f + std::exp(-rates[j]));
            const double a = double(rates[m.num_value_heads + j]) + double(l.bias[j]);
            t.decay = softplus_decay(a, l.decay_rate[j]);
        }
        const size_t bytes = m.sum_bytes(size_t(K) * V), offset = l.S + size_t(j) * bytes;
        const bool is_first = row == b.first_row[sequence];
        char* state = b.states[sequence];
        char* S = is_first ? enter_state(sequence, offset, bytes) : state + offset;
        if (!m.rounds_sums) delta_rule(Single(), (float*)S, K, V, tokens, num);
        for (int i = 0; m.rounds_sums && i < num; i++)
            delta_rule(Rounded(state, b.positions[row + i]), (Rounded::T*)S, K, V, tokens + i, 1);
        for (int i = 0; i < num; i++) {
            const float* gate = buffer(B::in, row + i) + m.channels() + j * V;
            gated_norm(tokens[i].y, l.norm, gate, m.eps, V);
        }
    }

    using B = Qwen35Buffers;
    const Qwen35Model& m;
    DeltaToken* tokens;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
