// Mamba-1 models; the names of weights are those of model/families/mamba.
#include <algorithm>
#include <cmath>

#include "runtime/family.h"
#include "families/mamba/mamba1_model.h"

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

void read_layer(MambaLayer& l, const Options& o, Packer& p, Precision precision, int index) {
    const std::string block = "blocks." + std::to_string(index) + ".", mixer = block + "mixer.";
    l.norm = p.norm(block + "mixer_norm");
    l.in = p.pack({mixer + "in"}, precision);
    l.conv = p.transposed(p.weight(mixer + "conv"), 1);
    l.conv_bias = p.vector(mixer + "conv_bias");
    l.x = p.pack({mixer + "x"}, precision);
    l.dt = p.pack({mixer + "dt"}, precision);
    l.rate = rates(p, p.weight(mixer + "A_log"));
    l.skip = p.vector(mixer + "D");
    l.out = p.pack({mixer + "out"}, precision);
    l.ring = o.state(index, "conv");
    l.S = o.state(index, "S");
}

std::shared_ptr<const Model> build_mamba(const Options& o, Packer& packer, Precision precision) {
    MambaModel m;
    read_beginning(m, o, packer, precision);
    m.inner = o.integer("inner_size");
    m.state_size = o.integer("state_size");
    m.conv_size = o.integer("conv_size");
    m.rank = o.integer("dt_rank");
    m.mixer_eps = float(o.number("mixer_eps"));
    MambaLayer* layers = packer.arena.make<MambaLayer>(m.num_layers);
    for (int i = 0; i < m.num_layers; i++) read_layer(layers[i], o, packer, precision, i);
    m.layers = layers;
    read_end(m, packer);
    return std::make_shared<MambaModel>(m);
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const MambaModel&>(model);
    using B = MambaBuffers;
    static_assert(B::num <= MAX_BUFFERS);
    set_buffer(s, B::projected, padded_stride(2 * m.inner));
    set_buffer(s, B::selected, padded_stride(m.rank + 2 * m.state_size));
    set_buffer(s, B::delta, padded_stride(m.inner));
    set_buffer(s, B::y, padded_stride(m.inner));
    s.widest = std::max({s.x, s.buffers[B::projected], s.buffers[B::selected]});
    s.prepared = s.widest;
}

}  // namespace

EVERSTREAM_FAMILY(
    mamba, build_mamba, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
