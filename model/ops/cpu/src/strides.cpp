#include <algorithm>

#include "block_model.h"
#include "kernels.h"
#include "rwkv7_model.h"

namespace everstream {

namespace {

// Rows that are a power of two apart would share their places in a cache.
int padded(int n) { return (n + 63) / 64 * 64 + (n > 0 ? 16 : 0); }

void add(Strides& s, int place, int stride) {
    s.buffers[place] = stride;
    s.num_buffers = std::max(s.num_buffers, place + 1);
}

void add_block(Strides& s, const BlockModel& m) {
    using B = BlockBuffers;
    static_assert(B::num <= MAX_BUFFERS);
    add(s, B::in, padded(m.layers[0].in.n));
    add(s, B::extra, padded(m.layers[0].extra.n));
    add(s, B::attended, padded(m.num_heads * m.value));
    add(s, B::hidden, padded(m.intermediate));
    add(s, B::cos, m.key);
    add(s, B::sin, m.key);
    s.widest = std::max({s.x, s.buffers[B::attended], s.buffers[B::hidden]});
    s.prepared = s.widest;
}

void add_rwkv7(Strides& s, const Rwkv7Model& m) {
    using B = Rwkv7Buffers;
    static_assert(B::num <= MAX_BUFFERS);
    for (int place : {B::r, B::k, B::v, B::v_first, B::decay, B::rate, B::value_mix, B::gate, B::mixed})
        add(s, place, s.x);
    add(s, B::shifted, Shifted::num * s.x);
    add(s, B::low, LowRanks::num * padded(m.largest_rank));
    add(s, B::hidden, padded(m.intermediate));
    s.widest = std::max(s.x, s.buffers[B::hidden]);
    s.inputs = Shifted::num;
    s.prepared = std::max({s.widest, s.buffers[B::shifted], s.buffers[B::low]});
}

}  // namespace

Strides strides_of(const Model& m) {
    Strides s;
    s.x = padded(m.hidden);
    s.vocab = padded(m.vocab_size);
    if (m.family == Family::block)
        add_block(s, static_cast<const BlockModel&>(m));
    else
        add_rwkv7(s, static_cast<const Rwkv7Model&>(m));
    return s;
}

}  // namespace everstream
