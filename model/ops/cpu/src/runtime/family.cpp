#include "runtime/family.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace everstream {

namespace {

std::vector<const Family*>& registered() {
    static std::vector<const Family*> families;
    return families;
}

const Family& family_of(const std::string& name) {
    for (const Family* family : registered())
        if (name == family->name) return *family;
    throw std::invalid_argument("no native form of '" + name + "' models");
}

}  // namespace

Registration::Registration(const Family& family) { registered().push_back(&family); }

std::vector<std::string> families() {
    std::vector<std::string> names;
    for (const Family* family : registered()) names.emplace_back(family->name);
    std::sort(names.begin(), names.end());
    return names;
}

BuiltModel build(
    const Options& options, const Weights& weights, const Kernels& kernels, Precision precision,
    const Model* base) {
    BuiltModel built;
    built.family = &family_of(options.text("family"));
    const std::string what = std::string("no kernels for '") + built.family->name + "' models";
    const auto& known = built.family->precisions;
    if (std::find(known.begin(), known.end(), precision) == known.end())
        throw std::invalid_argument(what + " of this dtype");
    if (!built.family->kernels[int(kernels.level)])
        throw std::invalid_argument(what + " at level " + kernels.name);
    Packer packer(weights, kernels, built.arena, base);
    built.model = built.family->build(options, packer, precision);
    return built;
}

void read_beginning(Model& m, const Options& options, Packer& packer, Precision precision) {
    m.precision = precision;
    m.num_layers = options.integer("num_layers");
    m.eps = float(options.number("eps"));
    m.state_bytes = size_t(options.number("state_bytes"));
    m.fixed_bytes = size_t(options.number("fixed_bytes"));
    m.rounds_sums = options.integer("rounds_sums") != 0;
    m.embedding = packer.base ? packer.base->embedding : packer.table("embedding.weight", precision);
    m.vocab_size = m.embedding.n, m.hidden = m.embedding.k;
}

void read_end(Model& m, Packer& packer) {
    m.norm = packer.norm("norm");
    const char* head = packer.has("head.weight") ? "head" : "embedding";
    m.head = packer.base ? packer.base->head : packer.pack({head}, m.precision);
}

double* rope_frequencies(Packer& packer, double theta, int half) {
    double* frequencies = packer.arena.make<double>(half);
    for (int i = 0; i < half; i++) frequencies[i] = std::pow(theta, -double(i) / double(half));
    return frequencies;
}

Mlp read_mlp(Packer& packer, const std::string& block, Precision precision) {
    const Matrix up = packer.pack({block + "mlp.gate", block + "mlp.up"}, precision, Rows::paired);
    return {packer.norm(block + "mlp_norm"), up, packer.pack({block + "mlp.down"}, precision)};
}

int padded_stride(int n) { return (n + 63) / 64 * 64 + (n > 0 ? 16 : 0); }

void set_buffer(Strides& s, int place, int stride) {
    s.buffers[place] = stride;
    s.num_buffers = std::max(s.num_buffers, place + 1);
}

Strides strides_of(const Family& family, const Model& m) {
    Strides s;
    s.x = padded_stride(m.hidden);
    s.vocab = padded_stride(m.vocab_size);
    family.set_strides(m, s);
    return s;
}

}  // namespace everstream
