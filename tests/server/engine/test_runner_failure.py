"""Both runners: a run that raises has changed no state, so that its rows can be run again."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from model.architectures.network import ModelState
from model.attention import MECHANISMS, spec_of
from model.lm import LanguageModel
from server.engine.runner import CpuStatePool, Feed, Runner
from server.engine.torch_runner import TorchRunner
from server.engine.types import SamplingParams
from tests.requirements import needs_native
from tests.server.engine.runners import BACKENDS, drawn, make_pool, make_runner
from tests.tiny import tiny_checkpoint

NAMES = [name for name in MECHANISMS if spec_of(name).constant_state]
#: Several parts of a step on torch: two sizes of chunks, and single tokens.
SIZES = (64, 1, 16, 1, 64, 1)
#: What a model of `Fragile` cannot read.
POISON = 299

#: What is raised is the runner's affair.
Refused = (ValueError, IndexError, KeyError, TypeError, AssertionError)


def fill(runner: Runner, pool: CpuStatePool) -> None:
    """Each slot gets the state of another text of one token."""
    pool.blocks.fill(0)
    runner.run([Feed(slot, 0, (slot,)) for slot in range(len(SIZES))])


@cache
def shared(backend: str) -> tuple[Runner, CpuStatePool]:
    """Since torch's takes a while to make; its slots are to be filled."""
    pool = make_pool(num_slots=len(SIZES))
    return make_runner(backend, pool), pool


def sound_rows(runner: Runner) -> list[Feed]:
    """One for each slot, at position 1."""
    texts = [tuple((3 * slot + i) % 290 for i in range(size)) for slot, size in enumerate(SIZES)]
    draw = runner.prepare(SamplingParams(temperature=1.5, seed=3))
    return [Feed(slot, 1, text, draw) for slot, text in enumerate(texts)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": (300,)},
        {"tokens": (-1,)},
        {"tokens": (2**40,)},
        {"tokens": (*range(15), 300)},
        {"tokens": (*range(63), -1)},
        {"tokens": ()},
        {"tokens": ("x",)},
        {"slot": 6},
        {"slot": -1},
        {"slot": 4},
        {"slot": None},
        {"draw": "x"},
        {"draw": 0.5},
    ],
)
@pytest.mark.parametrize("place", [0, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_row_changes_no_state(backend: str, place: int, wrong: dict[str, Any]) -> None:
    runner, pool = shared(backend)
    fill(runner, pool)
    before, rows = pool.blocks.copy(), sound_rows(runner)
    bad = rows[place]._replace(**wrong)
    with pytest.raises(Refused):
        runner.run([*rows[:place], bad, *rows[place + 1 :]])
    assert pool.blocks.tobytes() == before.tobytes()
    if wrong != {"slot": 4}:
        with pytest.raises(Refused):
            runner.run([bad])
        assert pool.blocks.tobytes() == before.tobytes()
    one_by_one = [drawn(runner, [row])[0] for row in rows]
    after = pool.blocks.copy()
    pool.blocks[:] = before
    assert drawn(runner, rows) == one_by_one
    assert pool.blocks.tobytes() == after.tobytes() != before.tobytes()


class Fragile(LanguageModel):
    """Raises ``error``, once there is one, for a batch that has `POISON` in it."""

    error: Exception | None = None

    def step(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        result = super().step(tokens, state, position)
        self._break(tokens)
        return result

    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Any = None
    ) -> tuple[Tensor, ModelState]:
        result = super().hidden_chunk(tokens, state, position, losses)
        self._break(tokens)
        return result

    def _break(self, tokens: Tensor) -> None:
        if self.error is not None and (tokens == POISON).any():
            raise self.error


def fragile(name: str) -> Fragile:
    checkpoint = tiny_checkpoint(name)
    model = Fragile(checkpoint.config)
    weights = {name: torch.from_numpy(each) for name, each in checkpoint.weights.items()}
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", NAMES)
def test_model_that_fails_in_one_batch_changes_no_state(name: str) -> None:
    """Single tokens come last: then all chunks of the call were computed before."""
    pool, model = make_pool(name, len(SIZES)), fragile(name)
    runner = TorchRunner(model, pool, POISON + 1)
    fill(runner, pool)
    before, rows = pool.blocks.copy(), sound_rows(runner)
    for place in (0, 1, 2):
        bad = rows[place]._replace(tokens=(*rows[place].tokens[1:], POISON))
        for error in (RuntimeError("broken"), MemoryError()):
            model.error = error
            with pytest.raises(type(error)):
                runner.run([*rows[:place], bad, *rows[place + 1 :]])
            with pytest.raises(type(error)):
                runner.score(bad, 7)
            assert pool.blocks.tobytes() == before.tobytes()
    runner.run(rows)
    assert (pool.blocks != before).any(axis=1).all()


#: Far less than a step of so many tokens needs, but enough for a short one.
WITHOUT_ROOM = """
import resource
from model.bundled_models import DEFAULT_MODEL as folder
from model.config import ModelConfig
from model.native.runtime import Runtime
from model.checkpoint_files import read_weights

runtime = Runtime(ModelConfig.load(folder / "config.json"), read_weights(folder))
pool, draw = runtime.empty_pool(2), runtime.draw(temperature=0.0)
runtime.run(pool, [0], [0], [[1, 2, 3]], [draw])
before, long = pool.copy(), [5] * 400_000
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), hard))
try:
    runtime.run(pool, [0, 1], [3, 0], [[4], long], [draw, draw])
except MemoryError:
    assert (pool == before).all()
    runtime.run(pool, [0], [3], [[4]], [draw])
    assert (pool != before).any()
    print("refused")
"""


@pytest.mark.process
@needs_native
def test_native_run_without_room_changes_no_state() -> None:
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, check=False
    )
    assert (child.stdout, child.returncode) == ("refused\n", 0), child.stderr
