"""Speed with drafts and without: texts of the bundled model, at the cost of a large one.

    python -m benchmarks.speculation [--shape 0.4B|0.1B|1.5B|S2 | --model PATH] [--dtype int8]

The two are joined in the runner: each call computes all that a model of this shape computes, with
random weights, and then the tokens that it draws are replaced by those of a given text. So a draft
is accepted where it is right in that text, and all costs are real: rows, states kept, tokens fed
again, masks of grammars, the engine. Milliseconds per token are counted from the first token on,
and measured with and without drafts in turn, each first as often as the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from benchmarks.checkpoints import shapes
from benchmarks.decode.models import config_of, random_weights
from benchmarks.decode.shapes import SIZES
from benchmarks.process import ROOT, exit_on_sigterm
from benchmarks.report import RESULTS, Figures, Result, command_line, read_result, show_figures
from benchmarks.speculation.texts import Text, texts
from model.bundled_models import DEFAULT_MODEL
from model.checkpoint import Checkpoint, load_checkpoint
from model.state import StateLayout
from server.api.schemas.requests import JsonSchema, JsonSchemaFormat
from server.constraints.compiler import FormatCompiler
from server.engine.drafts import Drafter, SuffixDrafter
from server.engine.engine import Engine, EngineConfig
from server.engine.model_drafter import ModelDrafter
from server.engine.runner import CpuStatePool, Draw, Feed, RowOutput, Runner, TokenScore
from server.engine.types import Finished, Request, SamplingParams, TokenEvent, Usage
from server.models.backend import Backend, open_backend
from server.models.build import measured_costs, open_drafter

RESULT = RESULTS / "speculation.json"
MANY = 64
#: Behind a text, for drafts that reach beyond its end.
PADDING = [0] * 64


class ScriptedRunner:
    """Computes as ``runner`` does, and says the tokens of ``text`` in its place."""

    def __init__(self, runner: Runner, text: Sequence[int]) -> None:
        self._runner, self._text, self.grid = runner, text, runner.grid

    def prepare(self, params: SamplingParams) -> Draw:
        return self._runner.prepare(params)

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        outputs = self._runner.run(feeds)
        return [
            (self._said(feed) if output[0] else (), *output[1:])
            for feed, output in zip(feeds, outputs, strict=True)
        ]

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        return self._runner.score(feed, following, num_top)

    def embed(self, feed: Feed) -> npt.NDArray[Any]:
        return self._runner.embed(feed)

    def _said(self, feed: Feed) -> Sequence[int]:
        end = feed.position + len(feed.tokens)
        return self._text[end - feed.num_draws + 1 : end + 1]


class AgreeingRunner(ScriptedRunner):
    """Says the token of the text at ``agreement`` of its places, another one at the others."""

    def __init__(self, runner: Runner, text: Sequence[int], agreement: float) -> None:
        super().__init__(runner, text)
        draw = random.Random(0)
        self._text = [token if draw.random() < agreement else 1 - min(token, 1) for token in text]


class Bench:
    """Engines over one model that write given texts."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._compiler = FormatCompiler(backend.tokenizer)
        self._names = map(str, itertools.count())

    def run(self, text: Text, drafter: Drafter | None, num_streams: int = 1) -> tuple[float, Usage]:
        """Seconds per step or token from the first token on, and what was drafted."""
        script = [*text.prompt, *text.answer, *PADDING]
        pool = CpuStatePool(StateLayout.of(self._backend.config), num_streams)
        runner = ScriptedRunner(self._backend.make_runner(pool), script)
        config = EngineConfig(
            lambda: next(self._names), matchers=self._compiler.matcher, drafter=drafter
        )
        engine = Engine(self._backend.config, self._backend.tokenizer, pool, runner, config)
        grammar = None if text.schema is None else asyncio.run(self._grammar(text.schema))
        # A text under a grammar is cut here: near its last token only what ends it may come.
        room = 0 if grammar is None else 1 << 20
        params = SamplingParams(
            temperature=0.0, max_tokens=len(text.answer) + room, ignore_eos=True, grammar=grammar
        )
        ids = [f"r{number}" for number in range(num_streams)]
        for id in ids:
            engine.submit(Request(id, "me", tuple(text.prompt), params, start=False), 0.0)
        wanted, counts, start, end = len(text.answer), dict.fromkeys(ids, 0), 0.0, 0.0
        last: Usage | None = None
        done = ""
        while engine.has_work():
            for event in engine.step(0.0):
                if isinstance(event, TokenEvent):
                    counts[event.request_id] += 1
                    if event.request_id == ids[-1] and counts[ids[-1]] == 1:
                        start = time.perf_counter()
                        first = counts[ids[0]]
                    if counts[event.request_id] == wanted and not end:
                        end, most = time.perf_counter(), counts[ids[0]]
                        done = event.request_id
                        for id in ids:
                            engine.cancel(id)
                elif isinstance(event, Finished) and event.request_id == done:
                    last = event.usage
        assert last is not None and end > start > 0
        return (end - start) / (most - first), last

    async def _grammar(self, schema: dict[str, Any]) -> str | None:
        wanted = JsonSchema(name="list", schema=schema)
        try:
            return await self._compiler.grammar(
                JsonSchemaFormat(type="json_schema", json_schema=wanted)
            )
        finally:
            await self._compiler.close()


def checkpoint_of(folder: Path, shape: str, model: Path | None) -> Checkpoint:
    """The ``model``, or one of this shape with random weights, and a tokenizer."""
    if model is not None:
        return load_checkpoint(str(model))
    if shape in shapes.CONFIGS:
        return load_checkpoint(str(shapes.checkpoint(folder, shape)))
    config = config_of(SIZES[shape], "gated")
    tokenizer = load_checkpoint(DEFAULT_MODEL).tokenizer
    return Checkpoint(config, random_weights(config), tokenizer, shape)


def with_model(past: SuffixDrafter, draft: Backend, which: Text, agreement: float) -> ModelDrafter:
    """Drafts of a small model that agrees so often, where ``past`` has none."""
    pool = CpuStatePool(StateLayout.of(draft.config), past.max_streams)
    draft_s = measured_costs(draft.make_runner(pool), pool).times_s[0]
    script = [*which.prompt, *which.answer, *PADDING]
    runner = AgreeingRunner(draft.make_runner(pool), script, agreement)
    return ModelDrafter(past, runner, pool, past.costs.with_drafts_of(draft_s))


def measure(bench: Bench, options: argparse.Namespace, drafter: Drafter, which: Text) -> Figures:
    """One text without and with drafts."""
    usage = Usage(0, 0)

    def plain() -> float:
        return bench.run(which, None, options.streams)[0]

    def drafted() -> float:
        nonlocal usage
        seconds, usage = bench.run(which, drafter, options.streams)
        return seconds

    rounds = [in_turn(plain, drafted, number % 2 == 1) for number in range(options.rounds)]
    return {
        "tokens": len(which.answer),
        **gains(rounds),
        "accepted": usage.accepted_tokens,
        "rejected": usage.rejected_tokens,
    }


class Round(NamedTuple):
    """Seconds of two runs without drafts and of two with them."""

    plain: tuple[float, float]
    drafted: tuple[float, float]


def in_turn(plain: Callable[[], float], drafted: Callable[[], float], is_odd: bool) -> Round:
    """Each kind is first and last as often as the other: ABBA, then BAAB in the next round.

    What becomes slower or faster all the time does so for both.
    """
    outer, inner = (drafted, plain) if is_odd else (plain, drafted)
    first, second, third, fourth = outer(), inner(), inner(), outer()
    ends, middle = (first, fourth), (second, third)
    return Round(middle, ends) if is_odd else Round(ends, middle)


def gains(rounds: Sequence[Round]) -> Figures:
    """Medians, and how far single rounds are apart; ``equal_runs`` are of one kind, of a round."""
    speedups = sorted(sum(each.plain) / sum(each.drafted) for each in rounds)
    equal = [max(pair) / min(pair) for each in rounds for pair in each]
    return {
        "plain_ms": round(1e3 * statistics.median(s for each in rounds for s in each.plain), 3),
        "drafted_ms": round(1e3 * statistics.median(s for each in rounds for s in each.drafted), 3),
        "speedup": round(statistics.median(speedups), 3),
        "speedups": [round(speedup, 3) for speedup in speedups],
        "equal_runs": round(statistics.median(equal), 3),
    }


def main() -> None:
    """Measures the texts, and adds the figures to those of other shapes in the file."""
    exit_on_sigterm()
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--shape", choices=[*shapes.CONFIGS, *SIZES], default="0.4B")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of a shape")
    parser.add_argument("--draft-shape", choices=shapes.CONFIGS, help="a model of it drafts, too")
    parser.add_argument("--agreement", type=float, default=0.7, help="how often that is right")
    parser.add_argument("--dtype", choices=["bfloat16", "int8"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--streams", type=int, default=1, help=f"{MANY}: only the plain text")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "models")
    options = parser.parse_args()
    result = Result("speculation", options.output)
    checkpoint = checkpoint_of(options.folder, options.shape, options.model)
    backend = open_backend(checkpoint, "native", options.dtype, options.threads)
    drafter, bench = open_drafter(backend), Bench(backend)
    assert isinstance(drafter, SuffixDrafter), "no drafts pay for this shape on this machine"
    costs = drafter.costs
    figures: Figures = {
        "rows": list(costs.rows),
        "call_ms": [round(1e3 * seconds, 3) for seconds in costs.times_s],
        "keep_ms": round(1e3 * costs.keep_s, 3),
    }
    draft = None
    if options.draft_shape is not None:
        small = checkpoint_of(options.folder, options.draft_shape, None)
        draft = open_backend(small, "native", options.dtype, options.threads)
    for text in texts(backend.tokenizer, options.tokens):
        if draft is not None and text.name == "plain text":
            both = with_model(drafter, draft, text, options.agreement)
            figures[text.name] = measure(bench, options, both, text)
        elif draft is None and (options.streams == 1 or text.name == "plain text"):
            figures[text.name] = measure(bench, options, drafter, text)
    shape = options.shape if options.model is None else options.model.name
    name = f"{shape} {options.dtype}, {options.streams} streams"
    if draft is not None:
        name += f", {options.draft_shape} drafts and is right {options.agreement:.0%} of the time"
    known = read_result(options.output)["shapes"] if options.output.exists() else {}
    show_figures(name, figures)
    result.finish({"threads": options.threads, "shapes": {**known, name: figures}})


if __name__ == "__main__":
    main()
