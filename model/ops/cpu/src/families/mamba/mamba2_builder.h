// What the builders of Mamba-2 models and of their hybrids share.
#pragma once

#include <algorithm>

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

// `Places` has those of the two buffers.
template <class Places>
void set_mamba2_strides(const Mamba2Mixers& mixers, Strides& s) {
    set_buffer(s, Places::projected, padded_stride(mixers.rows_of_in()));
    set_buffer(s, Places::y, padded_stride(mixers.inner));
    s.widest = std::max(s.x, s.buffers[Places::y]);
    s.prepared = s.widest;
}

}  // namespace everstream
