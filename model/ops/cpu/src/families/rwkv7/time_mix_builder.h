// How families read the parts of RWKV-7's time mix.
#pragma once

#include "runtime/family.h"
#include "families/rwkv7/time_mix_model.h"

namespace everstream {

// What is known before the layers are read; after `read_beginning`.
void read_time_mix_sizes(TimeMixModel& model, const Options& options);
// The mix of a layer, whose weights' names begin with `mix`, and those of the norm before it with
// `norm`.
TimeMix read_time_mix(
    Packer& packer, const Options& options, int layer, const std::string& norm,
    const std::string& mix, Precision precision);
// After the layers are read: what they show.
void set_time_mixes(TimeMixModel& model, const TimeMix* time_mixes);
// The buffers; `inner` is the width of `hidden`.
void set_time_mix_strides(const TimeMixModel& model, int inner, Strides& strides);

}  // namespace everstream
