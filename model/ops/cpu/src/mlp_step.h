// What families have in common whose blocks end with an MLP of gated linear units.
#pragma once

#include "step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class MlpStep : protected Step {
protected:
    using Step::Step;
    static constexpr int MLP_PHASES = 4;

    // `place` is a buffer of padded_stride(l.down.k).
    void mlp(const Mlp& l, int place) {
        products(normed(l.norm), {{&l.up, into(place, Into::swiglu)}});
        products(plain(place, l.down.k), {{&l.down, onto_x()}});
    }
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
