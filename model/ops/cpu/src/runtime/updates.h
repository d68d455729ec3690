// Updates of states that go on while the rows of other sequences are multiplied.
#pragma once

#include "products/tiles.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// Updates of states, `update(i)` for each i from `begin` on below `end`, made between the tiles of
// products; `state(i)`, of `bytes` bytes, is asked for during the tile before. So memory is read while
// products are computed.
template <class State, class Update>
struct Updates {
    int begin, end;
    size_t bytes;
    State state;
    Update update;
    Pieces pieces = {};
    int first = 0, last = 0;  // of the present tile

    // Those of one task of some.
    Updates share(int task, int num_tasks) const {
        return {part(task, num_tasks), part(task + 1, num_tasks), bytes, state, update};
    }
    using Along = WithPieces;
    // Before a tile that prefetches so many times.
    WithPieces before_tile(int tile, int num_tiles, int prefetches) {
        first = part(tile, num_tiles), last = part(tile + 1, num_tiles);
        pieces.num = last - first < Pieces::MAX ? last - first : Pieces::MAX;
        pieces.piece = pieces.offset = 0;
        pieces.bytes = int(bytes);
        for (int i = 0; i < pieces.num; i++) pieces.at[i] = state(first + i);
        pieces.lines = pieces.num * (pieces.bytes / 64 + 1) / (prefetches > 0 ? prefetches : 1) + 1;
        return {&pieces};
    }
    void after_tile() {
        for (int i = first; i < last; i++) update(i);
    }

private:
    int part(int i, int num) const { return begin + int(int64_t(end - begin) * i / num); }
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
