// RWKV-7's time mix in a step of a batch, by all threads of a team together. The equations are those
// of model/families/rwkv7/network.py.
#pragma once

#include <cstring>

#include "runtime/mlp_step.h"
#include "families/rwkv7/recurrence.h"
#include "families/rwkv7/time_mix_model.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// log w = -e^-0.5 sigmoid(...)
constexpr float MAX_LOG_DECAY = 0.6065306597126334f;

class TimeMixStep : protected MlpStep {
public:
    static size_t private_bytes(const TimeMixModel& m, const Strides& s) {
        return (size_t(head_room(m)) * 12 + size_t(s.x)) * sizeof(float);
    }

protected:
    using B = TimeMixBuffers;

    TimeMixStep(const TimeMixModel& m, const Batch& b, Worker& w)
        : MlpStep(m, b, w), m(m), low_stride(s.buffers[B::low] / LowRanks::num) {
        const size_t n = size_t(head_room(m));
        float* at = (float*)p.own;
        const auto take = [&at](size_t count) {
            float* result = at;
            at += count;
            return result;
        };
        for (HeadToken& t : tokens)
            t = {take(n), take(n), take(n), take(n), take(n), nullptr};
        removed = take(n), room = take(n);
        before = take(size_t(s.x));
    }

    int sequence_of(int row) const {
        int sequence = 0, end = b.num_sequences;
        while (end - sequence > 1) {
            const int middle = (sequence + end) / 2;
            (b.first_row[middle] <= row ? sequence : end) = middle;
        }
        return sequence;
    }

    // `then(row, last)` for each row of a part, which is then normed in `b.normed`, and the one before
    // it, which may be in the state. A task has some rows, so that most of them are normed once.
    template <class Then>
    void norm_rows(const Norm& norm, size_t state, Span rows, Then then) {
        const int fair = rows.num / (4 * w.count()), size = fair < 1 ? 1 : fair < 8 ? fair : 8;
        w.each((rows.num + size - 1) / size, [&](int task) {
            const int begin = rows.first + task * size;
            const int end = begin + size < rows.end() ? begin + size : rows.end();
            for (int row = begin; row < end; row++) {
                const float* x = b.x + size_t(row) * s.x;
                float* h = b.normed + size_t(row) * s.x;
                normalize(m, norm, x, h);
                const int sequence = sequence_of(row);
                const float* last = row > begin ? h - s.x : before;
                if (row == b.first_row[sequence])
                    last = (const float*)(b.sources[sequence] + state);
                else if (row == begin)
                    normalize(m, norm, x - s.x, before);
                then(row, last);
            }
        });
    }

    // Input `input` of the products: the row, shifted by `mix`. What is prepared from it needs no
    // float32 copy beyond the nearest cache.
    void shift(const Input& in, int input, int row, const float* last, const float* mix) {
        const float* h = b.normed + size_t(row) * s.x;
        const int at = input * b.num_rows + row;
        const bool prepares = needs_preparation(m.precision);
        float* to = prepares ? p.normed : b.buffers[B::shifted] + size_t(at) * s.x;
        map(to, h, last, mix, m.hidden, [](F x, F y, F by) { return fma(y - x, by, x); });
        if (prepares) prepare_row(m.precision, in, at, to, m.hidden);
    }

    // Zeroes what follows the ranks up to `Matrix::k_padded`, which the products read: which map a
    // place belongs to depends on the number of rows, so another step may have written there.
    void pad_low(int row) {
        for (int map = 0; map < LowRanks::num; map++) {
            const int rank = m.rank[map];
            float* low = b.buffers[B::low] + (size_t(map) * b.num_rows + row) * low_stride;
            std::memset(low + rank, 0, size_t(padded(rank, 4) - rank) * 4);
        }
    }

    // The last normed row of a sequence is the next token's row before.
    void keep_row(size_t state, int sequence) {
        const float* last = b.normed + size_t(b.first_row[sequence + 1] - 1) * s.x;
        std::memcpy(b.states[sequence] + state, last, size_t(m.hidden) * 4);
    }

    // All layers. `rest(part, updates_of)` is what follows the time mix of one, whose matrices have
    // `rest_bytes`; `updates_of(weight)` gives the updates between the products with it.
    template <class Rest>
    void layers(int64_t rest_bytes, Rest rest) {
        if (goes_in_halves()) return layers_in_halves(rest_bytes, rest);
        for (int i = 0; i < m.num_layers; i++) {
            const Part all = whole(i);
            enter(all, NoUpdates());
            w.each(num_heads(all), [&](int task) { head(all, task, 1); });
            leave(all, NoUpdates());
            rest(all, no_updates);
        }
    }

    float* before;  // [D], one thread's own

private:
    int num_heads(const Part& part) const { return part.sequences.num * m.num_heads; }
    int sequence_of(const Part& part, int task) const {
        return part.sequences.first + task / m.num_heads;
    }
    size_t state_bytes() const { return m.sum_bytes(size_t(m.head_size) * m.head_size); }
    size_t state_offset(const Part& part, int task) const {
        return m.time_mixes[part.layer].S + size_t(task % m.num_heads) * state_bytes();
    }
    // S of the heads of a part.
    auto updates(const Part& part, int begin, int end) {
        const auto memory = [this, part](int task) {
            return b.sources[sequence_of(part, task)] + state_offset(part, task);
        };
        const auto update = [this, part](int task) { head(part, task, 0); };
        return Updates<decltype(memory), decltype(update)>{
            begin, end, state_bytes(), memory, update};
    }

    // The heads of a part are updated between the products of the part before or after it, as many of
    // them between those with a matrix as is its share of the weights of the first layer.
    template <class Rest>
    void layers_in_halves(int64_t rest_bytes, Rest rest) {
        const TimeMix& l = m.time_mixes[0];
        int64_t total = rest_bytes;
        for (const Matrix* weight : {&l.receptance, &l.key, &l.value, &l.output})
            total += bytes_of(*weight);
        Part last;
        int done = 0;  // heads of `last`
        for (int i = 0; i < 2 * m.num_layers; i++) {
            const Part now = half(i / 2, i % 2);
            enter(now, updates(last, done, num_heads(last)));
            done = 0;
            const auto updates_of = [&](const Matrix& weight) {
                const int begin = done;
                const int64_t end = done + num_heads(now) * bytes_of(weight) / total;
                done = end < num_heads(now) ? int(end) : num_heads(now);
                return updates(now, begin, done);
            };
            if (i) {
                leave(last, updates_of(m.time_mixes[last.layer].output));
                rest(last, updates_of);
            }
            last = now;
        }
        w.each(num_heads(last) - done, [&](int task) { head(last, done + task, 1); });
        leave(last, NoUpdates());
        rest(last, no_updates);
    }

    // From the normed rows to what the heads take.
    template <class Updates>
    void enter(const Part& part, Updates updates) {
        const TimeMix& l = m.time_mixes[part.layer];
        const Input in = shared_input(b.buffers[B::shifted], s.x);
        const int num = b.num_rows, D = m.hidden;
        norm_rows(l.norm, l.shift, part.rows, [&](int row, const float* last) {
            for (int c = 0; c < m.num_shifted; c++)
                shift(in, c, row, last, l.shift_mix + size_t(c) * D);
            pad_low(row);
        });
        const auto low = [&](int map, Into how = Into::store) {
            return Output{b.buffers[B::low] + size_t(map) * num * low_stride, low_stride, how};
        };
        const auto down = [&](int map) { return l.low[map].down.n ? &l.low[map].down : nullptr; };
        const int v = part.layer ? B::v : B::v_first;
        products(
            Prepared{in, part.rows},
            {{&l.receptance, into(B::r), Shifted::r * num},
             {&l.key, into(B::k), Shifted::k * num},
             {&l.value, into(v), Shifted::v * num},
             {down(LowRanks::decay), low(LowRanks::decay, Into::tanh), Shifted::w * num},
             {down(LowRanks::rate), low(LowRanks::rate), Shifted::a * num},
             {down(LowRanks::value_mix), low(LowRanks::value_mix), Shifted::v * num},
             {down(LowRanks::gate), low(LowRanks::gate, Into::sigmoid), Shifted::g * num}},
            part.sequences.num, [&](int i) { keep_row(l.shift, part.sequences.first + i); }, updates);

        const Input narrow = shared_input(b.buffers[B::low], low_stride);
        if (needs_preparation(m.precision))
            w.each(part.rows.num, [&](int i) {
                const int row = part.rows.first + i;
                for (int map = 0; map < LowRanks::num; map++)
                    if (m.rank[map]) prepare_row(m.precision, narrow, map * num + row, m.rank[map]);
            });
        const auto up = [&](int map) { return l.low[map].up.n ? &l.low[map].up : nullptr; };
        products(
            Prepared{narrow, part.rows},
            {{up(LowRanks::decay), into(B::decay), LowRanks::decay * num},
             {up(LowRanks::rate), into(B::rate), LowRanks::rate * num},
             {up(LowRanks::value_mix), into(B::value_mix), LowRanks::value_mix * num},
             {up(LowRanks::gate), into(B::gate), LowRanks::gate * num}});
    }

    // x += what the heads gave.
    template <class Updates>
    void leave(const Part& part, Updates updates) {
        const TimeMix& l = m.time_mixes[part.layer];
        products(plain(B::mixed, m.hidden, part.rows), {{&l.output, onto_x()}}, updates);
    }

    // All tokens of a sequence through one head. The last one asks for the head `ahead` tasks later.
    void head(const Part& part, int task, int ahead) {
        const TimeMix& l = m.time_mixes[part.layer];
        const bool is_first = part.layer == 0;
        const int sequence = sequence_of(part, task), h = task % m.num_heads;
        const int N = m.head_size, end = b.first_row[sequence + 1];
        char* entered = enter_state(sequence, state_offset(part, task), state_bytes());
        if (m.rounds_sums) return head_rounded(l, is_first, sequence, h, (Rounded::T*)entered, ahead);
        float* S = (float*)entered;
        HeadToken *now = tokens, *next = tokens + 1;
        bring(l, is_first, b.first_row[sequence], h, *now);
        read_state(Single(), S, N, now->c, removed);
        for (int row = b.first_row[sequence]; row < end; row++) {
            const bool goes_on = row + 1 < end;
            if (goes_on) bring(l, is_first, row + 1, h, *next);
            float* y = buffer(B::mixed, row) + h * N;
            update_state(Single(), S, N, *now, removed, y, goes_on ? next->c : nullptr, size_t(ahead));
            give(l, row, h, *now, y);
            HeadToken* done = now;
            now = next, next = done;
        }
    }

    // The same where each token rounds S, so that it is read again for the next one.
    void head_rounded(
        const TimeMix& l, bool is_first, int sequence, int h, Rounded::T* S, int ahead) {
        const int N = m.head_size;
        HeadToken& token = tokens[0];
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            const Rounded rounded(b.states[sequence], b.positions[row]);
            float* y = buffer(B::mixed, row) + h * N;
            bring(l, is_first, row, h, token);
            read_state(rounded, S, N, token.c, removed);
            update_state(rounded, S, N, token, removed, y, nullptr, size_t(ahead));
            give(l, row, h, token, y);
        }
    }

    // What the products say of a token, as the recurrence takes it.
    void bring(const TimeMix& l, bool is_first, int row, int h, HeadToken& t) {
        const int N = m.head_size, at = h * N;
        const F one = F::set(1.0f), rate = F::set(-MAX_LOG_DECAY);
        const float *k = buffer(B::k, row) + at, *first = buffer(B::v_first, row) + at;
        t.r = buffer(B::r, row) + at;
        map(t.decay, buffer(B::decay, row) + at, N, [&](F x) { return expm1(rate * sigmoid(x)); });
        std::memcpy(t.v, (is_first ? first : buffer(B::v, row) + at), size_t(N) * 4);
        if (!is_first) {
            map(room, buffer(B::value_mix, row) + at, N, [](F x) { return sigmoid(x); });
            map(t.v, t.v, first, room, N, [](F v, F x, F by) { return fma(x - v, by, v); });
        }
        map(t.c, k, l.k_k + at, N, [](F x, F y) { return x * y; });
        l2_normalize(t.c, t.c, N, 1e-12f);
        float* a = room;
        map(a, buffer(B::rate, row) + at, N, [](F x) { return sigmoid(x); });
        map(t.minus_d, t.c, a, N, [](F c, F x) { return (F::set(0.0f) - c) * x; });
        map(a, a, l.k_a + at, N, [&](F x, F k_a) { return fma(x - one, k_a, one); });
        map(t.k, k, a, N, [](F x, F y) { return x * y; });
    }

    // The head's output: normed where heads are, with the token's own value, gated if there is a gate;
    // in place.
    void give(const TimeMix& l, int row, int h, const HeadToken& t, float* y) {
        const int N = m.head_size, at = h * N;
        map(room, t.r, t.k, N, [](F x, F z) { return x * z; });
        const F bonus = F::set(dot(room, l.r_k + at, N));
        if (l.group_norm.weight)
            layer_norm(y, l.group_norm.weight + at, l.group_norm.bias + at, m.group_eps, N);
        map(y, t.v, y, N, [bonus](F v, F x) { return fma(bonus, v, x); });
        if (l.low[LowRanks::gate].up.n)
            map(y, y, buffer(B::gate, row) + at, N, [](F x, F g) { return x * g; });
    }

    static int head_room(const TimeMixModel& m) { return padded(m.head_size, 64); }

    const TimeMixModel& m;
    const int low_stride;
    HeadToken tokens[2];
    float *removed, *room;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
