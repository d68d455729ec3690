#include "families/rwkv7/time_mix_builder.h"

#include <algorithm>

namespace everstream {

void read_time_mix_sizes(TimeMixModel& m, const Options& options) {
    m.num_heads = options.integer("num_heads");
    m.head_size = options.integer("head_dim");
    m.group_eps = float(options.number("group_eps"));
}

static LowRank low_rank(Packer& p, const std::string& name, Precision precision) {
    if (!p.has(name + ".down.weight")) return {};
    return {p.pack({name + ".down"}, precision), p.pack({name + ".up"}, precision)};
}

TimeMix read_time_mix(
    Packer& p, const Options& o, int layer, const std::string& norm, const std::string& name,
    Precision precision) {
    const auto matrix = [&](const char* what) { return p.pack({name + what}, precision); };
    TimeMix l;
    l.norm = p.norm(norm);
    l.shift_mix = p.vector(name + "shift_mix");
    l.receptance = matrix("receptance");
    l.key = matrix("key");
    l.value = matrix("value");
    l.low[LowRanks::decay] = low_rank(p, name + "decay", precision);
    l.low[LowRanks::rate] = low_rank(p, name + "rate", precision);
    l.low[LowRanks::value_mix] = low_rank(p, name + "value_mix", precision);
    l.low[LowRanks::gate] = low_rank(p, name + "gate", precision);
    l.k_k = p.vector(name + "k_k");
    l.k_a = p.vector(name + "k_a");
    l.r_k = p.vector(name + "r_k");
    if (p.has(name + "group_norm.weight")) l.group_norm = p.norm(name + "group_norm");
    l.output = matrix("output");
    l.S = o.state(layer, "S");
    l.shift = o.state(layer, "time_shift");
    return l;
}

void set_time_mixes(TimeMixModel& m, const TimeMix* time_mixes) {
    m.time_mixes = time_mixes;
    const TimeMix& last = time_mixes[m.num_layers - 1];  // the first lacks a map
    for (int map = 0; map < LowRanks::num; map++) m.rank[map] = last.low[map].down.n;
    m.largest_rank = *std::max_element(m.rank, m.rank + LowRanks::num);
    m.num_shifted = m.rank[LowRanks::gate] ? Shifted::num : Shifted::g;
}

void set_time_mix_strides(const TimeMixModel& m, int inner, Strides& s) {
    using B = TimeMixBuffers;
    static_assert(B::num <= MAX_BUFFERS);
    for (int place : {B::r, B::k, B::v, B::v_first, B::decay, B::rate, B::value_mix, B::gate, B::mixed})
        set_buffer(s, place, s.x);
    set_buffer(s, B::shifted, Shifted::num * s.x);
    set_buffer(s, B::low, LowRanks::num * padded_stride(m.largest_rank));
    set_buffer(s, B::hidden, padded_stride(inner));
    s.widest = std::max(s.x, s.buffers[B::hidden]);
    s.inputs = Shifted::num;
    s.prepared = std::max({s.widest, s.buffers[B::shifted], s.buffers[B::low]});
}

}  // namespace everstream
