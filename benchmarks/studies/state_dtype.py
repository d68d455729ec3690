"""What sums of states in bfloat16 cost: bits per byte, drift and recall, next to float32.

For each mechanism and family two small models are trained: one of the bytes of a text, and one of
associative recall, as in `mechanisms.recall` with a value behind its key and plain tokens. The
native runtime then runs each twice, with float32 weights: once with its states as they are and
once with their sums in bfloat16. A text is one stream, so its end shows what has added up.
Checkpoints of ``--models`` read the same text. The drift is the root of the mean square of the
difference between the two log-probabilities of a token, in nats.

Before that, how to round: one layer of each mechanism, random tokens one by one, its sums rounded
after each to the nearest or at random, against itself in float64 as in `drift`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmarks.report import Figures, Result, command_line, show_figures
from benchmarks.studies.drift.__main__ import WINDOW_TOKENS, Reader, pieces, relative
from benchmarks.studies.drift.layers import NAMES, Layer, make_layer
from benchmarks.studies.mechanisms.recall import NUM_VALUES, draw
from model.architectures import ARCHITECTURES, load_class
from model.architectures.config import Config, has_sums, with_state_dtype
from model.architectures.network import Network, network_class
from model.attention import MECHANISMS, spec_of
from model.attention.base import State
from model.checkpoint import load_checkpoint
from model.config import MODEL_TYPE
from model.native.options import covers
from model.native.runtime import Runtime
from model.state import StateLayout
from model.state_tensors import random_bits, round_at_random
from model.tensor_spec import STATE_DTYPES
from model.training.optimizer import gradients, learning_rate_factor, make_optimizers, prepare_step
from model.weights import Array, Weights

NUM_BYTES = 256
#: The ids of `mechanisms.recall`, and one that ends texts.
NUM_RECALLED = 128 + NUM_VALUES + 1
NUM_PAIRS = (8, 16, 32)
PAIRS_PER_STEP, NUM_TESTED = 1024, 256
BATCH, WINDOW, WARMUP_STEPS, LEARNING_RATE = 8, 256, 50, 1e-2
#: The names of sums in a state.
SUMS = {"S", "S_before", "sum"}
#: Of a text, what its beginning and its end are.
PARTS = 10

_WIDTH: Figures = {"hidden_size": 64, "num_hidden_layers": 2}
_HEADS: Figures = {**_WIDTH, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 128}
_WINDOW, _FEATURES = 28, 32
_QWEN35 = dict.fromkeys(("num_key_heads", "num_value_heads"), 2)
_QWEN35 |= dict.fromkeys(("key_head_dim", "value_head_dim"), 32)
#: Families by the names here: their model type, and what is chosen.
FAMILIES: dict[str, tuple[str, Figures]] = {
    "rwkv7": ("everstream-rwkv7", {**_WIDTH, "head_dim": 32, "intermediate_size": 128}),
    "arwkv7": ("everstream-arwkv7", {**_WIDTH, "head_dim": 32, "intermediate_size": 128}),
    "mamba": ("everstream-mamba", _WIDTH),
    "mamba2": ("everstream-mamba2", {**_WIDTH, "head_dim": 32}),
    "qwen35": (
        "everstream-qwen35",
        {**_HEADS, "attention_options": {"attention_layers": [], "rotary_dim": 16, **_QWEN35}},
    ),
    **{
        f"llama-{far}": (
            "everstream-llama",
            {
                **_HEADS,
                "attention_options": {
                    "num_key_value_heads": 2,
                    "windows": [{"window": _WINDOW, "far": far, "features": _FEATURES}] * 2,
                },
            },
        )
        for far in ("relative", "delta")
    },
}

Batches = Callable[[int], tuple[Tensor, Tensor]]


def subjects() -> list[str]:
    """The mechanisms with sums that the native runtime covers, and the families."""
    names = (name for name in MECHANISMS if spec_of(name).constant_state)
    return [name for name in names if is_measured(config_of_subject(name, NUM_BYTES))] + [*FAMILIES]


def is_measured(config: Config) -> bool:
    """Whether there is something to compare."""
    return covers(config) and has_sums(config)


def config_of_subject(name: str, vocab_size: int) -> Config:
    """A small model of a family, or of a mechanism with a convolution, so that it learns soon."""
    mechanism = {**_HEADS, "attention": name, "attention_options": {"conv_size": 4}}
    model_type, chosen = FAMILIES.get(name, (MODEL_TYPE, mechanism))
    cls: Any = load_class(ARCHITECTURES[model_type].config)
    config: Config = cls.for_training(vocab_size, vocab_size - 1, chosen)
    return config


def text_batches(text: bytes) -> Batches:
    """Windows of ``text`` at random places, and the bytes that follow each, [B, T] int64."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - WINDOW - 1, (BATCH,), generator=generator)
        rows = torch.stack([ids[start : start + WINDOW + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    return batch


def recall_batches(step: int) -> tuple[Tensor, Tensor]:
    """Pairs and then their keys, [B, T], and the values to answer, -100 where none is."""
    num_pairs = NUM_PAIRS[step % len(NUM_PAIRS)]
    tokens, answers = recalled(num_pairs, PAIRS_PER_STEP // num_pairs, (step,))
    targets = torch.full_like(tokens, -100)
    targets[:, -num_pairs:] = answers
    return tokens, targets


def recalled(num_pairs: int, batch: int, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Texts [batch, 3 num_pairs] and the answers after their last tokens [batch, num_pairs]."""
    places, answers = draw("apart", num_pairs, batch, np.random.default_rng(seed))
    return places[..., 0], answers


def trained(config: Config, num_steps: int, batches: Batches) -> dict[str, NDArray[np.float32]]:
    """The weights of a model after so many steps."""
    model: Network = network_class(config)(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model.train()
    optimizers = make_optimizers(model, "muon", LEARNING_RATE, 0.0)
    parameters = [*model.parameters()]
    for step in range(num_steps):
        factor = learning_rate_factor(step, num_steps, min(WARMUP_STEPS, num_steps // 2))
        prepare_step(optimizers, factor)
        tokens, targets = batches(step)
        extra: list[Tensor] = []
        logits = model.parallel(tokens, extra)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        total = torch.stack([loss, *extra]).sum()
        for parameter, grad in zip(parameters, gradients(total, parameters), strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


def runtimes(config: Config, weights: Weights | dict[str, Array]) -> Iterator[tuple[str, Runtime]]:
    """The model with each dtype of the sums in its states."""
    for dtype in STATE_DTYPES:
        yield dtype, Runtime(with_state_dtype(config, dtype), weights, "float32")


class RoundedReader(Reader):
    """One layer whose sums are rounded to bfloat16 after every token."""

    def __init__(self, layer: Layer, nearest: bool) -> None:
        super().__init__(layer)
        self._nearest = nearest

    def _read(self, form: Callable[..., tuple[Tensor, State]], x: Tensor, count: int) -> Tensor:
        at = torch.tensor([self.position])
        y = super()._read(form, x, count)
        for name in SUMS & self.state.keys():
            sums = self.state[name]
            if self._nearest:
                rounded = sums.bfloat16()
            else:
                bits = random_bits(0, sums[0].numel(), at)
                rounded = round_at_random(sums, bits.view(sums.shape))
            self.state[name] = rounded.to(sums.dtype)
        return y


def compare_roundings(name: str, stops: list[int]) -> Figures:
    """By the number of tokens, the relative error of a layer's last outputs."""
    layer = make_layer(name, torch.Generator().manual_seed(0))
    wide, errors = Reader(layer, wide=True), Figures()
    readers = {"nearest": RoundedReader(layer, True), "at_random": RoundedReader(layer, False)}
    for position, x in pieces(stops, torch.Generator().manual_seed(1)):
        last, wanted = slice(-WINDOW_TOKENS, None), wide.chunk(x)
        for rounding, reader in readers.items():
            found = reader.step(x)
            if position in stops:
                by_stop = errors.setdefault(rounding, {})
                by_stop[str(position)] = relative(found[last], wanted[last])
    return errors


def read_text(
    config: Config, weights: Weights | dict[str, Array], tokens: list[int], num_bytes: int
) -> Figures:
    """Bits per byte of a text as one stream, of all and of its last part; and the drift."""
    found, size = {}, {}
    for dtype, runtime in runtimes(config, weights):
        scores = runtime.score(runtime.empty_pool(1), 0, 0, tokens)
        found[dtype], size[dtype] = np.array(scores), StateLayout.of(runtime.config).num_bytes
    part, per_token = len(tokens) // PARTS, num_bytes / len(tokens)
    apart = found["bfloat16"] - found["float32"]
    ends = {"first": apart[:part], "last": apart[-part:]}
    return {
        "tokens": len(tokens),
        "state_bytes": size,
        "bits_per_byte": {dtype: _bits(scores, per_token) for dtype, scores in found.items()},
        "bits_per_byte_at_the_end": {
            dtype: _bits(scores[-part:], per_token) for dtype, scores in found.items()
        },
        "drift": {name: _root_mean_square(values) for name, values in ends.items()},
    }


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(f"{math.sqrt(np.square(values).mean()):.3g}")


def _bits(scores: NDArray[np.float64], bytes_per_token: float) -> float:
    return round(float(-scores.mean()) / math.log(2) / bytes_per_token, 5)


def read_pairs(config: Config, weights: dict[str, Array]) -> Figures:
    """By the number of pairs the share of answers that are right."""
    found: Figures = {}
    for dtype, runtime in runtimes(config, weights):
        greedy = runtime.draw(temperature=0.0)
        found[dtype] = {}
        for num_pairs in NUM_PAIRS:
            texts, answers = recalled(num_pairs, NUM_TESTED, (1 << 32, num_pairs))
            slots, pool = list(range(NUM_TESTED)), runtime.empty_pool(NUM_TESTED)
            said = runtime.run(
                *(pool, slots, [0] * NUM_TESTED, texts.tolist(), [greedy] * NUM_TESTED),
                num_draws=[num_pairs] * NUM_TESTED,
            )
            right = (torch.tensor(said) == answers).float().mean()
            found[dtype][str(num_pairs)] = round(float(right), 4)
    return found


def measure_subject(name: str, data: bytes, valid: bytes, options: Any) -> Figures:
    """The figures of one mechanism or family."""
    config = config_of_subject(name, NUM_BYTES)
    weights = trained(config, options.steps, text_batches(data))
    tokens = list(valid[: options.tokens])
    figures = read_text(config, weights, tokens, len(tokens))
    if options.recall_steps:
        config = config_of_subject(name, NUM_RECALLED)
        weights = trained(config, options.recall_steps, recall_batches)
        figures["recall"] = read_pairs(config, weights)
    return figures


def measure_checkpoint(name: str, valid: bytes, num_tokens: int) -> Figures:
    """Those of a model that is there, without recall."""
    checkpoint = load_checkpoint(name)
    tokenizer = checkpoint.tokenizer
    tokens = tokenizer.encode(valid.decode("utf-8"))[:num_tokens]
    num_bytes = len(b"".join(map(tokenizer.token_bytes, tokens)))
    return read_text(checkpoint.config, checkpoint.weights, tokens, num_bytes)


def main(words: Sequence[str] | None = None) -> int:
    """The command line, or ``words`` in its place."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="UTF-8 text to train on")
    parser.add_argument("--valid", type=Path, required=True, help="UTF-8 text to read")
    parser.add_argument("--tokens", type=int, default=100_000, help="of it that are read")
    parser.add_argument("--steps", type=int, default=400, help="of training on the text")
    parser.add_argument("--recall-steps", type=int, default=500, help="of training on recall")
    parser.add_argument(
        "--rounding-stops", type=int, nargs="*", default=[1_000, 20_000], help="tokens of a layer"
    )
    parser.add_argument("--models", nargs="*", default=[], help="checkpoints that read it, too")
    parser.add_argument("--only", nargs="*", default=subjects(), help="mechanisms and families")
    options = parser.parse_args(words)
    data, valid = options.data.read_bytes(), options.valid.read_bytes()
    result = Result("studies.state_dtype", options.output)
    work = {name: partial(measure_subject, name, data, valid, options) for name in options.only}
    work |= {
        name: partial(measure_checkpoint, name, valid, options.tokens) for name in options.models
    }
    roundings: Figures = {}
    for name in NAMES if options.rounding_stops else ():
        if name != "softmax":
            roundings[name] = compare_roundings(name, sorted(options.rounding_stops))
    if roundings:
        show_figures("relative error of a layer's output, by how its sums are rounded", roundings)
    figures: Figures = {}
    for name, measure in work.items():
        figures[name] = measure()
        show_figures(name, figures[name])
        result.save({"roundings": roundings, "subjects": figures})
    result.finish({"roundings": roundings, "subjects": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
