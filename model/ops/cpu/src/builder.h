// Makes the model that options and weights describe: one function per family.
#pragma once

#include "packer.h"

namespace everstream {

// Packed weights and the model that points into them.
struct BuiltModel {
    Arena arena;
    std::shared_ptr<const Model> model;
};

// The names of the families that options may ask for.
std::vector<std::string> families();

// Throws std::invalid_argument where an option or a weight is missing or has another shape.
BuiltModel build(
    const Options& options, const Weights& weights, const Kernels& kernels, Precision precision);

std::shared_ptr<const Model> build_block(const Options& options, Packer& packer, Precision precision);
std::shared_ptr<const Model> build_rwkv7(const Options& options, Packer& packer, Precision precision);

}  // namespace everstream
