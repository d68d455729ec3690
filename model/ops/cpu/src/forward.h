// A whole step of a whole batch, run by all threads of a team together.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "matmul.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Up to this many rows each thread prepares the inputs of a product for itself, which is quicker
// than to wait for each other.
constexpr int FEW_ROWS = 4;

// One thread's own room.
struct Private {
    alignas(64) float products[TASK_ROWS * PANEL];
    HeadScratch head;
    float* normed;
    uint16_t* half;
    uint8_t* quads;
    float* scales;
};

inline int head_room(const Model& m) {
    int room = m.num_features;
    for (int n : {2 * m.key, m.value, m.window, m.rank}) room = room > n ? room : n;
    return padded(room + 16, 64);
}

inline size_t private_bytes(const Model& m) {
    const size_t room = size_t(head_room(m)), widest = size_t(Strides(m).widest);
    const size_t row = widest * (4 + 2 + QUAD_BYTES / 4) + 64;
    return padded(int(sizeof(Private)), 64) + room * (6 * 4 + 8) + FEW_ROWS * row + 4096;
}

inline Private& private_room(const Model& m, char* memory) {
    Private& p = *(Private*)memory;
    char* at = memory + padded(int(sizeof(Private)), 64);
    const auto take = [&at](size_t bytes) {
        char* result = at;
        at += (bytes + 63) / 64 * 64;
        return result;
    };
    const size_t room = size_t(head_room(m)), widest = size_t(Strides(m).widest);
    for (float** buffer : {&p.head.q, &p.head.k, &p.head.v, &p.head.a, &p.head.b, &p.head.c})
        *buffer = (float*)take(room * 4);
    p.head.d = (double*)take(room * 8);
    p.normed = (float*)take(FEW_ROWS * widest * 4);
    p.half = (uint16_t*)take(FEW_ROWS * widest * 2);
    p.quads = (uint8_t*)take(FEW_ROWS * widest / 4 * QUAD_BYTES);
    p.scales = (float*)take(FEW_ROWS * 4);
    return p;
}

inline int max_phases(const Model& m) { return 8 + 9 * m.num_layers; }

inline void normalize(const Model& m, const Norm& norm, const float* x, float* out) {
    const int n = m.hidden;
    if (!m.layer_norm) {
        std::memcpy(out, x, size_t(n) * 4);
        return rms_norm(out, norm.weight, m.eps, n);
    }
    std::memcpy(out, x, size_t(n) * 4);
    center(out, n);
    rms_norm(out, norm.weight, m.eps, n);
    map(out, out, norm.bias, n, [](F a, F b) { return a + b; });
}

class Forward {
public:
    Forward(const Model& m, const Batch& b, Worker& w)
        : m(m), b(b), w(w), p(private_room(m, b.private_room[w.index()])), s(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) { embed(row); });
        for (int i = 0; i < m.num_layers; i++) layer(m.layers[i]);
        if (b.stops_at_norm)
            w.each(b.num_wanted, [&](int i) { final_norm(i, b.normed + size_t(i) * s.x); });
        else if (b.num_wanted)
            logits();
    }

private:
    void embed(int row) {
        float* x = b.x + size_t(row) * s.x;
        look_up(m.embedding, b.tokens[row], x);
        const int64_t position = b.positions[row];
        if (m.max_positions) {
            const int64_t last = m.max_positions - 1;
            look_up(m.positions, int(position < last ? position : last), p.normed);
            map(x, x, p.normed, m.hidden, [](F a, F c) { return a + c; });
        }
        if (m.rotary != Rotary::none) {
            const int half = m.key / 2;
            for (int i = 0; i < half; i++) {
                const double angle =
                    double(position) * std::pow(m.rope_theta, -double(i) / double(half));
                b.cos[size_t(row) * half + i] = float(std::cos(angle));
                b.sin[size_t(row) * half + i] = float(std::sin(angle));
            }
        }
    }

    // The rows that go into a product. `make(row, out)` gives one; where it is null they are in
    // `in.f` already, unless the precision asks for more. Many rows are shared out in a phase of
    // their own; of few, each thread makes its own copy with its first task.
    template <class Make>
    struct Rows {
        Input in;
        int num, k;
        Make make;
        bool makes, ready;
        Precision precision;

        void one(int row) const {
            if (makes) make(row, const_cast<float*>(in.f) + size_t(row) * in.stride);
            if (needs_preparation(precision)) prepare_row(precision, in, row, k);
        }
        const Input& all() {
            for (int row = 0; !ready && row < num; row++) one(row);
            ready = true;
            return in;
        }
    };

    template <class Make>
    Rows<Make> rows_of(int num, int k, const float* x, int stride, bool makes, Make make) {
        const bool own = num <= FEW_ROWS, work = makes || needs_preparation(m.precision);
        Input in;
        in.stride = stride;
        in.f = makes ? (own ? p.normed : b.normed) : x;
        in.half = own ? p.half : b.half;
        in.quads = own ? p.quads : b.quads;
        in.scale = own ? p.scales : b.scales;
        Rows<Make> rows{in, num, k, make, makes, !work, m.precision};
        if (work && !own) {
            w.each(num, [&](int row) { rows.one(row); });
            rows.ready = true;
        }
        return rows;
    }

    auto normed(const Norm& norm) {
        const auto make = [this, &norm](int row, float* out) {
            normalize(m, norm, b.x + size_t(row) * s.x, out);
        };
        return rows_of(b.num_rows, m.hidden, nullptr, s.x, true, make);
    }

    auto plain(const float* x, int k, int stride) {
        return rows_of(b.num_rows, k, x, stride, false, [](int, float*) {});
    }

    struct Product {
        const Matrix* weight;
        Output out;
    };

    // Into how many parts the rows of a product go: where panels are few, more of them, so that no
    // thread waits long for the last task of another.
    int parts_of(int rows, int panels) const {
        int parts = (rows + TASK_ROWS - 1) / TASK_ROWS;
        while (panels * parts < 4 * w.count() && rows / (parts + 1) >= 2 * TALL_ROWS) parts++;
        return parts;
    }

    // Products of the same rows with one or two matrices: all panels, all parts of the rows.
    template <class Make>
    void products(Rows<Make> rows, Product first, Product second = {nullptr, {}}) {
        const int parts = parts_of(rows.num, first.weight->num_panels());
        const int ours = first.weight->num_panels() * parts;
        const int others = second.weight ? second.weight->num_panels() * parts : 0;
        w.each(ours + others, [&](int i) {
            const Product& product = i < ours ? first : second;
            const int task = i < ours ? i : i - ours, part = task % parts, panel = task / parts;
            const int begin = int(int64_t(rows.num) * part / parts);
            const int end = int(int64_t(rows.num) * (part + 1) / parts);
            matmul_task(
                *product.weight, rows.all(), begin, end - begin, panel, panel + w.count(),
                product.out, p.products);
        });
    }

    void attention(const Layer& l, int task) {
        const int sequence = task / m.num_heads, h = task % m.num_heads, half = m.key / 2;
        const Head head{m, l, b.states[sequence], h, p.head};
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            const size_t at = size_t(row);
            const Token token{
                b.in + at * s.in, b.extra + at * s.extra, b.cos + at * half, b.sin + at * half,
                b.positions[row]};
            attend(head, token, b.attended + at * s.attended + h * m.value);
        }
    }

    void layer(const Layer& l) {
        const Product extra = {l.extra.n ? &l.extra : nullptr, {b.extra, s.extra}};
        products(normed(l.attention_norm), {&l.in, {b.in, s.in}}, extra);
        w.each(b.num_sequences * m.num_heads, [&](int task) { attention(l, task); });
        products(
            plain(b.attended, m.num_heads * m.value, s.attended),
            {&l.out, {b.x, s.x, Into::add}});
        products(
            normed(l.mlp_norm),
            {&l.up, {b.hidden, s.hidden, m.gelu ? Into::gelu : Into::swiglu}});
        products(
            plain(b.hidden, m.intermediate, s.hidden), {&l.down, {b.x, s.x, Into::add}});
    }

    void final_norm(int i, float* out) {
        normalize(m, m.norm, b.x + size_t(b.wanted[i]) * s.x, out);
    }

    void logits() {
        const auto make = [this](int i, float* out) { final_norm(i, out); };
        products(
            rows_of(b.num_wanted, m.hidden, nullptr, s.x, true, make),
            {&m.head, {b.logits, s.vocab}});
    }

    const Model& m;
    const Batch& b;
    Worker& w;
    Private& p;
    const Strides s;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
