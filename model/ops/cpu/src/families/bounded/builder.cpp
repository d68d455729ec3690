#include "families/bounded/builder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace everstream {

const double* read_frequencies(
    const BoundedModel& m, const Options& options, Packer& p, const std::string& kind) {
    const int half = m.rotary_size / 2, num_factors = options.integer("num_" + kind + "rope_factors");
    double* frequencies = rope_frequencies(p, options.number(kind + "rope_theta"), half);
    if (num_factors && num_factors != half)
        throw std::invalid_argument("num_rope_factors is not half of rotary_dim");
    for (int i = 0; i < num_factors; i++)
        frequencies[i] /= options.number(kind + "rope_factor_" + std::to_string(i));
    return frequencies;
}

void read_bounded(BoundedModel& m, const Options& options, Packer& p, bool gated) {
    m.num_heads = options.integer("num_heads");
    m.num_kv_heads = options.integer("num_kv_heads");
    m.head_size = options.integer("head_dim");
    m.rotary_size = options.integer("rotary_dim");
    m.frequencies = read_frequencies(m, options, p, "");
    m.score_scale = 1.0f / std::sqrt(float(m.head_size));
    m.gated = gated;
    m.sinks = options.integer("sinks");
    m.farthest = options.integer("farthest");
    m.slides = options.number("slides") != 0;
    if (m.num_heads % m.num_kv_heads)
        throw std::invalid_argument("num_heads is no multiple of num_kv_heads");
    if (!m.slides) m.max_positions = options.integer("context");
}

BoundedAttention read_attention(
    const BoundedModel& m, const Options& options, Packer& p, int layer, const std::string& mixer) {
    BoundedAttention l;
    std::vector<std::string> in = {mixer + "q", mixer + "k", mixer + "v"};
    if (m.head_gates) in.push_back(mixer + "gate");
    l.in = p.pack(in, m.precision);
    if (l.in.n != m.rows_of_in())
        throw std::invalid_argument("weight '" + mixer + "q.weight' has another shape");
    l.out = p.pack({mixer + "out"}, m.precision);
    if (p.has(mixer + "q_norm.weight")) {
        l.q_norm = p.vector(mixer + "q_norm.weight");
        l.k_norm = p.vector(mixer + "k_norm.weight");
    }
    l.k = options.state(layer, "k");
    l.v = options.state(layer, "v");
    l.context = options.integer("context");
    l.sinks = m.sinks;
    l.block_bytes = size_t(options.number("group_bytes"));
    return l;
}

std::string read_bounded_layer(
    const BoundedModel& m, const Options& o, Packer& p, int index, BoundedLayer& l,
    const std::function<void(const std::string&)>& read_other) {
    const std::string block = "blocks." + std::to_string(index) + ".", mixer = block + "mixer.";
    l.norm = p.norm(block + "mixer_norm");
    l.is_attention = p.has(mixer + "q.weight");
    if (l.is_attention)
        l.attention = read_attention(m, o, p, index, mixer);
    else if (read_other)
        read_other(mixer);
    if (p.has(block + "mlp_norm.weight")) l.mlp = read_mlp(p, block, m.precision);
    return mixer;
}

void make_window(BoundedModel& m, BoundedAttention& l, int context) {
    l.in_state = true;
    l.context = context;
    m.most_places = std::max(m.most_places, l.num_blocks() * POSITION_BLOCK);
    l.block_bytes = size_t(m.num_kv_heads) * m.head_size * POSITION_BLOCK * sizeof(uint16_t);
}

void set_bounded_strides(const BoundedModel& m, Strides& s, int intermediate) {
    using B = BoundedBuffers;
    const int heads = padded_stride(m.num_heads * m.head_size);
    set_buffer(s, B::in, padded_stride(m.rows_of_in()));
    set_buffer(s, B::attended, heads);
    set_buffer(s, B::angles, padded_stride((m.window_frequencies ? 3 : 2) * m.rotary_size));
    set_buffer(s, B::near, m.slides ? heads : 0);
    set_buffer(s, B::far, padded_stride(m.far_stride()));
    set_buffer(s, B::hidden, padded_stride(intermediate));
    s.widest = std::max({s.widest, s.x, heads, s.buffers[B::hidden]});
    s.prepared = s.widest;
}

}  // namespace everstream
