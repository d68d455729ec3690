// What families have in common whose blocks end with an MLP of gated linear units.
#pragma once

#include "step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class MlpStep : protected Step {
protected:
    using Step::Step;

    void look_up_all() {
        w.each(b.num_rows, [&](int row) {
            look_up(model.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
    }

    // `place` is a buffer of padded_stride(mlp.down.k).
    void mlp(const Mlp& l, int place) {
        products(normed(l.norm), {{&l.up, into(place, Into::swiglu)}});
        products(plain(place, l.down.k), {{&l.down, onto_x()}});
    }
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
