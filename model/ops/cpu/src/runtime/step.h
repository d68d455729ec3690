// What the steps of all families share: rows into products, products into rows, norms, logits.
#pragma once

#include "runtime/kernels.h"
#include "products/matmul.h"
#include "products/tiles.h"
#include "runtime/sums.h"
#include "runtime/token_kernels.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Up to this many rows each thread prepares the inputs of a product for itself, which is quicker
// than to wait for each other.
constexpr int FEW_ROWS = 4;
// From so many sequences on, a step goes in halves where the family can.
constexpr int HALVED_SEQUENCES = 48;
static_assert(HALVED_SEQUENCES >= 2 * MIN_UPDATED_ROWS);

// Updates of states, `update(i)` for each i from `begin` on below `end`, made between the tiles of
// products; `state(i)`, of `bytes` bytes, is asked for during the tile before. So memory is read while
// products are computed.
template <class State, class Update>
struct Updates {
    int begin, end;
    size_t bytes;
    State state;
    Update update;
    Pieces pieces = {};
    int first = 0, last = 0;  // of the present tile

    // Those of one task of some.
    Updates share(int task, int num_tasks) const {
        return {part(task, num_tasks), part(task + 1, num_tasks), bytes, state, update};
    }
    using Along = WithPieces;
    // Before a tile that prefetches so many times.
    WithPieces before_tile(int tile, int num_tiles, int prefetches) {
        first = part(tile, num_tiles), last = part(tile + 1, num_tiles);
        pieces.num = last - first < Pieces::MAX ? last - first : Pieces::MAX;
        pieces.piece = pieces.offset = 0;
        pieces.bytes = int(bytes);
        for (int i = 0; i < pieces.num; i++) pieces.at[i] = state(first + i);
        pieces.lines = pieces.num * (pieces.bytes / 64 + 1) / (prefetches > 0 ? prefetches : 1) + 1;
        return {&pieces};
    }
    void after_tile() {
        for (int i = first; i < last; i++) update(i);
    }

private:
    int part(int i, int num) const { return begin + int(int64_t(end - begin) * i / num); }
};

// One thread's own room.
struct Private {
    alignas(64) float products[TASK_ROWS * PANEL];
    float* normed;
    uint16_t* half;
    uint8_t* integers;
    float* scales;
    char* own;  // what the family asks for
};

inline size_t shared_private_bytes(const Strides& s) {
    const size_t row = size_t(s.widest) * (4 + 2) + integer_bytes(s.widest) + 64;
    return padded(int(sizeof(Private)), 64) + FEW_ROWS * row + 4096;
}

inline Private& private_room(const Strides& s, char* memory) {
    Private& p = *(Private*)memory;
    char* at = memory + padded(int(sizeof(Private)), 64);
    const auto take = [&at](size_t bytes) {
        char* result = at;
        at += (bytes + 63) / 64 * 64;
        return result;
    };
    const size_t widest = size_t(s.widest);
    p.normed = (float*)take(FEW_ROWS * widest * 4);
    p.half = (uint16_t*)take(FEW_ROWS * widest * 2);
    p.integers = (uint8_t*)take(FEW_ROWS * integer_bytes(s.widest));
    p.scales = (float*)take(FEW_ROWS * 4);
    p.own = at;
    return p;
}

inline void normalize(const Model& m, const Norm& norm, const float* x, float* out) {
    std::memcpy(out, x, size_t(m.hidden) * 4);
    if (norm.bias) return layer_norm(out, norm.weight, norm.bias, m.eps, m.hidden);
    rms_norm(out, norm.weight, m.eps, m.hidden);
}

// Rows of a batch, or its sequences.
struct Span {
    int first, num;
    int end() const { return first + num; }
};

// Some sequences of a batch in a layer, and their rows.
struct Part {
    int layer = 0;
    Span sequences = {0, 0}, rows = {0, 0};
};

// A matrix, the first of the rows that it takes, and where its products go; no matrix: nothing.
struct Product {
    const Matrix* weight;
    Output out;
    int first_row = 0;
};

// In the place of the updates between the products with a matrix.
constexpr auto no_updates = [](const Matrix&) { return NoUpdates(); };

class Step {
protected:
    Step(const Model& m, const Batch& b, Worker& w)
        : model(m), b(b), w(w), s(b.strides), p(private_room(s, b.private_room[w.index()])) {}

    // The rows that go into a product. `make(row, out)` gives one; where it is null they are in
    // `in.f` already, unless the precision asks for more. Many rows are shared out in a phase of
    // their own; of few, each thread makes its own copy with its first task.
    template <class Make>
    struct Rows {
        Input in;
        Span span;
        int k;
        Make make;
        bool makes, ready;
        Precision precision;

        void one(int row) const {
            if (makes) make(row, const_cast<float*>(in.f) + size_t(row) * in.stride);
            if (needs_preparation(precision)) prepare_row(precision, in, row, k);
        }
        const Input& all() {
            for (int row = span.first; !ready && row < span.end(); row++) one(row);
            ready = true;
            return in;
        }
    };

    template <class Make>
    Rows<Make> rows_of(Span span, int k, const float* x, int stride, bool makes, Make make) {
        const bool own = span.end() <= FEW_ROWS, work = makes || needs_preparation(model.precision);
        Input in;
        in.stride = stride;
        in.f = makes ? (own ? p.normed : b.normed) : x;
        in.half = own ? p.half : b.half;
        in.integers = own ? p.integers : b.integers;
        in.scale = own ? p.scales : b.scales;
        Rows<Make> rows{in, span, k, make, makes, !work, model.precision};
        if (work && !own) {
            w.each(span.num, [&](int i) { rows.one(span.first + i); });
            rows.ready = true;
        }
        return rows;
    }

    auto plain(int place, int k, Span rows) {
        return rows_of(rows, k, b.buffers[place], s.buffers[place], false, [](int, float*) {});
    }
    auto plain(int place, int k) { return plain(place, k, all_rows()); }
    auto normed(const Norm& norm, Span rows) {
        const auto make = [this, &norm](int row, float* out) {
            normalize(model, norm, b.x + size_t(row) * s.x, out);
        };
        return rows_of(rows, model.hidden, nullptr, s.x, true, make);
    }
    auto normed(const Norm& norm) { return normed(norm, all_rows()); }
    Span all_rows() const { return {0, b.num_rows}; }

    static int64_t bytes_of(const Matrix& weight) {
        return int64_t(weight.panel_bytes) * weight.num_panels();
    }
    // Whether the layers take the batch in two halves, one behind the other: while one half's rows are
    // multiplied, the states of the other half are read and written.
    bool goes_in_halves() const {
        return b.num_sequences >= HALVED_SEQUENCES && b.num_rows <= 2 * b.num_sequences;
    }
    Part whole(int layer) const { return {layer, {0, b.num_sequences}, all_rows()}; }
    Part half(int layer, int which) const {
        const int middle = b.num_sequences / 2, row = b.middle_row;
        if (which == 0) return {layer, {0, middle}, {0, row}};
        return {layer, {middle, b.num_sequences - middle}, {row, b.num_rows - row}};
    }

    // A piece of a sequence's state: `num` parts of `bytes` bytes, `stride` bytes apart, from `offset`
    // on. The first task of a run that touches a piece enters it: where the state before the run is
    // elsewhere, the piece is copied from there, and is then in the nearest cache.
    char* enter_state(int sequence, size_t offset, size_t bytes, int num = 1, size_t stride = 0) const {
        char* to = b.states[sequence] + offset;
        const char* from = b.sources[sequence] + offset;
        for (int i = 0; from != to && i < num; i++)
            std::memcpy(to + size_t(i) * stride, from + size_t(i) * stride, bytes);
        return to;
    }
    // Some channels of the last inputs of a convolution over `size` tokens, [size - 1][width].
    float* enter_ring(int sequence, size_t offset, int size, int width, int begin, int n) const {
        const size_t at = offset + size_t(begin) * sizeof(float);
        return (float*)enter_state(
            sequence, at, size_t(n) * sizeof(float), size - 1, size_t(width) * sizeof(float));
    }

    // A row of one of the family's own buffers; where products of all rows go there, or to `x`.
    float* buffer(int place, int row) const {
        return b.buffers[place] + size_t(row) * s.buffers[place];
    }
    Output into(int place, Into how = Into::store) const {
        return {b.buffers[place], s.buffers[place], how};
    }
    Output onto_x() const { return {b.x, s.x, Into::add, model.residual_scale}; }

    // Rows that a phase has made and prepared.
    struct Prepared {
        Input in;
        Span span;
        const Input& all() const { return in; }
    };

    // Where rows that more than one thread needs are prepared.
    Input shared_input(float* f, int stride) const {
        return {f, stride, b.half, b.integers, b.scales};
    }

    // Into how many parts the rows of a product go: where panels are few, more of them, so that no
    // thread waits long for the last task of another; as many for each thread, unless AMX would not multiply
    // them any more.
    int parts_of(int rows, int panels) const {
        int parts = (rows + TASK_ROWS - 1) / TASK_ROWS;
        while (panels * parts < 4 * w.count() && rows / (parts + 1) >= 2 * TALL_ROWS) parts++;
        const int even = padded(parts, w.count());
        return parts > 1 && rows / even >= MIN_AMX_INT8_ROWS ? even : parts;
    }

    // All products in one phase: all panels, all parts of the rows; and `extra(i)` for each i below
    // `num_extra`, and `updates` between the tiles; these may touch nothing that the products do. Where
    // there are parts for each thread, a thread has some of the rows in all products, else some panels.
    template <class Rows, int N, class Extra, class Updates>
    void products(
        Rows rows, const Product (&list)[N], int num_extra, Extra extra, Updates updates) {
        int parts[N], total = 0, groups = w.count();
        for (int i = 0; i < N; i++) {
            const Matrix* weight = list[i].weight;
            parts[i] = weight ? parts_of(rows.span.num, weight->num_panels()) : 0;
            total += weight ? parts[i] * weight->num_panels() : 0;
            if (parts[i] % w.count()) groups = 1;
        }
        w.each(total + num_extra, [&](int task) {
            if (task >= total) return extra(task - total);
            const auto share = updates.share(task, total);
            const int group = task / (total / groups);
            task %= total / groups;
            for (int i = 0; i < N; i++) {
                const int num_parts = parts[i] / groups;
                const int num = list[i].weight ? num_parts * list[i].weight->num_panels() : 0;
                if (task < num) {
                    const int panel = task / num_parts, part = group * num_parts + task % num_parts;
                    return product(rows, list[i], panel, part, parts[i], share);
                }
                task -= num;
            }
        });
    }
    template <class Rows, int N>
    void products(Rows rows, const Product (&list)[N]) {
        products(rows, list, 0, [](int) {}, NoUpdates());
    }
    template <class Rows, int N, class Extra>
    void products(Rows rows, const Product (&list)[N], int num_extra, Extra extra) {
        products(rows, list, num_extra, extra, NoUpdates());
    }
    template <class Rows, int N, class Updates>
    void products(Rows rows, const Product (&list)[N], Updates updates) {
        products(rows, list, 0, [](int) {}, updates);
    }

    // Adds products to `x`, by way of the buffer `room` where they are normed before.
    template <class Rows>
    void add_to_x(Rows rows, const Matrix& weight, const Norm& post, int room) {
        if (!post.weight) return products(rows, {{&weight, onto_x()}});
        products(rows, {{&weight, into(room)}});
        w.each(b.num_rows, [&](int row) {
            float *y = buffer(room, row), *x = b.x + size_t(row) * s.x;
            rms_norm(y, post.weight, model.eps, model.hidden);
            const F by = F::set(model.residual_scale);
            map(x, x, y, model.hidden, [by](F a, F b) { return fma(b, by, a); });
        });
    }

    void final_norm(int i, float* out) {
        normalize(model, model.norm, b.x + size_t(b.wanted[i]) * s.x, out);
    }

    // After the last layer: what is wanted of it.
    void finish() {
        if (b.stops_at_norm)
            return w.each(
                b.num_wanted, [&](int i) { final_norm(i, b.normed + size_t(i) * s.x); });
        if (!b.num_wanted) return;
        const auto make = [this](int i, float* out) { final_norm(i, out); };
        products(
            rows_of({0, b.num_wanted}, model.hidden, nullptr, s.x, true, make),
            {{&model.head, {b.logits, s.vocab}}});
    }

    const Model& model;
    const Batch& b;
    Worker& w;
    const Strides& s;
    Private& p;

private:
    template <class Rows, class Updates>
    void product(
        Rows& rows, const Product& product, int panel, int part, int parts, Updates updates) {
        const int num = rows.span.num;
        const int begin = rows.span.first + int(int64_t(num) * part / parts);
        const int end = rows.span.first + int(int64_t(num) * (part + 1) / parts);
        matmul_task(
            *product.weight, rows.all().from(product.first_row), begin, end - begin, panel,
            panel + 1, product.out, p.products, updates);
    }
};

// The table of a family whose models are an M, and whose step is an S with run(), and static
// private_bytes(m, strides).
template <class M, class S>
constexpr FamilyKernels kernels_of_family() {
    return {
        [](const Model& m, const Strides& s) {
            return shared_private_bytes(s) + S::private_bytes(static_cast<const M&>(m), s);
        },
        [](const Model& m, const Batch& b, Worker& w) { S(static_cast<const M&>(m), b, w).run(); }};
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream

#define EVERSTREAM_JOIN(a, b) a##_##b
#define EVERSTREAM_AT_LEVEL(name, level) EVERSTREAM_JOIN(name, level)
// Defines the table that family.h declares, in a file that is compiled once per level.
#define EVERSTREAM_FAMILY_KERNELS(name, M, S)                                       \
    namespace everstream {                                                          \
    extern const FamilyKernels EVERSTREAM_AT_LEVEL(name, EVERSTREAM_LEVEL);         \
    constexpr FamilyKernels EVERSTREAM_AT_LEVEL(name, EVERSTREAM_LEVEL) =           \
        EVERSTREAM_LEVEL::kernels_of_family<M, EVERSTREAM_LEVEL::S>();              \
    }
