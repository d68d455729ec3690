// What families have in common whose blocks end with an MLP of gated linear units.
#pragma once

#include "runtime/step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class MlpStep : protected Step {
protected:
    using Step::Step;

    // `place` is a buffer of padded_stride(l.down.k). `updates_of(weight)` gives the updates between
    // the products with it.
    template <class UpdatesOf>
    void mlp(const Mlp& l, int place, Span rows, UpdatesOf updates_of) {
        products(normed(l.norm, rows), {{&l.up, into(place, Into::swiglu)}}, updates_of(l.up));
        products(plain(place, l.down.k, rows), {{&l.down, onto_x()}}, updates_of(l.down));
    }
    void mlp(const Mlp& l, int place) { mlp(l, place, all_rows(), no_updates); }
    // With the norm of what it gives, if there is one; `room` is a buffer of the width.
    void mlp(const Mlp& l, int place, const Norm& post, int room) {
        products(normed(l.norm), {{&l.up, into(place, Into::swiglu)}});
        add_to_x(plain(place, l.down.k), l.down, post, room);
    }
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
