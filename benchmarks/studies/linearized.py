"""A published Llama whose attention is replaced by each mechanism: at once, matched, fine-tuned.

    python -m benchmarks.studies.linearized SOURCE --data TEXT --valid TEXT --output FILE

A mechanism stands in two places: as the whole attention, and as the far part, for what leaves a
window of exact softmax, in all layers alike. A far part gets a share s of each head,

    o = (1 - s) o_near + s o_far,   s = sigmoid(x w + b)   of each head, w 0 and b `FAR_LOGIT` first

All rows read the same tokens twice: first each layer learns to give what the source's attention
gives (`model.convert.convert`), then all learn to name the next token. Trained are updates
of low rank of q, k, v and the output, and all that the mechanism has of its own. Mechanisms stand
without the convolution and the gate that a new model would have: they begin as noise, and what the
source knows would not pass. Their norms begin at the size of the source's outputs, and codewords
at keys. Rows that are in the file already are not run again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from benchmarks.report import Figures, Result, read_result, show_figures, write_result
from model.attention.base import HeadsAttention, mechanism
from model.attention.soft_vq import SoftVqAttention
from model.attention.vq import VqAttention
from model.convert.linearize.plan import Plan, state_bytes, window_plan
from model.convert.linearize.report import Hidden, bits_per_byte, half_ids, samples, token_bytes
from model.convert.linearize.source import (
    Llama,
    Source,
    full_attention,
    merged,
    read_source,
    rotated,
)
from model.convert.linearize.student import LowRank, Student
from model.convert.linearize.train import divergence
from model.evaluation import documents
from model.families.llama.config import LayerPlan
from model.tokenizer import Tokenizer

RANK, WINDOW, SINKS = 16, 64, 4
#: 0.1 of a head, as much as a far part of `RelativeFar` weighs next to its window at first.
FAR_LOGIT = -2.2
#: Of updates, and of what a mechanism has of its own, in matching and in fine-tuning.
RATES = {"matched": (2e-3, 5e-3), "fine-tuned": (8e-4, 1e-3)}


@dataclass(frozen=True)
class Swap:
    """A mechanism and its options, of `model.attention`."""

    attention: str
    options: dict[str, Any] = field(default_factory=dict)


#: Without options that the place decides: "rotary" is "before" in a whole attention if it is here.
SWAPS = {
    "elu": Swap("elu", {"rotary": "before"}),
    "performer, orthogonal": Swap("performer", {"rotary": "before"}),
    "performer, independent": Swap("performer", {"rotary": "before", "orthogonal": False}),
    "cosine": Swap("cosine", {"rotary": "before"}),
    "cosformer": Swap("cosformer"),
    "retnet": Swap("retnet", {"gate": False}),
    "dijiang, published": Swap("dijiang", {"gate": False, "published": True}),
    "dijiang, trained map": Swap("dijiang", {"gate": False}),
    "vq": Swap("vq"),
    "soft_vq": Swap("soft_vq", {"rotary": "before"}),
    "gated": Swap("gated", {"gate": False, "conv_size": 0}),
    "delta": Swap("delta", {"gate": False, "conv_size": 0}),
}
#: The source itself, windows alone, and the far part that `everstream convert` makes.
CONTROLS = ("source", f"window {WINDOW}", f"window {4 * WINDOW}", "relative")


@dataclass(frozen=True)
class _Config:
    """What a mechanism reads of a model's config."""

    attention: str
    attention_options: dict[str, Any]
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool = False


@dataclass(frozen=True)
class Work:
    """What all rows share: texts of training [N, T + 1] and of validation, and the bytes of ids."""

    source: Source
    match: Tensor
    tune: Tensor
    valid: dict[str, Tensor]
    num_bytes: Tensor

    def bits(self, hidden: Hidden) -> dict[str, float]:
        """Bits per byte of each text."""
        head = self.source.model.head
        return {
            name: bits_per_byte(hidden, head, ids, self.num_bytes).all
            for name, ids in self.valid.items()
        }


class Update(nn.Module):
    """A matrix and its update, for `torch.nn.utils.parametrize`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.update = LowRank(rows, columns, RANK)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.update.delta()


class Whole(nn.Module):
    """A mechanism with the source's matrices of layer ``index`` as the whole attention."""

    def __init__(self, source: Llama, index: int, swap: Swap) -> None:
        super().__init__()
        shape, layer = source.shape, source.layer(index)
        options = dict(swap.options)
        if "rotary" in options:
            options["rope_theta"] = shape.rope_theta
        self.attention = _mechanism(source, swap.attention, options, columns=1)
        _fill(self.attention, source, index, lambda q, k, v: torch.cat([q, k, v]))
        with torch.no_grad():
            self.attention.out.weight.copy_(layer.out)
        _updated(self.attention.out)
        self.first = 0

    def forward(self, x: Tensor, near: Tensor | None, losses: list[Tensor]) -> Tensor:
        """The layer's output [B, T, D] for its input [B, T, D]."""
        return self.attention.parallel(x, losses)


class Far(nn.Module):
    """A mechanism for what left the window of layer ``index``: q is of now, k and v are of then.

    It reads the input of the layer now and ``WINDOW`` tokens ago as one of twice the width.
    """

    def __init__(self, source: Llama, index: int, swap: Swap) -> None:
        super().__init__()
        shape, options = source.shape, dict(swap.options)
        options |= {name: "none" for name in ("rotary",) if name in options}
        options |= {"window": 1} if swap.attention == "vq" else {}
        self.attention = _mechanism(source, swap.attention, options, columns=2)
        _fill(self.attention, source, index, _now_and_then)
        self.attention.add_module("out", nn.Identity())
        self.share = nn.Linear(shape.hidden_size, shape.num_heads)
        nn.init.zeros_(self.share.weight)
        nn.init.constant_(self.share.bias, FAR_LOGIT)
        self.first = WINDOW + SINKS

    def forward(self, x: Tensor, near: Tensor | None, losses: list[Tensor]) -> Tensor:
        """The heads' outputs [B, T, H K] from those of the window."""
        assert near is not None
        if x.shape[1] <= self.first:
            return near
        now, then = x[:, self.first :], x[:, SINKS : x.shape[1] - WINDOW]
        far = self.attention.parallel(torch.cat([now, then], dim=-1), losses)
        share = self.share(now).sigmoid().repeat_interleave(far.shape[-1] // self._heads, dim=-1)
        joined = torch.lerp(near[:, self.first :], far, share)
        return torch.cat([near[:, : self.first], joined], dim=1)

    @property
    def _heads(self) -> int:
        return self.share.out_features


def _mechanism(
    source: Llama, attention: str, options: dict[str, Any], columns: int
) -> HeadsAttention:
    shape = source.shape
    sizes = columns * shape.hidden_size, shape.num_heads, shape.head_dim
    made = mechanism(attention)(_Config(attention, options, *sizes, shape.rms_norm_eps))
    assert isinstance(made, HeadsAttention)
    return made


def _now_and_then(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Matrices [H K, D] to one of an input now and one then [3 H K, 2 D]."""
    none = torch.zeros_like(q)
    rows = (q, none), (none, k), (none, v)
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def _fill(made: HeadsAttention, source: Llama, index: int, arrange: Callable[..., Tensor]) -> None:
    """The source's q, k and v, one head of k and v for each of q; all else is drawn."""
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm_weight"):
                parameter.fill_(1.0)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        made.reset_parameters(generator)
        shape = source.shape
        counts = [n * shape.head_dim for n in (shape.num_heads, *[shape.num_kv_heads] * 2)]
        q, k, v = source.layer(index).qkv.split(counts)
        k, v = (
            m.unflatten(0, (-1, shape.head_dim)).repeat_interleave(shape.group, 0).flatten(0, 1)
            for m in (k, v)
        )
        made.qkv.weight.copy_(arrange(q, k, v))
    _updated(made.qkv)


def _updated(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(False)
    parametrize.register_parametrization(linear, "weight", Update(*linear.weight.shape))


class Swapped(nn.Module):
    """The source with other attention: a student's, and a mechanism in one of two places."""

    def __init__(self, source: Llama, plan: Plan, swap: Swap | None, place: str) -> None:
        super().__init__()
        whole = place == "whole"
        self.student = Student(source, plan, {} if whole else {"qkv": RANK, "out": RANK})
        kind = Whole if whole else Far
        count = source.shape.num_layers if swap else 0
        self.mixers = nn.ModuleList(kind(source, index, swap) for index in range(count) if swap)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(".a"):
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        self.losses: list[Tensor] = []

    def mixer(self, index: int) -> Whole | Far | None:
        """The mechanism of layer ``index``."""
        if not len(self.mixers):
            return None
        found = self.mixers[index]
        assert isinstance(found, Whole | Far)
        return found

    def attended(self, index: int, x: Tensor) -> Tensor:
        """The output of the attention of layer ``index`` [B, T, D] for its normed input."""
        mixer, own, source = self.mixer(index), self.student.layer(index), self.student.source
        if isinstance(mixer, Whole):
            return mixer.forward(x, None, self.losses)
        layer = source.layer(index)
        heads = merged(
            self.student.attention(index, *source.heads(index, own.linear("qkv", x, layer.qkv)))
        )
        if mixer is not None:
            heads = mixer(x, heads, self.losses)
        return own.linear("out", heads, layer.out)

    def hidden(self, ids: Tensor) -> Tensor:
        """``ids`` [B, T] to the input of the head [B, T, D]."""
        source = self.student.source
        x = source.embedded(ids)
        for index in range(source.shape.num_layers):
            x = x + self.attended(index, source.attention_input(index, x))
            x = source.after_mlp(index, x)
        return source.final_norm(x)

    def optimizer(self, stage: str) -> torch.optim.Optimizer:
        """Over the updates, and over all else that is trained."""
        rates = RATES[stage]
        groups: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                groups[0 if name.endswith((".a", ".b")) else 1].append(parameter)
        return torch.optim.Adam(
            [{"params": part, "lr": rate} for part, rate in zip(groups, rates, strict=True)],
            betas=(0.9, 0.95),
        )


Layer = tuple[int, Tensor, Tensor, Tensor]


@torch.no_grad()
def source_layers(source: Llama, ids: Tensor) -> Iterator[Layer]:
    """Of each layer its number, its normed input, its heads' outputs and what it adds."""
    x = source.embedded(ids)
    for index in range(source.shape.num_layers):
        layer = source.layer(index)
        normed = source.attention_input(index, x)
        q, k, v = source.heads(index, F.linear(normed, layer.qkv))
        heads = merged(full_attention(*rotated(q, k, source.shape), v))
        added = F.linear(heads, layer.out)
        yield index, normed, heads, added
        x = source.after_mlp(index, x + added)


@torch.no_grad()
def calibrate(model: Swapped, ids: Tensor) -> None:
    """Sets norms to the size of the source's heads, and codewords to keys, on one text [1, T]."""
    for index, normed, heads, _ in source_layers(model.student.source, ids):
        mixer = model.mixer(index)
        if mixer is None:
            return
        made = mixer.attention
        if made.norm_weight is not None:
            size = heads.unflatten(-1, (-1, made.norm_weight.shape[0])).square()
            made.norm_weight.copy_(size.mean(dim=(0, 1, 2)).sqrt())
        if isinstance(made, VqAttention | SoftVqAttention):
            x = normed if isinstance(mixer, Whole) else torch.cat([normed, normed], dim=-1)
            _, k, _, _ = made._convolved(x, {})
            keys = k[0].transpose(0, 1) * made.config.head_dim**-0.25  # [H, T, K]
            chosen = torch.linspace(0, keys.shape[1] - 1, made.codebook.shape[1]).long()
            made.codebook.copy_(keys[:, chosen])


def match(model: Swapped, texts: Tensor) -> list[float]:
    """Trains all layers on ``texts`` [N, T + 1], one a step; the mean error of each step."""
    optimizer, history = model.optimizer("matched"), []
    for step, ids in enumerate(texts[:, None, :-1]):
        errors = []
        for index, normed, _, wanted in source_layers(model.student.source, ids):
            mixer, model.losses = model.mixer(index), []
            first = mixer.first if mixer else WINDOW + SINKS
            found = model.attended(index, normed)[:, first:]
            wanted = wanted[:, first:]
            error = (found - wanted).square().sum() / wanted.square().sum()
            torch.stack([error, *model.losses]).sum().backward()
            errors.append(error.item())
        update(model, optimizer, step, len(texts))
        history.append(sum(errors) / len(errors))
    return history


def tune(model: Swapped, texts: Tensor) -> list[float]:
    """Trains on the next token of ``texts`` [N, T + 1], one a step; the loss of each, in nats."""
    optimizer, history = model.optimizer("fine-tuned"), []
    head = model.student.source.head
    for step, ids in enumerate(texts):
        model.losses = []
        hidden, labels = model.hidden(ids[None, :-1])[0], ids[1:]
        loss, _ = divergence(hidden, hidden.detach(), head, labels, torch.ones(len(labels)))
        torch.stack([loss, *model.losses]).sum().backward()
        update(model, optimizer, step, len(texts))
        history.append(loss.item())
    return history


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """One step of Adam; rates rise over the first tenth and fall to a tenth like a cosine."""
    rise = min(1.0, (step + 1) / max(1, steps // 10))
    factor = rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def run(work: Work, name: str, place: str) -> Figures:
    """The figures of one row."""
    source = work.source.model
    num_layers, longest = source.shape.num_layers, max(map(len, [work.match[0], work.tune[0]]))
    plans = {
        "source": window_plan(num_layers, max(longest, *(t.shape[1] for t in work.valid.values()))),
        f"window {4 * WINDOW}": window_plan(num_layers, 4 * WINDOW),
        "relative": Plan((LayerPlan(WINDOW, "relative", 64),) * num_layers, SINKS),
    }
    plan = plans.get(name, window_plan(num_layers, WINDOW))
    model = Swapped(source, plan, SWAPS.get(name), place)
    model.eval()
    calibrate(model, work.match[:1, :-1])
    figures: Figures = {"bits_per_byte": {"at once": work.bits(model.hidden)}}
    model.train()
    if name != "source":
        figures["errors"] = match(model, work.match)
        model.eval()
        figures["bits_per_byte"]["matched"] = work.bits(model.hidden)
        model.train()
    figures["losses"] = tune(model, work.tune)
    model.eval()
    figures["bits_per_byte"]["fine-tuned"] = work.bits(model.hidden)
    if name != "source":
        figures["state_bytes"] = sum(bytes_of(model, index) for index in range(num_layers))
    return figures


def bytes_of(model: Swapped, index: int) -> int:
    """Bytes of a session's state in layer ``index``: float16 for windows, else as specs say."""
    mixer, source = model.mixer(index), model.student.source
    total = 0
    if not isinstance(mixer, Whole):
        plan = model.student.plan
        total += state_bytes(plan.layers[index], source.shape, plan.sinks)
    if mixer is not None:
        spec = mixer.attention.spec.state_spec(mixer.attention.config)
        total += sum(tensor.num_bytes for tensor in spec.values())
    return total


def pieces(path: Path, tokenizer: Tokenizer, count: int, num_tokens: int) -> Tensor:
    """``count`` pieces [count, T] of the first documents of a text."""
    ids: list[int] = []
    for text in islice(documents(path), 1024):
        ids += tokenizer.encode(text[:20_000])
        if len(ids) > 4 * count * num_tokens:
            break
    return samples(torch.tensor(ids), count, num_tokens)


def read_work(options: argparse.Namespace) -> Work:
    """The source and all texts."""
    source = read_source(options.source)
    tokenizer, length = source.tokenizer, options.length

    def training(steps: int, offset: int) -> Tensor:
        each = [pieces(path, tokenizer, 2 * steps, length + 1)[offset::2] for path in options.data]
        mixed = torch.stack(each, dim=1).flatten(0, 1)  # one of each file in turn
        return mixed[:: len(each)] if len(each) == 1 else mixed[:steps]

    valid = {
        path.name: samples(
            half_ids(path, tokenizer, "second"), options.pieces, options.valid_length
        )
        for path in options.valid
    }
    texts = training(options.match_steps, 0), training(options.tune_steps, 1)
    return Work(source, *texts, valid, token_bytes(tokenizer))


def rows() -> list[tuple[str, str]]:
    """All rows, controls first, then each mechanism in its two places."""
    controls = [(name, "control") for name in CONTROLS]
    return controls + [(name, place) for name in SWAPS for place in ("far", "whole")]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.linearized",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("source", help="GGUF file, folder or hub id of a Llama")
    parser.add_argument("--data", type=Path, action="append", required=True, help="text; repeat")
    parser.add_argument("--valid", type=Path, action="append", required=True, help="text; repeat")
    parser.add_argument("--output", type=Path, required=True, help="file of all rows")
    parser.add_argument("--length", type=int, default=512, help="tokens of a step")
    parser.add_argument("--match-steps", type=int, default=16)
    parser.add_argument("--tune-steps", type=int, default=24)
    parser.add_argument("--pieces", type=int, default=2, help="pieces of each validation text")
    parser.add_argument("--valid-length", type=int, default=1024, help="tokens of a piece")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", nargs="+", help="only these, such as 'elu far'")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Runs the rows that the file lacks."""
    options = arguments(words)
    torch.set_num_threads(options.threads)
    recipe = {
        name: getattr(options, name)
        for name in ("length", "match_steps", "tune_steps", "pieces", "valid_length")
    }
    result = Result("linearized")
    found = read_result(options.output) if options.output.is_file() else {}
    if found and found["recipe"] != recipe:
        sys.exit(f"error: {options.output} has rows of another recipe: {found['recipe']}")
    work = read_work(options)
    for name, place in rows():
        row = f"{name} {place}"
        if (options.rows and row not in options.rows) or row in found.get("rows", {}):
            continue
        figures = run(work, name, place)
        # Read again: another process may have added rows.
        found = read_result(options.output) if options.output.is_file() else {}
        found = {
            **result.origin,
            "source": {"file": work.source.path.name, "sha256": work.source.digest},
            "recipe": recipe,
            "rows": {**found.get("rows", {}), row: figures},
        }
        write_result(options.output, found)
        show_figures(row, figures["bits_per_byte"])


if __name__ == "__main__":
    main()
