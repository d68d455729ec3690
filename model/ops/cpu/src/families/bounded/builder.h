// What the builders of families with a bounded past share.
#pragma once

#include <functional>
#include <string>

#include "families/bounded/model.h"
#include "runtime/family.h"

namespace everstream {

// The options of all bounded models. `gated`: whether each query has a gate.
void read_bounded(BoundedModel& model, const Options& options, Packer& packer, bool gated);
// Of the pairs of channels that turn, divided by the factors where there are some; options begin with
// `kind`.
const double* read_frequencies(
    const BoundedModel& model, const Options& options, Packer& packer, const std::string& kind);
BoundedAttention read_attention(
    const BoundedModel& model, const Options& options, Packer& packer, int layer,
    const std::string& mixer);
// The norm, the attention or what `read_other` reads in its place, and the MLP at the end of a layer: in the
// order of a step, which asks for the weights behind those that it multiplies. `read_other` is given what the
// names of the mixer's weights begin with, which is also returned.
std::string read_bounded_layer(
    const BoundedModel& model, const Options& options, Packer& packer, int index, BoundedLayer& layer,
    const std::function<void(const std::string&)>& read_other = {});
// Its past is the last `context` positions, in the state proper.
void make_window(BoundedModel& model, BoundedAttention& layer, int context);
// The buffers of all bounded models; `widest` is the inner width of the MLP.
void set_bounded_strides(const BoundedModel& model, Strides& strides, int intermediate);

}  // namespace everstream
