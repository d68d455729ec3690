from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model.config import ModelConfig
from model.state import Field, StateLayout
from model.tensor_spec import TensorSpec
from server.engine.runner import CpuStatePool, Feed, NativeRunner
from tests.requirements import needs_native
from tests.tiny import tiny_checkpoint, tiny_runtime

LAYOUT = StateLayout.of(tiny_checkpoint().config)


def test_capacity_is_exact() -> None:
    pool = CpuStatePool(LAYOUT, 3)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    assert pool.allocate() is None
    pool.free(1)
    assert pool.allocate() == 1


def test_allocated_slot_is_zeroed() -> None:
    pool = CpuStatePool(LAYOUT, 1)
    pool.blocks[0].fill(255)
    slot = pool.allocate()
    assert slot == 0
    assert not pool.blocks[0].any()


def test_memory_is_taken_when_it_is_first_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pool = CpuStatePool(StateLayout.of(ModelConfig(vocab_size=10)), 4096)
    assert pool.blocks.nbytes > 1 << 30
    pool.allocate()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults * mmap.PAGESIZE < 1 << 24


def test_blocks_start_at_a_page() -> None:
    assert CpuStatePool(LAYOUT, 2).blocks.ctypes.data % mmap.PAGESIZE == 0


def test_freeing_twice_is_a_broken_invariant() -> None:
    pool = CpuStatePool(LAYOUT, 2)
    slot = pool.allocate()
    assert slot is not None
    pool.free(slot)
    with pytest.raises(AssertionError):
        pool.free(slot)


class Pool(RuleBasedStateMachine):
    """Any order of allocating, freeing and drafts: a slot has one owner, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = CpuStatePool(LAYOUT, 4)
        self.held: dict[int, int] = {}
        self.count = 0

    @rule()
    def allocate(self) -> None:
        slot = self.pool.allocate()
        assert (slot is None) == (len(self.held) == 4)
        if slot is not None:
            assert slot not in self.held
            assert not self.pool.fixed(slot).any()
            self.mark(slot, slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(slot)
        del self.held[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        """A row for each of some slots, of which some take the state after it."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))
        spares = self.pool.spares([(slot, 0, 1) for slot in rows])
        assert len({*spares, *range(4)}) == len(spares) + 4
        for slot, spare in zip(rows, spares, strict=True):
            if data.draw(st.booleans()):
                self.mark(slot, spare)
                self.pool.swap(slot, spare)
            else:
                self.pool.fixed(spare).fill(255)
                self.pool.restore(slot)

    def mark(self, slot: int, target: int) -> None:
        """Fills ``target`` with what only ``slot`` has."""
        self.count += 1
        self.held[slot] = self.count
        self.pool.fixed(target).view(np.float32).fill(self.count)

    @invariant()
    def free_and_held_are_all(self) -> None:
        assert len(self.pool._free) + self.pool.num_held == self.pool.num_slots
        assert self.pool.num_held == len(self.held)

    @invariant()
    def nobody_touches_anothers_bytes(self) -> None:
        for slot, mark in self.held.items():
            assert (self.pool.fixed(slot).view(np.float32) == mark).all()


Pool.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_pool_machine = Pool.TestCase


def test_swap_gives_a_slot_what_its_spare_holds() -> None:
    """Whatever is done with the slot then, and with others; the spare holds what the slot had."""
    pool = CpuStatePool(LAYOUT, 3)
    for slot in range(3):
        pool.blocks[slot] = slot + 1
    spares = pool.spares([(0, 5, 1), (2, 6, 1)])
    assert len({*spares, 0, 1, 2}) == 5
    for spare in spares:
        pool.fixed(spare)[:] = 10 + spare
    pool.swap(0, spares[0])
    assert marks(pool) == [10 + spares[0], 2, 3]
    assert (pool.fixed(spares[0]) == 1).all()
    pool.copy(0, 1, 6)
    state = pool.read(0, 6)
    pool.zero(0)
    pool.write(2, state)
    assert marks(pool) == [0, 10 + spares[0], 10 + spares[0]]
    (again,) = pool.spares([(0, 6, 1)])
    pool.fixed(again)[:] = 9
    pool.swap(0, again)
    pool.swap(0, again)
    assert marks(pool) == [0, 10 + spares[0], 10 + spares[0]]


def marks(pool: CpuStatePool) -> list[int]:
    """What each slot is filled with."""
    blocks = [np.frombuffer(pool.read(slot, 0).data, np.uint8) for slot in range(pool.num_slots)]
    assert all((block == block[0]).all() for block in blocks)
    return [int(block[0]) for block in blocks]


def test_spare_has_what_lies_between_the_tensors() -> None:
    """No kernel copies it, and it is a part of what a store keeps."""
    fields = Field(0, "a", TensorSpec((3,)), 0), Field(0, "b", TensorSpec((20,)), 64)
    pool = CpuStatePool(StateLayout(fields, 1, 192, 192), 1)
    pool.blocks[0] = 7
    (spare,) = pool.spares([(0, 0, 1)])
    gaps = [*range(12, 64), *range(144, 192)]
    assert np.flatnonzero(pool.fixed(spare)).tolist() == gaps


@needs_native
@pytest.mark.parametrize("attention", ["gated", "qwen35", "qwen35-short", "qwen35-slide"])
@pytest.mark.parametrize("accepts", [False, True])
def test_state_of_a_text_is_that_before_or_after(attention: str, accepts: bool) -> None:
    """Wherever the text is: within a group of a past, at its end, and where old places go."""
    runtime, tokens = tiny_runtime(attention), [5, 6, 7, 8, 9]
    layout = runtime.layout
    longest = 64 - len(tokens) if attention == "qwen35-short" else 200
    pool, plain = CpuStatePool(layout, 1), CpuStatePool(layout, 1)
    runners = NativeRunner(runtime, pool), NativeRunner(runtime, plain)
    position = 0
    while position < longest:
        (spare,) = pool.spares([(0, position, len(tokens))])
        runners[0].run([Feed(0, position, tokens, target=spare)])
        if accepts:
            runners[1].run([Feed(0, position, tokens)])
            pool.swap(0, spare)
            position += len(tokens)
        else:
            pool.restore(0)
        assert pool.read(0, position).data == plain.read(0, position).data
        assert pool.blocks[0, layout.fixed_bytes :].tobytes() == (
            plain.blocks[0, layout.fixed_bytes :].tobytes()
        )
        for runner in runners:
            runner.run([Feed(0, position, [3, 4, position % 50])])
        position += 3
    assert accepts is (0 in pool.moved)


def test_copy_and_what_was_read_are_independent_of_the_slot() -> None:
    pool = CpuStatePool(LAYOUT, 2)
    pool.blocks[0] = 7
    pool.copy(0, 1, 0)
    block = pool.read(0, 0)
    pool.zero(0)
    assert not pool.blocks[0].any()
    assert (pool.blocks[1] == 7).all()
    pool.write(0, block)
    assert pool.blocks[0].tobytes() == bytes(block.data) == pool.blocks[1].tobytes()
