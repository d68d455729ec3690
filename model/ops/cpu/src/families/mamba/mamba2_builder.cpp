// Mamba-2 models; the names of weights are those of model/families/mamba.
#include <algorithm>
#include <cmath>

#include "runtime/family.h"
#include "families/mamba/mamba2_model.h"

namespace everstream {

namespace {

// -exp(A_log)
const float* rates(Packer& packer, const Weight& log) {
    const size_t n = size_t(log.shape[0]);
    float* rates = packer.arena.allocate<float>(n);
    for (size_t i = 0; i < n; i++) rates[i] = float(-std::exp(double(log.data[i])));
    return rates;
}

void read_layer(Mamba2Layer& l, const Options& o, Packer& p, Precision precision, int index) {
    const std::string block = "blocks." + std::to_string(index) + ".", mixer = block + "mixer.";
    l.norm = p.norm(block + "mixer_norm");
    l.in = p.pack({mixer + "in"}, precision);
    l.conv = p.transposed(p.weight(mixer + "conv"), 1);
    l.conv_bias = p.vector(mixer + "conv_bias");
    l.dt_bias = p.vector(mixer + "dt_bias");
    l.rate = rates(p, p.weight(mixer + "A_log"));
    l.skip = p.vector(mixer + "D");
    l.inner_norm = p.norm(mixer + "norm");
    l.out = p.pack({mixer + "out"}, precision);
    l.ring = o.state(index, "conv");
    l.S = o.state(index, "S");
}

std::shared_ptr<const Model> build_mamba2(const Options& o, Packer& packer, Precision precision) {
    Mamba2Model m;
    read_beginning(m, o, packer, precision);
    m.num_heads = o.integer("num_heads");
    m.head_size = o.integer("head_dim");
    m.state_size = o.integer("state_size");
    m.num_groups = o.integer("num_groups");
    m.conv_size = o.integer("conv_size");
    m.inner = m.num_heads * m.head_size;
    m.channels = m.inner + 2 * m.num_groups * m.state_size;
    Mamba2Layer* layers = packer.arena.make<Mamba2Layer>(m.num_layers);
    for (int i = 0; i < m.num_layers; i++) read_layer(layers[i], o, packer, precision, i);
    m.layers = layers;
    read_end(m, packer);
    return std::make_shared<Mamba2Model>(m);
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Mamba2Model&>(model);
    using B = Mamba2Buffers;
    static_assert(B::num <= MAX_BUFFERS);
    set_buffer(s, B::projected, padded_stride(m.layers[0].in.n));
    set_buffer(s, B::y, padded_stride(m.inner));
    s.widest = std::max(s.x, s.buffers[B::y]);
    s.prepared = s.widest;
}

}  // namespace

EVERSTREAM_FAMILY(
    mamba2, build_mamba2, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
