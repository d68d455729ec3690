from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model.config import ModelConfig
from model.state import StateLayout
from server.engine.cpu_state_pool import CpuStatePool
from tests.server.engine.conftest import needs_native
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
    """Any order of allocating and freeing: a slot has one owner, and nothing is lost."""

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
            assert not self.pool.blocks[slot].any()
            self.count += 1
            self.held[slot] = self.count
            self.pool.blocks[slot].view(np.float32).fill(self.count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(slot)
        del self.held[slot]

    @invariant()
    def free_and_held_are_all(self) -> None:
        assert len(self.pool._free) + self.pool.num_held == self.pool.num_slots
        assert self.pool.num_held == len(self.held)

    @invariant()
    def nobody_touches_anothers_bytes(self) -> None:
        for slot, mark in self.held.items():
            assert (self.pool.blocks[slot].view(np.float32) == mark).all()


Pool.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_pool_machine = Pool.TestCase


def test_restored_slot_is_what_it_was_at_the_checkpoint() -> None:
    """The checkpoint of the last call alone; slots that are not restored keep what they have."""
    pool = CpuStatePool(LAYOUT, 3)
    for marks in ((1, 2), (3, 4, 5), (6,)):
        for slot, mark in enumerate(marks):
            pool.blocks[slot] = mark
        pool.checkpoint([(slot, 0, 1) for slot in range(len(marks))])
        pool.blocks[:] = 9
        pool.restore(0)
        assert [int(block[0]) for block in pool.blocks] == [marks[0], 9, 9]
    with pytest.raises(KeyError):
        pool.restore(1)


@needs_native
@pytest.mark.parametrize("attention", ["gated", "qwen35", "qwen35-short", "qwen35-slide"])
def test_restored_state_of_a_text_is_that_before(attention: str) -> None:
    """Wherever the text is: within a group of a past, at its end, and where old places go."""
    runtime, tokens = tiny_runtime(attention), [5, 6, 7, 8, 9]
    layout = runtime.layout
    longest = 64 - len(tokens) if attention == "qwen35-short" else 200
    pool = CpuStatePool(layout, 1)
    for position in range(0, longest, 3):
        pool.checkpoint([(0, position, len(tokens))])
        before = pool.blocks[0].tobytes()
        runtime.run(pool.blocks, [0], [position], [tokens], [None])
        assert pool.blocks[0].tobytes() != before
        pool.restore(0)
        assert pool.blocks[0].tobytes() == before
        runtime.run(pool.blocks, [0], [position], [[3, 4, position % 50]], [None])


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
