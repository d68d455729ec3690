from __future__ import annotations

import numpy as np
import pytest
import torch

from model.state import StateLayout
from server.engine.runner import NOT_FINITE, CpuStatePool, Feed
from server.engine.torch_runner import Draw, TorchRunner, sample
from server.engine.types import SamplingParams
from tests.server.engine.runners import drawn
from tests.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def pool() -> CpuStatePool:
    return CpuStatePool(StateLayout.of(tiny_checkpoint().config), 6)


@pytest.fixture
def runner(pool: CpuStatePool) -> TorchRunner:
    return TorchRunner(tiny_checkpoint().model, pool, tiny_checkpoint().config.vocab_size)


def likeliest(tokens: list[int]) -> int:
    logits = tiny_checkpoint().model.parallel(torch.tensor([tokens]))
    return int(logits[0, -1].argmax())


def test_rows_of_all_lengths_share_a_step(runner: TorchRunner) -> None:
    texts = [[7] * 16, [5], [9] * 64, [6], list(range(64))]
    feeds = [Feed(slot, 0, text, GREEDY) for slot, text in enumerate(texts)]
    assert drawn(runner, feeds) == [likeliest(text) for text in texts]
    texts = [[*text, 3] for text in texts]
    feeds = [Feed(slot, len(text) - 1, (3,), GREEDY) for slot, text in enumerate(texts)]
    assert drawn(runner, feeds) == [likeliest(text) for text in texts]


def test_row_without_a_draw_gets_no_token(runner: TorchRunner) -> None:
    feeds = [Feed(0, 0, (5,)), Feed(1, 0, (5,), GREEDY), Feed(2, 0, [7] * 16)]
    assert drawn(runner, feeds) == [-1, likeliest([5]), -1]
    assert drawn(runner, feeds[:1]) == [-1]


def test_non_finite_row_is_reported_alone(runner: TorchRunner, pool: CpuStatePool) -> None:
    pool.blocks[1].view(np.float32).fill(float("nan"))
    feeds = [Feed(slot, 0, (5,), GREEDY) for slot in range(3)]
    assert drawn(runner, feeds) == [likeliest([5]), NOT_FINITE, likeliest([5])]


@pytest.mark.parametrize("slots", [[2], [0, 1, 2], [4, 1]])
def test_only_the_fed_slots_change(
    runner: TorchRunner, pool: CpuStatePool, slots: list[int]
) -> None:
    before = pool.blocks.copy()
    runner.run([Feed(slot, 0, (5 + slot,)) for slot in slots])
    changed = {slot for slot in range(6) if (pool.blocks[slot] != before[slot]).any()}
    assert changed == set(slots)


@pytest.mark.parametrize("length", [1, 16])
def test_draw_is_at_the_position_after_the_tokens(runner: TorchRunner, length: int) -> None:
    tokens = [7] * length
    logits = tiny_checkpoint().model.parallel(torch.tensor([tokens]))[:, -1]
    params = [SamplingParams(seed=seed, temperature=2.0) for seed in range(6)]
    wanted = [sample(logits, [Draw(each, length, ())])[0] for each in params]
    feeds = [Feed(slot, 0, tokens, runner.prepare(each)) for slot, each in enumerate(params)]
    assert drawn(runner, feeds) == wanted
    assert len(set(wanted)) > 1


def test_recent_tokens_are_penalised(runner: TorchRunner) -> None:
    draw = runner.prepare(SamplingParams(temperature=0.0, presence_penalty=2.0))
    (free,) = drawn(runner, [Feed(0, 0, (5,), draw, (5,))])
    (held,) = drawn(runner, [Feed(1, 0, (5,), draw, (5, free))])
    assert free == likeliest([5]) != held
