// Mamba-2 models; the names of weights are those of model/families/mamba.
#include "families/mamba/mamba2_builder.h"

#include <cmath>
#include <stdexcept>

namespace everstream {

namespace {

// -exp(A_log)
const float* rates(Packer& packer, const Weight& log) {
    const size_t n = size_t(log.shape[0]);
    float* rates = packer.arena.allocate<float>(n);
    for (size_t i = 0; i < n; i++) rates[i] = float(-std::exp(double(log.data[i])));
    return rates;
}

}  // namespace

Mamba2Mixers read_mamba2_sizes(const Options& options, int num_heads, int head_size) {
    Mamba2Mixers m;
    m.num_heads = num_heads;
    m.head_size = head_size;
    m.state_size = options.integer("state_size");
    m.num_groups = options.integer("num_groups");
    m.conv_size = options.integer("conv_size");
    m.inner = m.num_heads * m.head_size;
    m.channels = m.inner + 2 * m.num_groups * m.state_size;
    if (m.num_heads % m.num_groups)
        throw std::invalid_argument("the heads of Mamba-2 are no multiple of num_groups");
    return m;
}

Mamba2Mixer read_mamba2_mixer(
    const Mamba2Mixers& mixers, const Options& o, Packer& p, Precision precision, int layer,
    const std::string& name) {
    Mamba2Mixer l;
    l.in = p.pack({name + "in"}, precision);
    if (l.in.n != mixers.rows_of_in())
        throw std::invalid_argument("weight '" + name + "in.weight' has another shape");
    l.conv = p.transposed(p.weight(name + "conv"), 1);
    l.conv_bias = p.vector(name + "conv_bias");
    l.dt_bias = p.vector(name + "dt_bias");
    l.rate = rates(p, p.weight(name + "A_log"));
    l.skip = p.vector(name + "D");
    if (p.has(name + "norm.weight")) l.inner_norm = p.norm(name + "norm");
    l.out = p.pack({name + "out"}, precision);
    l.ring = o.state(layer, "conv");
    l.S = o.state(layer, "S");
    return l;
}

namespace {

std::shared_ptr<const Model> build_mamba2(const Options& o, Packer& packer, Precision precision) {
    Mamba2Model m;
    read_beginning(m, o, packer, precision);
    m.mixers = read_mamba2_sizes(o, o.integer("num_heads"), o.integer("head_dim"));
    Mamba2Mixer* layers = packer.arena.make<Mamba2Mixer>(m.num_layers);
    Norm* norms = packer.arena.make<Norm>(m.num_layers);
    for (int i = 0; i < m.num_layers; i++) {
        const std::string block = "blocks." + std::to_string(i) + ".";
        norms[i] = packer.norm(block + "mixer_norm");
        layers[i] = read_mamba2_mixer(m.mixers, o, packer, precision, i, block + "mixer.");
    }
    m.mixers.layers = layers;
    m.norms = norms;
    read_end(m, packer);
    return std::make_shared<Mamba2Model>(m);
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Mamba2Model&>(model);
    static_assert(Mamba2Buffers::num <= MAX_BUFFERS);
    set_mamba2_strides<Mamba2Buffers>(m.mixers, s);
}

}  // namespace

EVERSTREAM_FAMILY(
    mamba2, build_mamba2, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
