// LFM2 and LFM3 models; the names of weights are those of model/families/lfm2 and lfm3.
#include <algorithm>
#include <stdexcept>

#include "families/bounded/builder.h"
#include "families/lfm2/model.h"

namespace everstream {

namespace {

ShortConvolution read_convolution(
    const Lfm2Model& m, const Options& o, Packer& p, int layer, const std::string& mixer) {
    ShortConvolution l;
    l.in = p.pack({mixer + "in"}, m.precision);
    if (l.in.n != 3 * m.hidden)
        throw std::invalid_argument("weight '" + mixer + "in.weight' has another shape");
    l.out = p.pack({mixer + "out"}, m.precision);
    l.conv = p.transposed(p.weight(mixer + "conv"), 1);
    l.ring = o.state(layer, "conv");
    return l;
}

// LFM3's layers with a window have a rotation of their own.
void read_window(Lfm2Model& m, const Options& o, BoundedAttention& l) {
    make_window(m, l, o.integer("window"));
    l.sinks = 0;
    l.angles = 2 * m.rotary_size;
}

void read_layer(Lfm2Model& m, const Options& o, Packer& p, int index, Lfm2Layer& l) {
    const std::string block = "blocks." + std::to_string(index) + ".";
    read_bounded_layer(m, o, p, index, l, [&](const std::string& mixer) {
        l.convolution = read_convolution(m, o, p, index, mixer);
    });
    if (m.window_frequencies && o.integer("window_" + std::to_string(index)))
        read_window(m, o, l.attention);
    if (p.has(block + "mixer_post_norm.weight")) {
        l.post = p.norm(block + "mixer_post_norm");
        l.mlp_post = p.norm(block + "mlp_post_norm");
    }
}

std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<Lfm2Model>();
    read_beginning(*m, o, p, precision);
    read_bounded(*m, o, p, false);
    m->head_gates = o.integer("head_gates");
    if (o.integer("window")) m->window_frequencies = read_frequencies(*m, o, p, "window_");
    m->conv_size = o.integer("conv_size");
    auto* layers = p.arena.make<Lfm2Layer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) read_layer(*m, o, p, i, layers[i]);
    m->layers = layers;
    read_end(*m, p);
    return m;
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Lfm2Model&>(model);
    using B = Lfm2Buffers;
    static_assert(B::num <= MAX_BUFFERS);
    set_buffer(s, B::mixed, s.x);
    set_bounded_strides(m, s, m.layers[0].mlp.down.k);
    // Of a convolution; what is normed before it is added to `x` takes a part of it.
    s.buffers[B::in] = std::max(s.buffers[B::in], padded_stride(3 * m.hidden));
}

}  // namespace

EVERSTREAM_FAMILY(
    lfm2, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
