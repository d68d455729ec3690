"""A multi-token head that is trained here: how often it is right, what it gains and what it costs.

    python -m benchmarks.speculation.heads --data book.txt --held-out other.txt [--minutes 5]

A small Qwen3.5 and its head learn from a text together, in one loop of torch: the head from what
the model's final norm gives, without a gradient to the model. Then the model continues parts of a
text that it has not seen, with the head's drafts and without. So small a model computes as long as
it waits for weights: what drafts gain and cost is measured with a model of ``--shape`` and random
weights, whose head is right as often as the trained one, more often, or never. Runs alternate, and
seconds are those of the processor, which other processes do not lengthen.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.process import ROOT, exit_on_sigterm
from benchmarks.report import RESULTS, Figures, Result, command_line, read_result, show_figures
from benchmarks.speculation.__main__ import PADDING, ScriptedRunner, gains, in_turn
from model.architectures.config import Config
from model.checkpoint import Checkpoint, load_checkpoint
from model.export.hybrid import write_qwen35
from model.families.qwen35.config import Qwen35Config, Qwen35MtpConfig
from model.families.qwen35.network import Qwen35, Qwen35Mtp
from model.foreign import MultiTokenHead
from model.native.runtime import Runtime
from model.state import StateLayout
from model.tokenizer import Tokenizer, train_tokenizer
from server.engine.drafts import MAX_STREAMS, DraftCosts, SuffixDrafter
from server.engine.engine import Engine, EngineConfig
from server.engine.model_drafter import HeadDrafter, Reading
from server.engine.request import Live
from server.engine.runner import CpuStatePool, NativeRunner, Runner
from server.engine.types import Request, SamplingParams, TokenEvent
from server.models.backend import Backend, open_backend
from server.models.build import measured_costs

RESULT = RESULTS / "multi_token_head.json"
VOCAB_SIZE = 1024
#: Of a model that learns some minutes on one core.
TRAINED: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "attention_layers": (1,),
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_key_heads": 2,
    "num_value_heads": 2,
    "key_head_dim": 64,
    "value_head_dim": 64,
    "max_context": 4096,
}
#: Models whose weights are larger than caches.
SHAPES: dict[str, Qwen35Config] = {
    "0.1B": Qwen35Config(
        vocab_size=32_768,
        hidden_size=768,
        num_hidden_layers=12,
        intermediate_size=2304,
        attention_layers=(3, 7, 11),
        num_key_heads=8,
        num_value_heads=8,
    ),
    "0.8B": Qwen35Config(vocab_size=248_320, attention_layers=tuple(range(3, 24, 4))),
}
BATCH, LENGTH, RATE, WARMUP_STEPS = 8, 64, 4e-3, 50
#: Rows and drafts that cost nothing: ``number`` are made.
FREE = DraftCosts((1.0,) * 5)
NEVER = DraftCosts((1.0, 2.0, 4.0, 8.0, 16.0))
#: Tokens of a prompt, and of its answer.
PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
#: How often a head is right that learned for longer, and one that learned nothing.
RATES = {"8 of 10 right": 0.8, "never right": 0.0}
SAMPLINGS = {"greedy": {"temperature": 0.0}, "temperature 1": {"temperature": 1.0}}


# What learns


def batches(ids: npt.NDArray[np.int64], seed: int) -> Iterator[Tensor]:
    """Parts of a text, [BATCH, LENGTH + 2] each."""
    draw = np.random.default_rng(seed)
    while True:
        begins = draw.integers(0, len(ids) - LENGTH - 2, BATCH)
        yield torch.from_numpy(np.stack([ids[begin : begin + LENGTH + 2] for begin in begins]))


def losses(model: Qwen35, head: Qwen35Mtp, text: Tensor) -> tuple[Tensor, Tensor]:
    """Nats per token of the model, and of its head for the token after that."""
    hidden = model.hidden_parallel(text[:, :-1])
    first = F.cross_entropy(model.logits(hidden).flatten(0, 1), text[:, 1:].flatten())
    state = tuple(
        {name: torch.zeros(len(text), *spec.shape) for name, spec in layer.items()}
        for layer in head.config.layer_states()
    )
    embedded = F.embedding(text[:, 1:-1], model.embedding.weight.detach())
    position = torch.zeros(len(text), dtype=torch.int64)
    found, _ = head(embedded, hidden[:, :-1].detach(), state, position)
    logits = F.linear(found, model.head_weight.detach())
    return first, F.cross_entropy(logits.flatten(0, 1), text[:, 2:].flatten())


def trained(data: Path, minutes: float) -> tuple[Checkpoint, Figures]:
    """A model and its head after so many minutes."""
    tokenizer = train_tokenizer([data], VOCAB_SIZE)
    ids = np.array(tokenizer.encode(data.read_text(encoding="utf-8")[:4_000_000]), np.int64)
    config = Qwen35Config(vocab_size=VOCAB_SIZE, **TRAINED)
    head_config = replace(Qwen35MtpConfig.of(config), context=LENGTH // 16 * 16 + 32)
    generator = torch.Generator().manual_seed(0)
    model, head = Qwen35(config), Qwen35Mtp(head_config)
    model.init_weights(generator)
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.02, generator=generator)
        else:
            torch.nn.init.ones_(parameter)
        assert name in head_config.weight_shapes(), name
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    begin_s, shown = time.monotonic(), 0.0
    steps = 0
    for steps, text in enumerate(batches(ids, 0)):
        done = (time.monotonic() - begin_s) / (60 * minutes)
        if done >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / WARMUP_STEPS) * (1.0 - 0.9 * done)
        first, second = losses(model, head, text)
        optimizer.zero_grad()
        (first + second).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if done >= shown:
            print(f"step {steps}: {first.item():.3f}, head {second.item():.3f} nats", flush=True)
            shown += 0.1
    figures = {"steps": steps, "nats": first.item(), "head_nats": second.item()}
    drafting = MultiTokenHead(Qwen35MtpConfig.of(config), arrays(head))
    return Checkpoint(config, arrays(model), tokenizer, "trained", head=drafting), figures


def arrays(network: torch.nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Its weights."""
    return {name: t.detach().float().numpy().copy() for name, t in network.state_dict().items()}


# How often it is right


class Counting(HeadDrafter):
    """Always drafts ``number`` tokens, and keeps how many of them come, by their place."""

    def __init__(self, past: SuffixDrafter, head: Runtime, pool: CpuStatePool, number: int) -> None:
        super().__init__(past, head, pool, FREE)
        self.number, self.drafted = number, list[tuple[int, Sequence[int]]]()

    def _drafts(self, reading: Reading, live: Live, number: int) -> list[int]:
        found = super()._drafts(reading, live, min(number, self.number))
        self.drafted.append((live.session.length, found))
        return found


def head_on(backend: Backend) -> tuple[Runtime, CpuStatePool]:
    """The backend's head, and room for its past."""
    assert backend.open_head is not None, "the model has no head"
    head = backend.open_head()
    return head, CpuStatePool(head.layout, MAX_STREAMS)


def written(
    backend: Backend, drafter: HeadDrafter | None, prompt: Sequence[int], sampling: dict[str, Any]
) -> list[int]:
    """What the model answers."""
    names = map(str, itertools.count())
    engine = backend.engine(1, EngineConfig(lambda: next(names), drafter=drafter))
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=1, **sampling)
    engine.submit(Request("r", "me", tuple(prompt), params, start=False), 0.0)
    tokens = []
    while engine.has_work():
        tokens += [event.token_id for event in engine.step(0.0) if isinstance(event, TokenEvent)]
    return tokens


def acceptance(backend: Backend, prompts: Sequence[list[int]], number: int = 4) -> Figures:
    """Of each sampling, how often a draft is right where those before it are, by its place."""
    figures: Figures = {}
    for name, sampling in SAMPLINGS.items():
        right, tried = [0] * number, [0] * number
        for prompt in prompts:
            past = SuffixDrafter(NEVER, backend.tokenizer.token_bytes)
            drafter = Counting(past, *head_on(backend), number)
            tokens = written(backend, drafter, prompt, sampling)
            assert tokens == written(backend, None, prompt, sampling), "the texts differ"
            text = [*prompt, *tokens]
            for length, drafts in drafter.drafted:
                for place, draft in enumerate(drafts):
                    if length + place >= len(text):
                        break
                    tried[place] += 1
                    right[place] += draft == text[length + place]
                    if draft != text[length + place]:
                        break
        rates = [round(r / t, 3) for r, t in zip(right, tried, strict=True) if t]
        figures[name] = {"drafts": sum(tried), "right": rates}
    return figures


# What it gains and costs


class Agreeing(HeadDrafter):
    """Computes as its head does, and says the token of the text so often."""

    text: Sequence[int]
    agreement: float

    def _drafts(self, reading: Reading, live: Live, number: int) -> list[int]:
        found, length = super()._drafts(reading, live, number), live.session.length
        rights = [random.Random(length + i).random() < self.agreement for i in range(len(found))]
        return [
            self.text[length + i] if right else self.text[length + i] ^ 1
            for i, right in enumerate(rights)
        ]


class Timed(NamedTuple):
    """What writes a text, and what it is."""

    backend: Backend
    text: Sequence[int]

    def run(self, drafter: HeadDrafter | None) -> float:
        """Seconds of this process for a token."""
        pool = CpuStatePool(StateLayout.of(self.backend.config), 1)
        runner: Runner = self.backend.make_runner(pool)
        if drafter is not None:
            assert isinstance(runner, NativeRunner), runner
            runner = drafter.watch(runner)
        runner = ScriptedRunner(runner, [*self.text, *PADDING])
        config = EngineConfig(lambda: "session", drafter=drafter)
        engine = Engine(self.backend.config, self.backend.tokenizer, pool, runner, config)
        number = len(self.text) - PROMPT_TOKENS
        params = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
        prompt = tuple(self.text[:PROMPT_TOKENS])
        engine.submit(Request("r", "me", prompt, params, start=False), 0.0)
        engine.step(0.0)
        begin_s = time.process_time()
        while engine.has_work():
            engine.step(0.0)
        return (time.process_time() - begin_s) / number


def random_checkpoint(config: Qwen35Config, tokenizer: Tokenizer) -> Checkpoint:
    """A model of this shape and its head, of weights that mean nothing."""
    head = Qwen35MtpConfig.of(config)
    weights, drafting = random_weights(config), random_weights(head)
    return Checkpoint(config, weights, tokenizer, "random", head=MultiTokenHead(head, drafting))


def random_weights(config: Config) -> dict[str, npt.NDArray[np.float32]]:
    """Small ones; vectors are one."""
    draw, weights = np.random.default_rng(0), {}
    for name, shape in config.weight_shapes().items():
        ones = np.ones(shape, np.float32)
        weights[name] = ones if len(shape) == 1 else draw.standard_normal(shape, np.float32) * 0.02
    return weights


def speed(timed: Timed, rates: dict[str, float], rounds: int) -> Figures:
    """With a head that is right at each of ``rates``, by their names."""
    backend = timed.backend
    pool = CpuStatePool(StateLayout.of(backend.config), 1)
    costs = measured_costs(backend.make_runner(pool), pool, time.process_time)
    head, room = head_on(backend)
    draft_s = measured_costs(NativeRunner(head, room), room, time.process_time).times_s[0]
    figures: Figures = {
        "call_ms": [round(1e3 * seconds, 3) for seconds in costs.times_s],
        "draft_ms": round(1e3 * draft_s, 3),
    }
    for name, rate in rates.items():
        past = SuffixDrafter(NEVER, backend.tokenizer.token_bytes)

        def drafted(past: SuffixDrafter = past, rate: float = rate) -> float:
            drafter = Agreeing(past, head, room, costs.with_drafts_of(draft_s))
            drafter._slots = list(range(MAX_STREAMS))  # the room is the last drafter's, which ended
            drafter.text, drafter.agreement = [*timed.text, *PADDING], rate
            return timed.run(drafter)

        made = [
            in_turn(lambda: timed.run(None), drafted, number % 2 == 1) for number in range(rounds)
        ]
        figures[name] = {"right": rate, **gains(made)}
    return figures


def main() -> None:
    """Trains, measures, and writes the figures."""
    exit_on_sigterm()
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--data", type=Path, required=True, help="a text to learn from")
    parser.add_argument("--held-out", type=Path, required=True, help="a text to continue")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--shape", choices=SHAPES, default="0.1B")
    parser.add_argument("--dtype", choices=["bfloat16", "int8"], default="int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "multi-token-head")
    options = parser.parse_args()
    result, folder = Result("speculation.heads", options.output), options.folder
    torch.set_num_threads(options.threads)
    known: Figures = read_result(options.output) if options.output.exists() else {}
    if not (folder / "config.json").exists():
        checkpoint, known["training"] = trained(options.data, options.minutes)
        write_qwen35(folder, checkpoint, "float32")
    checkpoint = load_checkpoint(folder)
    backend = open_backend(checkpoint, "native", "float32", options.threads)
    held_out = options.held_out.read_text(encoding="utf-8")[:400_000]
    ids = checkpoint.tokenizer.encode(held_out)
    begins = np.linspace(0, len(ids) - PROMPT_TOKENS, options.prompts).astype(int)
    known["acceptance"] = acceptance(backend, [list(ids[b : b + PROMPT_TOKENS]) for b in begins])
    show_figures("how often a draft is right", known["acceptance"])
    rates = {name: found["right"][0] for name, found in known["acceptance"].items()}
    large = random_checkpoint(SHAPES[options.shape], checkpoint.tokenizer)
    timed = Timed(
        open_backend(large, "native", options.dtype, options.threads),
        list(ids[: PROMPT_TOKENS + options.tokens]),
    )
    name = f"{options.shape} {options.dtype}"
    figures = speed(timed, {**rates, **RATES}, options.rounds)
    show_figures(name, figures)
    speeds = {**known.get("speeds", {}), name: figures}
    kept = {"training": known.get("training"), "acceptance": known["acceptance"]}
    result.finish({**kept, "threads": options.threads, "speeds": speeds})


if __name__ == "__main__":
    main()
