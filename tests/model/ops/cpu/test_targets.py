"""A call with a target writes there what a call in place writes, and leaves the state before it.

State and logits are compared byte by byte. A target holds ones in every bit before, so that what
a call does not write, or reads before it has come from the source, is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from model.native.runtime import Runtime, levels
from tests.model.ops.cpu.models import SERVED, random_tokens, small_model, small_runtime
from tests.model.ops.cpu.test_same_bits import HALVED, POISON

Bytes = npt.NDArray[np.uint8]
#: Tokens of a call, those that the state has seen before: windows, epochs and groups go by.
TOKENS = range(1, 9)
SEEN = (0, 3, 6, 15, 16, 29, 31, 61)


@dataclass(frozen=True)
class Written:
    """What a call leaves of a row: the logits after its last token, and its whole state."""

    logits: bytes
    state: bytes


class States:
    """Texts that have begun: their states in ``pool``, and calls that continue them."""

    def __init__(self, name: str, threads: int, level: str | None, seen: tuple[int, ...]) -> None:
        config, _ = small_model(name)
        self.runtime: Runtime = small_runtime(name, "float32", threads, level)
        self.seen, self.slots = list(seen), list(range(len(seen)))
        self.texts = [random_tokens(config, n + TOKENS[-1], n) for n in seen]
        self.pool = self.runtime.empty_pool(len(seen))
        for slot in self.slots:
            if seen[slot]:
                begun = self.texts[slot][: seen[slot]]
                self.runtime.run(self.pool, [slot], [0], [begun], [None])

    @property
    def fixed_bytes(self) -> int:
        return self.runtime.layout.fixed_bytes

    def written(
        self,
        pool: Bytes,
        slots: list[int],
        counts: list[int],
        sources: list[Bytes | None] | None = None,
        targets: list[Bytes | None] | None = None,
    ) -> list[Written]:
        """What a call of the next ``counts`` tokens leaves in ``pool``, or in its targets."""
        begins = [self.seen[slot] for slot in slots]
        parts = [
            self.texts[slot][n : n + count]
            for slot, n, count in zip(slots, begins, counts, strict=True)
        ]
        draws = [self.runtime.draw(temperature=0.0)] * len(slots)
        self.runtime.run(pool, slots, begins, parts, draws, sources=sources, targets=targets)
        found = []
        for i, slot in enumerate(slots):
            state = pool[slot].copy()
            for moved in (sources, targets):
                if moved is not None and (part := moved[i]) is not None:
                    state[: self.fixed_bytes] = part
            found.append(Written(self.runtime.logits()[i].tobytes(), state.tobytes()))
        return found

    def elsewhere(self, slot: int | None = None) -> Bytes:
        """Room for a state, with that of ``slot`` or nothing."""
        room = np.full(self.fixed_bytes, POISON, np.uint8)
        room[self.runtime.layout.gaps()] = 0
        if slot is not None:
            room[:] = self.pool[slot, : self.fixed_bytes]
        return room


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", SERVED)
def test_call_with_a_target_is_that_in_place(name: str, level: str, threads: int) -> None:
    states = States(name, threads, level, SEEN)
    for slot, count in zip(states.slots, TOKENS, strict=True):
        wanted = states.written(states.pool.copy(), [slot], [count])
        pool, target = states.pool.copy(), states.elsewhere()
        assert states.written(pool, [slot], [count], targets=[target]) == wanted
        fixed = states.fixed_bytes
        assert pool[slot, :fixed].tobytes() == states.pool[slot, :fixed].tobytes()


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", SERVED)
def test_batch_of_states_in_place_and_elsewhere(name: str, level: str) -> None:
    """Rows with and without a source and a target, of one to eight tokens, by three threads."""
    states = States(name, 3, level, SEEN)
    slots, counts = states.slots, list(TOKENS)
    wanted = states.written(states.pool.copy(), slots, counts)
    sources = [states.elsewhere(slot) if slot % 4 > 1 else None for slot in slots]
    targets = [states.elsewhere() if slot % 2 else None for slot in slots]
    kept = [None if source is None else source.copy() for source in sources]
    pool = states.pool.copy()
    for slot, source in enumerate(sources):
        if source is not None:
            pool[slot, : states.fixed_bytes] = POISON
    before = pool.copy()
    assert states.written(pool, slots, counts, sources, targets) == wanted
    for slot in slots:
        if sources[slot] is not None or targets[slot] is not None:
            fixed = states.fixed_bytes
            assert pool[slot, :fixed].tobytes() == before[slot, :fixed].tobytes()
        if targets[slot] is not None and (source := sources[slot]) is not None:
            assert np.array_equal(source, kept[slot])


def test_long_text_in_segments_has_a_source_and_a_target() -> None:
    name = "llama-windows"
    config, _ = small_model(name)
    runtime, text = small_runtime(name, threads=2), random_tokens(config, 130)
    pool, fixed = runtime.empty_pool(1), runtime.layout.fixed_bytes
    runtime.run(pool, [0], [0], [text[:30]], [None])
    source, target = pool[0, :fixed].copy(), np.full(fixed, POISON, np.uint8)
    target[runtime.layout.gaps()] = 0
    before = source.copy()
    call = [0], [30], [text[30:]], [None]
    runtime.run(np.full_like(pool, POISON), *call, sources=[source], targets=[target])
    runtime.run(pool, *call)
    assert np.array_equal(target, pool[0, :fixed])
    assert np.array_equal(source, before)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", HALVED)
def test_step_in_two_halves_has_targets(name: str, level: str) -> None:
    states = States(name, 3, level, SEEN * 7)
    slots, counts = states.slots, [1 + slot % 2 for slot in states.slots]
    wanted = states.written(states.pool.copy(), slots, counts)
    targets = [states.elsewhere() if slot % 3 else None for slot in slots]
    assert states.written(states.pool.copy(), slots, counts, targets=targets) == wanted


@pytest.mark.parametrize("name", ["gated", "rwkv7", "qwen35"])
def test_texts_are_scored_and_embedded_where_their_state_is(name: str) -> None:
    states = States(name, 1, None, SEEN)
    runtime, slot, text = states.runtime, 4, states.texts[4][-5:]
    fixed = states.fixed_bytes

    def in_place(call: str) -> tuple[bytes, bytes]:
        pool = states.pool.copy()
        return scored(pool, call, None), pool[slot].tobytes()

    def scored(pool: Bytes, call: str, source: Bytes | None) -> bytes:
        row = pool, slot, SEEN[slot], text
        if call == "embed":
            return runtime.embed(*row, source).tobytes()
        return repr(runtime.score_top(*row, None, 2, source)).encode()

    for call in ("embed", "score"):
        pool, source = states.pool.copy(), states.elsewhere(slot)
        pool[slot, :fixed] = POISON
        found = scored(pool, call, source)
        assert (pool[slot, :fixed] == POISON).all()
        pool[slot, :fixed] = source
        assert (found, pool[slot].tobytes()) == in_place(call)


def test_states_that_are_no_such_memory_are_refused() -> None:
    states = States("gated", 1, None, (3, 3))
    pool, room, other = states.pool, states.elsewhere(), states.elsewhere()
    before, frozen = pool.tobytes(), states.elsewhere()
    frozen.flags.writeable = False
    bad = [room[:-1], np.repeat(room, 2)[::2], room.view(np.int8), room[None], frozen, "room"]
    for value in bad:
        for key in ("sources", "targets"):
            with pytest.raises(ValueError, match="a state is not a contiguous array"):
                states.written(pool, [0], [1], **{key: [value]})  # type: ignore[arg-type]
    twice: list[dict[str, list[Bytes | None]]] = [
        {"targets": [room, room]},
        {"sources": [room, room]},
        {"sources": [room, None], "targets": [None, room]},
        {"targets": [pool[1], None]},
        {"sources": [room, other], "targets": [other, None]},
    ]
    for given in twice:
        with pytest.raises(ValueError, match="a state is given twice"):
            states.written(pool, [0, 1], [1, 1], **given)
    with pytest.raises(ValueError, match="different lengths"):
        states.written(pool, [0, 1], [1, 1], targets=[room])
    assert pool.tobytes() == before
