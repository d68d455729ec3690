#include "builder.h"

#include <map>
#include <stdexcept>

namespace everstream {

namespace {

using Build = std::shared_ptr<const Model> (*)(const Options&, Packer&, Precision);

const std::map<std::string, Build> FAMILIES = {{"block", build_block}, {"rwkv7", build_rwkv7}};

}  // namespace

std::vector<std::string> families() {
    std::vector<std::string> names;
    for (const auto& [name, build] : FAMILIES) names.push_back(name);
    return names;
}

BuiltModel build(
    const Options& options, const Weights& weights, const Kernels& kernels, Precision precision) {
    const auto found = FAMILIES.find(options.text("family"));
    if (found == FAMILIES.end())
        throw std::invalid_argument("no native form of '" + options.text("family") + "' models");
    BuiltModel built;
    Packer packer(weights, kernels, built.arena);
    built.model = found->second(options, packer, precision);
    return built;
}

}  // namespace everstream
