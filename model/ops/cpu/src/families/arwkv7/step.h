// A whole step of a batch through an ARWKV model, by all threads of a team together. The equations
// are those of model/families/rwkv7/network.py.
#pragma once

#include "families/arwkv7/model.h"
#include "families/rwkv7/time_mix_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Arwkv7Step : public TimeMixStep {
public:
    Arwkv7Step(const Arwkv7Model& m, const Batch& b, Worker& w) : TimeMixStep(m, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        const Mlp& first = m.mlps[0];
        layers(bytes_of(first.up) + bytes_of(first.down), [&](const Part& part, auto updates_of) {
            mlp(m.mlps[part.layer], B::hidden, part.rows, updates_of);
        });
        finish();
    }

private:
    const Arwkv7Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
