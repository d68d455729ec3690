#include "runtime/family.h"
#include "toy_model.h"

namespace everstream {

static std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<ToyModel>();
    read_beginning(*m, o, p, precision);
    m->conv_size = o.integer("conv_size");
    auto* layers = p.arena.make<ToyLayer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) {
        const std::string at = "blocks." + std::to_string(i) + ".";
        layers[i] = {
            p.norm(at + "norm"), p.pack({at + "mix"}, precision), p.pack({at + "out"}, precision),
            p.transposed(p.weight(at + "conv"), 1), p.vector(at + "gain"), o.state(i, "ring"),
            o.state(i, "sum")};
    }
    m->layers = layers;
    read_end(*m, p);
    return m;
}

static void set_strides(const Model& m, Strides& s) {
    set_buffer(s, ToyModel::mixed, padded_stride(3 * m.hidden));
    set_buffer(s, ToyModel::read, s.x);
    s.widest = s.prepared = s.x;
}

EVERSTREAM_FAMILY(toy, build, set_strides, Precision::float32, Precision::int8)

}  // namespace everstream
