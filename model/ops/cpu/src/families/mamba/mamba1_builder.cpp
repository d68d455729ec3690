// Mamba-1 models; the names of weights are those of model/families/mamba.
#include "families/mamba/mamba1_builder.h"

#include <cmath>
#include <stdexcept>

namespace everstream {

namespace {

// -exp(A_log), transposed.
const float* rates(Packer& packer, const Weight& log) {
    const int64_t rows = log.shape[0], columns = log.shape[1];
    float* rates = packer.arena.allocate<float>(size_t(rows * columns));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            rates[j * rows + i] = float(-std::exp(double(log.data[i * columns + j])));
    return rates;
}

}  // namespace

Mamba1Mixers read_mamba1_sizes(const Options& options) {
    Mamba1Mixers m;
    m.inner = options.integer("inner_size");
    m.state_size = options.integer("state_size");
    m.conv_size = options.integer("conv_size");
    m.rank = options.integer("dt_rank");
    m.norm_eps = float(options.number("mixer_eps"));
    return m;
}

Mamba1Mixer read_mamba1_mixer(
    const Mamba1Mixers& mixers, const Options& o, Packer& p, Precision precision, int layer,
    const std::string& name) {
    Mamba1Mixer l;
    l.in = p.pack({name + "in"}, precision);
    if (l.in.n != 2 * mixers.inner)
        throw std::invalid_argument("weight '" + name + "in.weight' has another shape");
    l.conv = p.transposed(p.weight(name + "conv"), 1);
    l.conv_bias = p.vector(name + "conv_bias");
    l.x = p.pack({name + "x"}, precision);
    if (p.has(name + "dt_norm.weight")) {
        l.dt_norm = p.vector(name + "dt_norm.weight");
        l.b_norm = p.vector(name + "b_norm.weight");
        l.c_norm = p.vector(name + "c_norm.weight");
    }
    l.dt = p.pack({name + "dt"}, precision);
    l.rate = rates(p, p.weight(name + "A_log"));
    l.skip = p.vector(name + "D");
    l.out = p.pack({name + "out"}, precision);
    l.ring = o.state(layer, "conv");
    l.S = o.state(layer, "S");
    return l;
}

namespace {

std::shared_ptr<const Model> build_mamba(const Options& o, Packer& packer, Precision precision) {
    Mamba1Model m;
    read_beginning(m, o, packer, precision);
    m.mixers = read_mamba1_sizes(o);
    Mamba1Mixer* layers = packer.arena.make<Mamba1Mixer>(m.num_layers);
    Norm* norms = packer.arena.make<Norm>(m.num_layers);
    for (int i = 0; i < m.num_layers; i++) {
        const std::string block = "blocks." + std::to_string(i) + ".";
        norms[i] = packer.norm(block + "mixer_norm");
        layers[i] = read_mamba1_mixer(m.mixers, o, packer, precision, i, block + "mixer.");
    }
    m.mixers.layers = layers;
    m.norms = norms;
    read_end(m, packer);
    return std::make_shared<Mamba1Model>(m);
}

void set_strides(const Model& model, Strides& s) {
    static_assert(Mamba1Buffers::num <= MAX_BUFFERS);
    set_mamba1_strides<Mamba1Buffers>(static_cast<const Mamba1Model&>(model).mixers, s);
}

}  // namespace

EVERSTREAM_FAMILY(
    mamba, build_mamba, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
