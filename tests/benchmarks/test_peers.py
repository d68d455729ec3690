"""The run of all peers: engines that batch, processes that die, the points, the environments."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from benchmarks.decode.peers import PREFILL_TOKENS, Measured, Opened, Point, Unavailable
from benchmarks.decode.report import measure
from benchmarks.decode.roofline import Cost, Rates
from benchmarks.decode.worker import Worker
from benchmarks.peers.__main__ import MODELS, ORIGINAL, OURS, Restarted, arguments, points
from benchmarks.peers.batching import FIRST_TOKENS, ROOM, WARM_UP_STEPS, Batching, Subject
from benchmarks.peers.environments import PEERS, python_of
from model.families.llama.config import LlamaConfig

DECODE = Point("tiny", "float32", 3, 0, 1)
CONFIG = LlamaConfig(
    vocab_size=200,
    hidden_size=8,
    num_hidden_layers=1,
    intermediate_size=8,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
)
TINY = Subject(
    lambda size: CONFIG, lambda folder, size, dtype: folder, lambda file, point: Cost(1, 1)
)


class Engine(Batching):
    """An engine that reads ``speed`` tokens of a prompt in a step."""

    def __init__(self, speed: int = 128) -> None:
        super().__init__(Path(), TINY)
        self._speed = speed
        self.loads = 0
        self.unread: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.prompts: list[list[int]] = []

    def load(self, point: Point) -> None:
        self.loads += 1

    def submit(self, name: int, ids: list[int], max_tokens: int) -> None:
        self.unread[name], self.left[name] = len(ids), max_tokens
        self.prompts.append(ids)

    def step(self) -> int:
        made = 0
        for name in list(self.left):
            self.unread[name] -= self._speed
            if self.unread[name] <= 0:
                made += 1
                self.left[name] -= 1
                if not self.left[name]:
                    del self.left[name]
        return made

    def cancel(self) -> None:
        self.left.clear()

    def variant(self) -> str:
        return "in a test"


class Dying:
    """A contender whose process ends while it is measured."""

    def __init__(self, models: Path) -> None:
        pass

    def open(self, point: Point) -> Opened:
        if point.context:
            raise ValueError("no past of 4,096")
        return Opened("", 1, 1, Cost(1, 1))

    def run(self, seconds: float) -> Measured:
        os._exit(3)


class Steady(Dying):
    """A contender that makes a token a second."""

    def run(self, seconds: float) -> Measured:
        return Measured(1, 1.0)


def _worker(kind: type[Dying]) -> Restarted:
    return Restarted(partial(Worker, f"{__name__}:{kind.__name__}", Path(), 1))


def test_streams_with_a_past_begin_alike_and_each_makes_a_token_in_a_step() -> None:
    engine = Engine()
    opened = engine.open(Point("tiny", "float32", 3, 1000, 1))
    assert opened.step_tokens == 3
    assert len(engine.prompts) == 3
    assert {tuple(prompt) for prompt in engine.prompts} == {tuple(engine.prompts[0])}
    assert len(engine.prompts[0]) == 1000
    assert engine.run(0.0).tokens == 3


def test_requests_are_sent_again_before_they_end() -> None:
    engine = Engine()
    engine.open(DECODE)
    for _ in range(ROOM - WARM_UP_STEPS):
        assert engine.run(0.0).tokens == 3
    assert len(engine.prompts) == 3
    assert engine.run(0.0).tokens == 3
    assert len(engine.prompts) == 6
    assert len(engine.prompts[0]) == FIRST_TOKENS


def test_prompts_differ_and_count_whole() -> None:
    engine = Engine()
    engine.open(Point("tiny", "float32", 1, 0, 1, "prefill"))
    assert engine.run(0.0).tokens == PREFILL_TOKENS
    first, second = engine.prompts
    assert len(first) == len(second) == PREFILL_TOKENS
    assert first != second


def test_engine_is_loaded_again_for_other_weights_alone() -> None:
    engine = Engine()
    for point in (DECODE, Point("tiny", "float32", 1, 0, 1), Point("tiny", "int8", 1, 0, 1)):
        engine.open(point)
    assert engine.loads == 2


def test_peer_that_dies_is_left_out_and_the_others_are_measured() -> None:
    with _worker(Dying) as dying, _worker(Steady) as steady:
        workers = {"dying": dying, "steady": steady}
        row = measure(Point("tiny", "float32", 1, 0, 1), workers, Rates(), 2, 0.0)
        assert list(row.turns) == ["steady"]
        assert row.turns["steady"].rates == [1.0, 1.0]
        assert "it died" in row.skipped["dying"]
        later = Point("tiny", "float32", 1, 4096, 1)
        with pytest.raises(Unavailable, match="ValueError: no past of 4,096"):
            dying.open(later)  # in a process of its own again


def test_chat_model_runs_next_to_its_original_and_four_peers_at_three_contexts() -> None:
    options = arguments(["--environments", "x"])
    found = list(points(MODELS["smollm2"], options))
    assert {point.context for point in found} == {0, 4096, 32768}
    assert {point.streams for point in found} == {1, 8, 64}
    assert set(MODELS["smollm2"].contenders) == {OURS, ORIGINAL, *PEERS}


def test_peer_that_is_not_installed_has_no_interpreter(tmp_path: Path) -> None:
    assert python_of(tmp_path, "vLLM") is None
    (tmp_path / "vLLM" / "bin").mkdir(parents=True)
    (tmp_path / "vLLM" / "bin" / "python").touch()
    assert python_of(tmp_path, "vLLM") == tmp_path / "vLLM" / "bin" / "python"


def test_past_that_takes_too_long_is_not_tried_again() -> None:
    engine = Engine(speed=1)
    engine.max_fill_s = 0.0
    for streams in (1, 2):
        with pytest.raises(Unavailable, match="to prefill 4,096 takes over"):
            engine.open(Point("tiny", "float32", streams, 4096, 1))
    assert len(engine.prompts) == 1
