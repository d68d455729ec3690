// What the builders of Mamba-2 models and of their hybrids share.
#pragma once

#include "families/mamba/mamba2_model.h"
#include "runtime/family.h"

namespace everstream {

// The sizes of all mixers, but for the heads', which are given.
Mamba2Mixers read_mamba2_sizes(const Options& options, int num_heads, int head_size);
// That of a layer whose weights' names begin with `name`. Throws std::invalid_argument where they do
// not fit the sizes.
Mamba2Mixer read_mamba2_mixer(
    const Mamba2Mixers& mixers, const Options& options, Packer& packer, Precision precision,
    int layer, const std::string& name);

}  // namespace everstream
