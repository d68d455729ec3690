// The chunk form of the gated delta rule for a training step, block by block in the nearest
// caches, and its gradient. Symbols as in model/ops/delta.py; further, for the tokens i and j of
// a block, e_i = exp(b_i) from its start, r_i = exp(b_C - b_i) to its end, Z = K S, and
//
//     A_ij = beta_i exp(b_i - b_j) k_i . k_j  (i > j)     M_ij = exp(b_i - b_j) q_i . k_j  (i >= j)
//     (I + A) u = beta (v - e Z),   o = M u + e (Q S),   S' = exp(b_C) S + K^T (r u)
#pragma once

#include "families/block/products.h"
#include "training/training.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

constexpr int to32(int n) { return (n + 31) / 32 * 32; }

template <class T, class Op>
class DeltaPass {
    using Unit = typename Op::Unit;

  public:
    explicit DeltaPass(const DeltaArguments& a)
        : a_(a), k_(to32(a.key)), v_(to32(a.value)), space_(bytes()) {
        for (float** piece : {&q, &k, &grad_q, &grad_k, &part}) *piece = space_.take(size_t(C) * k_);
        for (float** piece : {&v, &u, &z, &g, &x}) *piece = space_.take(size_t(C) * v_);
        for (float** piece : {&A, &M, &G, &P, &pairs, &grad_M, &grad_A}) *piece = space_.take(size_t(C) * C);
        for (float** piece : {&S, &grad_S, &change}) *piece = space_.take(size_t(k_) * v_);
        for (float** piece : {&e, &r, &beta, &grad_beta, &grad_b}) *piece = space_.take(C);
        b = space_.take<double>(C);
        for (Unit*& room : rooms) room = space_.template take<Unit>(room_size());
    }

    void forward() {
        for (int row = 0; row < a_.batch * a_.heads; row++) {
            load_state(S, a_.state + size_t(row) * a_.key * a_.value);
            for (int n = 0; n < num_blocks(); n++) forward_block(row, n);
            store_state(a_.new_state + size_t(row) * a_.key * a_.value, S);
        }
    }

    void backward() {
        for (int row = 0; row < a_.batch * a_.heads; row++) {
            const size_t state = size_t(row) * a_.key * a_.value;
            if (a_.grad_new_state)
                load_state(grad_S, a_.grad_new_state + state);
            else
                std::memset(grad_S, 0, size_t(k_) * v_ * 4);
            for (int n = num_blocks() - 1; n >= 0; n--) backward_block(row, n);
            store_state(a_.grad_state + state, grad_S);
        }
    }

  private:
    static constexpr int C = DELTA_BLOCK, ROOMS = 10;
    int num_blocks() const { return (a_.tokens + C - 1) / C; }
    size_t widest() const { return size_t(k_ > v_ ? (k_ > C ? k_ : C) : (v_ > C ? v_ : C)); }
    size_t room_size() const { return widest() * widest() / Op::SIZE; }
    size_t bytes() const {
        return 4 * (size_t(C) * (5 * k_ + 5 * v_ + 7 * C + 8) + 3 * size_t(k_) * v_) +
               ROOMS * room_size() * sizeof(Unit) + 64 * (40 + ROOMS);
    }

    // Tokens of block n, and where those of a head's `width` numbers begin in a row of qkv.
    int size_of(int n) const { return a_.tokens - n * C < C ? a_.tokens - n * C : C; }
    size_t qkv_width() const { return size_t(a_.heads) * (2 * a_.key + a_.value); }
    size_t token(int row, int n, int i) const {
        return size_t(row / a_.heads) * a_.tokens + size_t(n) * C + i;
    }
    size_t gate(int row, int n, int i) const { return token(row, n, i) * a_.heads + row % a_.heads; }
    template <class Number>
    Number* qkv(Number* base, int row, int n, int i, int which) const {
        const int head = row % a_.heads, width = which == 2 ? a_.value : a_.key;
        return base + token(row, n, i) * qkv_width() + size_t(which) * a_.heads * a_.key + size_t(head) * width;
    }
    size_t value(int row, int n, int i) const { return gate(row, n, i) * a_.value; }
    size_t saved(int row, int n, int i) const {
        return (size_t(row) * a_.tokens + size_t(n) * C + i) * a_.value;
    }
    float* start(int row, int n) const {
        return a_.starts + (size_t(row) * num_blocks() + n) * a_.key * a_.value;
    }

    void load_state(float* to, const float* from) const {
        for (int i = 0; i < a_.key; i++) widen(to + size_t(i) * v_, from + size_t(i) * a_.value, a_.value);
    }
    void store_state(float* to, const float* from) const {
        for (int i = 0; i < a_.key; i++) narrow(to + size_t(i) * a_.value, from + size_t(i) * v_, a_.value);
    }

    // Rows beyond the last token are zero, and their decays those of the last one.
    template <class Number>
    void clear_after(Number* rows, int size, int width) const {
        std::memset(rows + size_t(size) * width, 0, size_t(C - size) * width * sizeof(Number));
    }
    void load_block(int row, int n) {
        const int size = size_of(n);
        const T* base = static_cast<const T*>(a_.qkv);
        double sum = 0.0;
        for (int i = 0; i < C; i++) {
            const bool inside = i < size;
            beta[i] = inside ? a_.beta[gate(row, n, i)] : 0.0f;
            if (inside) sum += double(a_.log_decay[gate(row, n, i)]);
            b[i] = sum;
        }
        for (int i = 0; i < size; i++) {
            widen(q + size_t(i) * k_, qkv(base, row, n, i, 0), a_.key);
            widen(k + size_t(i) * k_, qkv(base, row, n, i, 1), a_.key);
            widen(v + size_t(i) * v_, qkv(base, row, n, i, 2), a_.value);
        }
        clear_after(q, size, k_), clear_after(k, size, k_), clear_after(v, size, v_);
        for (int i = 0; i < C; i++) e[i] = float(b[i]), r[i] = float(b[C - 1] - b[i]);
        vectors(C, [&](int i) {
            exp(F::load(e + i)).store(e + i);
            exp(F::load(r + i)).store(r + i);
        });
    }

    // Units of q and k, then A and M, and the pair decays, all zero above the diagonal.
    void systems() {
        q_columns = Op::along_columns(rooms[0], q, C, k_);
        k_columns = Op::along_columns(rooms[1], k, C, k_);
        const Unit* k_turned = turned(rooms[2], k_columns, C, k_ / Op::SIZE);
        multiply<Op>(G, C, C, k_, left<Op>(k_columns, k_), k_turned, Part::lower_result);
        multiply<Op>(P, C, C, k_, left<Op>(q_columns, k_), k_turned, Part::lower_result);
        for (int i = 0; i < C; i++) {
            float *d = pairs + i * C, *a = A + i * C, *m = M + i * C;
            const float *g_row = G + i * C, *p_row = P + i * C;
            const int reach = to16(i + 1);
            for (int j = 0; j < reach; j++) d[j] = j <= i ? float(b[i] - b[j]) : -INFINITY;
            vectors(reach, [&](int j) { exp(F::load(d + j)).store(d + j); });
            std::memset(d + reach, 0, size_t(C - reach) * 4);
            for (int j = 0; j < reach; j++) a[j] = beta[i] * d[j] * g_row[j], m[j] = p_row[j] * d[j];
            std::memset(a + reach, 0, size_t(C - reach) * 4);
            std::memset(m + reach, 0, size_t(C - reach) * 4);
            // What lies above the diagonal was not computed and may be anything.
            for (int j = i + 1; j < reach; j++) m[j] = 0.0f;
            for (int j = i; j < reach; j++) a[j] = 0.0f;
        }
    }

    void forward_block(int row, int n) {
        store_state(start(row, n), S);
        load_block(row, n);
        systems();
        const Unit* S_rows = Op::along_rows(rooms[3], S, k_, v_);
        multiply<Op>(z, C, v_, k_, left<Op>(k_columns, k_), S_rows);
        multiply<Op>(x, C, v_, k_, left<Op>(q_columns, k_), S_rows);
        for (int i = 0; i < C; i++) {
            const F bi = F::set(beta[i]), be = F::set(-beta[i] * e[i]), ei = F::set(e[i]);
            const size_t at = size_t(i) * v_;
            vectors(v_, [&](int c) {
                fma(be, F::load(z + at + c), bi * F::load(v + at + c)).store(u + at + c);
                (ei * F::load(x + at + c)).store(x + at + c);
            });
        }
        solve_unit_triangular<false>(A, u, C, v_);
        const Unit* u_rows = Op::along_rows(rooms[4], u, C, v_);
        const Unit* m_columns = Op::along_columns(rooms[5], M, C, C);
        multiply<Op, true>(x, C, v_, C, left<Op>(m_columns, C), u_rows, Part::lower_left);
        for (int i = 0; i < size_of(n); i++) {
            narrow(static_cast<T*>(a_.out) + value(row, n, i), x + size_t(i) * v_, a_.value);
            narrow(static_cast<T*>(a_.u) + saved(row, n, i), u + size_t(i) * v_, a_.value);
        }
        scale_rows(u, r, v_);
        const Unit* k_rows = Op::along_rows(rooms[6], k, C, k_);
        u_rows = Op::along_rows(rooms[4], u, C, v_);
        multiply<Op>(change, k_, v_, C, transposed<Op>(k_rows, k_), u_rows);
        // S exp(b) as S + S expm1(b): a decay near one, rounded, is wrong the same way each time.
        const F lost = F::set(float(::expm1(b[C - 1])));
        vectors(k_ * v_, [&](int i) {
            const F s = F::load(S + i);
            (fma(s, lost, s) + F::load(change + i)).store(S + i);
        });
    }

    static void scale_rows(float* rows, const float* by, int width) {
        for (int i = 0; i < C; i++) scale(rows + size_t(i) * width, by[i], width);
    }

    void backward_block(int row, int n) {
        const int size = size_of(n);
        load_block(row, n);
        load_state(S, start(row, n));
        for (int i = 0; i < size; i++) {
            widen(u + size_t(i) * v_, static_cast<const T*>(a_.u) + saved(row, n, i), a_.value);
            widen(g + size_t(i) * v_, static_cast<const T*>(a_.grad_out) + value(row, n, i), a_.value);
        }
        clear_after(u, size, v_), clear_after(g, size, v_);
        systems();
        std::memset(grad_b, 0, size_t(C) * 4);
        through_values();
        through_scores();
        through_keys();
        through_state();
        write_gradients(row, n, size);
    }

    // x: from the gradient of u to that of beta (v - e Z). The gradients of r and of the decay.
    void through_values() {
        const Unit* grad_rows = Op::along_rows(rooms[3], g, C, v_);
        const Unit* m_rows = Op::along_rows(rooms[4], M, C, C);
        const Unit* grad_S_rows = Op::along_rows(rooms[5], grad_S, k_, v_);
        multiply<Op>(x, C, v_, C, transposed<Op>(m_rows, C), grad_rows, Part::upper_left);
        multiply<Op>(z, C, v_, k_, left<Op>(k_columns, k_), grad_S_rows);
        float end = float(::exp(b[C - 1])) * dot(S, grad_S, k_ * v_);
        for (int i = 0; i < C; i++) {
            const size_t at = size_t(i) * v_;
            const F by = F::set(r[i]);
            const float along = r[i] * dot(u + at, z + at, v_);
            grad_b[i] -= along, end += along;
            vectors(v_, [&](int c) {
                fma(by, F::load(z + at + c), F::load(x + at + c)).store(x + at + c);
            });
        }
        grad_b[C - 1] += end;
        solve_unit_triangular<true>(A, x, C, v_);
    }

    // G and P: from M and A to the gradients of K K^T (its lower part) and of Q K^T.
    void through_scores() {
        g_columns = Op::along_columns(rooms[3], g, C, v_);
        x_columns = Op::along_columns(rooms[4], x, C, v_);
        u_columns = Op::along_columns(rooms[5], u, C, v_);
        const Unit* u_turned = turned(rooms[6], u_columns, C, v_ / Op::SIZE);
        multiply<Op>(grad_M, C, C, v_, left<Op>(g_columns, v_), u_turned, Part::lower_result);
        multiply<Op>(grad_A, C, C, v_, left<Op>(x_columns, v_), u_turned, Part::lower_result);
        float moved[C], to_beta[C];
        for (int i = 0; i < C; i++) {
            const size_t at = size_t(i) * C;
            const int reach = to16(i + 1);
            const F bi = F::set(-beta[i]);
            grad_A[at + i] = 0.0f;
            // The pair decays are zero above the diagonal, and so is what they multiply.
            vectors(reach, [&](int j) {
                const F d = F::load(pairs + at + j), m = F::load(grad_M + at + j) * d;
                const F a = F::load(grad_A + at + j) * d;
                const F by_a = a * F::load(G + at + j), by_m = m * F::load(P + at + j);
                by_a.store(to_beta + j);
                const F change = fma(bi, by_a, by_m);
                change.store(moved + j);
                (F::load(grad_b + j) - change).store(grad_b + j);
                m.store(P + at + j);
                (bi * a).store(G + at + j);
            });
            std::memset(P + at + reach, 0, size_t(C - reach) * 4);
            std::memset(G + at + reach, 0, size_t(C - reach) * 4);
            grad_b[i] += sum(moved, reach);
            grad_beta[i] = -sum(to_beta, reach);
        }
    }

    // The gradients of q, k, v and beta, and of e.
    void through_keys() {
        const Unit* S_turned = turned(rooms[7], Op::along_columns(rooms[6], S, k_, v_), k_, v_ / Op::SIZE);
        multiply<Op>(grad_q, C, k_, v_, left<Op>(g_columns, v_), S_turned);
        multiply<Op>(grad_k, C, k_, v_, left<Op>(x_columns, v_), S_turned);
        const Unit* grad_S_columns = Op::along_columns(rooms[6], grad_S, k_, v_);
        const Unit* grad_S_turned = turned(rooms[7], grad_S_columns, k_, v_ / Op::SIZE);
        multiply<Op>(part, C, k_, v_, left<Op>(u_columns, v_), grad_S_turned);
        for (int i = 0; i < C; i++) {
            const size_t at = size_t(i) * k_, at_v = size_t(i) * v_;
            const float read = dot(k + at, grad_k + at, k_), be = beta[i] * e[i];
            grad_beta[i] += dot(x + at_v, v + at_v, v_) - e[i] * read;
            grad_b[i] += e[i] * dot(q + at, grad_q + at, k_) - be * read;
            vectors(k_, [&](int c) {
                const F kept = F::set(r[i]) * F::load(part + at + c);
                fma(F::set(-be), F::load(grad_k + at + c), kept).store(grad_k + at + c);
                (F::set(e[i]) * F::load(grad_q + at + c)).store(grad_q + at + c);
            });
            vectors(v_, [&](int c) {
                const F xi = F::load(x + at_v + c);
                (F::set(beta[i]) * xi).store(v + at_v + c);
                (F::set(-be) * xi).store(x + at_v + c);
                (F::set(e[i]) * F::load(g + at_v + c)).store(g + at_v + c);
            });
        }
        k_rows = Op::along_rows(rooms[6], k, C, k_), q_rows = Op::along_rows(rooms[7], q, C, k_);
        const Unit* P_columns = Op::along_columns(rooms[8], P, C, C);
        const Unit* P_rows = Op::along_rows(rooms[9], P, C, C);
        multiply<Op, true>(grad_q, C, k_, C, left<Op>(P_columns, C), k_rows, Part::lower_left);
        multiply<Op, true>(grad_k, C, k_, C, transposed<Op>(P_rows, C), q_rows, Part::upper_left);
        const Unit* G_columns = Op::along_columns(rooms[8], G, C, C);
        const Unit* G_rows = Op::along_rows(rooms[9], G, C, C);
        multiply<Op, true>(grad_k, C, k_, C, left<Op>(G_columns, C), k_rows, Part::lower_left);
        multiply<Op, true>(grad_k, C, k_, C, transposed<Op>(G_rows, C), k_rows, Part::upper_left);
    }

    // The gradient of the state before the block, from g = e (gradient of o) and x = that of Z.
    void through_state() {
        const Unit* g_rows = Op::along_rows(rooms[3], g, C, v_);
        multiply<Op>(change, k_, v_, C, transposed<Op>(q_rows, k_), g_rows);
        const Unit* x_rows = Op::along_rows(rooms[4], x, C, v_);
        multiply<Op, true>(change, k_, v_, C, transposed<Op>(k_rows, k_), x_rows);
        const F lost = F::set(float(::expm1(b[C - 1])));
        vectors(k_ * v_, [&](int i) {
            const F s = F::load(grad_S + i);
            (fma(s, lost, s) + F::load(change + i)).store(grad_S + i);
        });
    }

    void write_gradients(int row, int n, int size) {
        T* base = static_cast<T*>(a_.grad_qkv);
        for (int i = 0; i < size; i++) {
            narrow(qkv(base, row, n, i, 0), grad_q + size_t(i) * k_, a_.key);
            narrow(qkv(base, row, n, i, 1), grad_k + size_t(i) * k_, a_.key);
            narrow(qkv(base, row, n, i, 2), v + size_t(i) * v_, a_.value);
            a_.grad_beta[gate(row, n, i)] = grad_beta[i];
        }
        double after = 0.0;  // b_i sums the decays up to token i
        for (int i = C - 1; i >= 0; i--) {
            after += double(grad_b[i]);
            if (i < size) a_.grad_log_decay[gate(row, n, i)] = float(after);
        }
    }

    const DeltaArguments& a_;
    int k_, v_;  // widths of a key and a value, padded
    Workspace space_;
    float *q, *k, *v, *u, *x, *z, *g, *A, *M, *G, *P, *grad_M, *grad_A, *pairs, *S, *grad_S, *change;
    float *part, *grad_q, *grad_k, *e, *r, *beta, *grad_beta, *grad_b;
    double* b;
    Unit* rooms[ROOMS];
    const Unit *q_columns, *k_columns, *q_rows, *k_rows, *g_columns, *x_columns, *u_columns;
};

template <class T, class Op>
void delta(const DeltaArguments& a) {
    DeltaPass<T, Op>(a).forward();
}
template <class T, class Op>
void delta_backward(const DeltaArguments& a) {
    DeltaPass<T, Op>(a).backward();
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
