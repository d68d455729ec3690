// What the builders of Mamba-1 models and of their hybrids share.
#pragma once

#include <algorithm>

#include "families/mamba/mamba1_model.h"
#include "runtime/family.h"

namespace everstream {

Mamba1Mixers read_mamba1_sizes(const Options& options);
// That of a layer whose weights' names begin with `name`. Throws std::invalid_argument where they do
// not fit the sizes.
Mamba1Mixer read_mamba1_mixer(
    const Mamba1Mixers& mixers, const Options& options, Packer& packer, Precision precision,
    int layer, const std::string& name);

// `Places` has those of the four buffers.
template <class Places>
void set_mamba1_strides(const Mamba1Mixers& mixers, Strides& s) {
    set_buffer(s, Places::projected, padded_stride(2 * mixers.inner));
    set_buffer(s, Places::selected, padded_stride(mixers.rank + 2 * mixers.state_size));
    set_buffer(s, Places::delta, padded_stride(mixers.inner));
    set_buffer(s, Places::y, padded_stride(mixers.inner));
    s.widest = std::max({s.x, s.buffers[Places::projected], s.buffers[Places::selected]});
    s.prepared = s.widest;
}

}  // namespace everstream
