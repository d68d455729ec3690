"""What helps SmolLM2 on its way to a constant state: all weights, cut rings, far parts.

    python -m benchmarks.studies.conversion SOURCE --data TEXT --valid TEXT --work FOLDER

SOURCE is SmolLM2-135M-Instruct. Each variant is a short conversion by `everstream convert`'s own
stages in a folder of FOLDER, which differs from the first one in one choice; all read the same
chats and texts in the same order, and those with the same plan begin with the same matched far
parts. Each is measured as a conversion reports it (`model.convert.linearize.report`). Variants
that the result has are not run again.
"""

from __future__ import annotations

import json
import math
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.report import RESULTS, Figures, Result, command_line, read_result, show_figures
from model.convert.linearize.conversion import LENGTHS, PAST, Conversion, Settings
from model.convert.linearize.plan import Plan, equal_window, smollm2_plan
from model.convert.linearize.report import (
    CONTROL,
    SOURCE,
    Hidden,
    bits_per_byte,
    half_ids,
    recall,
    samples,
    token_bytes,
)
from model.convert.linearize.result import load_adapter
from model.convert.linearize.source import Source as ReadSource
from model.convert.linearize.source import read_source
from model.convert.linearize.student import Student
from model.convert.linearize.train import Choice
from model.families.llama.config import LayerPlan
from model.training.data import Source

RESULT = RESULTS / "short_conversions.json"
PLAN = "6mb"
#: What variants with the same plan share with the first of them.
SHARED = ("chats", "cache", "plan.json", "runs/match")
#: Steps at the end whose KL is averaged.
LAST = 10


@dataclass(frozen=True)
class Variant:
    """Settings that differ from the defaults, and the far part of the layers with rings."""

    settings: dict[str, Any] = field(default_factory=dict)
    ring_far: Literal["relative", "delta"] = "delta"


FIRST = "as by default"
VARIANTS = {
    FIRST: Variant(),
    "all weights": Variant({"ranks": None, "merged": True}),
    "rings never cut": Variant({"rings": Choice((0,), (1.0,))}),
    "relative far parts behind rings": Variant(ring_far="relative"),
}


def plan_of(variant: Variant) -> Plan:
    """SmolLM2's plan with the far parts of ``variant``."""
    plan = smollm2_plan(PLAN)
    layers = (
        LayerPlan(layer.window, variant.ring_far, layer.features) if layer.far == "delta" else layer
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def run(options: Namespace, name: str) -> Figures:
    """The figures of one variant, from a folder of its own."""
    variant, out, first = VARIANTS[name], *(options.work / _folder(n) for n in (name, FIRST))
    out.mkdir(parents=True, exist_ok=True)
    for part in SHARED if variant.ring_far == "delta" else SHARED[:2]:
        if (first / part).exists() and not (out / part).exists():
            copy: Callable[[Path, Path], object] = shutil.copytree
            (out / part).parent.mkdir(parents=True, exist_ok=True)
            (copy if (first / part).is_dir() else shutil.copy)(first / part, out / part)
    plan, file = plan_of(variant), out / "asked-plan.json"
    file.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    settings = Settings(
        source=options.source,
        out=out,
        data=tuple(Source(path, 1.0) for path in options.data),
        valid=tuple(options.valid),
        state=str(file),
        chat_tokens=options.chat_tokens,
        match_tokens=options.match_tokens,
        tokens=options.tokens,
        window=options.window,
        threads=options.threads,
    )
    conversion = Conversion(replace(settings, **variant.settings))
    stages = (
        *(conversion.write_chats, conversion.choose_plan, conversion.match),
        conversion.distil,
    )
    for stage in stages:
        stage(lambda: False)
    log = (out / "runs" / "distil" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    kl = [step["kl"] for step in map(json.loads, log) if "kl" in step][-LAST:]
    trained = load_adapter(out / "runs" / "distil" / "adapter.safetensors")
    return {
        "state_bytes": plan.state_bytes(conversion.shape),
        "trained": sum(weight.numel() for weight in trained.weights.values()),
        "kl": math.fsum(kl) / len(kl),
        **measured(options, conversion.source, trained.student(conversion.source.model).hidden),
    }


def measured(options: Namespace, source: ReadSource, hidden: Hidden) -> Figures:
    """Bits per byte of the second halves, in all and by position, and recall by distance."""
    tokenizer, head = source.tokenizer, source.model.head
    sizes, bits = token_bytes(tokenizer), {}
    for path in options.valid:
        ids = half_ids(path, tokenizer, "second")
        pieces = samples(ids, options.pieces, options.length)
        bits[path.name] = asdict(bits_per_byte(hidden, head, pieces, sizes))
    told = {
        str(distance): asdict(recall(hidden, head, tokenizer, ids, distance, options.recalls))
        for distance in options.distances
    }
    return {"bits_per_byte": bits, "recall": told}


def controls(options: Namespace) -> Figures:
    """The source, and the source with a window of equal memory, untrained."""
    source = read_source(options.source)
    model = source.model
    plan = equal_window(smollm2_plan(PLAN), model.shape)
    control = Student(model, plan, {}, PAST * options.window)
    return {
        name: measured(options, source, hidden)
        for name, hidden in ((SOURCE, model.hidden), (CONTROL, control.hidden))
    }


def _folder(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


def main(command: Sequence[str] | None = None) -> None:
    """Runs the variants that the file lacks."""
    parser = command_line(__doc__, RESULT)
    parser.add_argument("source", help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, action="append", required=True, help="text; repeat")
    parser.add_argument("--valid", type=Path, action="append", required=True, help="text; repeat")
    parser.add_argument("--work", type=Path, required=True, help="folder of the conversions")
    parser.add_argument("--chat-tokens", type=int, default=20_000)
    parser.add_argument("--match-tokens", type=int, default=8_192)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=512, help="tokens of most sequences")
    parser.add_argument("--pieces", type=int, default=2, help="pieces of each validation text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a piece")
    parser.add_argument("--recalls", type=int, default=8, help="questions of each distance")
    parser.add_argument("--distances", type=int, nargs="+", default=(300, 1500))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS))
    options = parser.parse_args(command)
    torch.set_num_threads(options.threads)
    result = Result("studies.conversion", options.output)
    names = ("chat_tokens", "match_tokens", "tokens", "window", "pieces", "length", "recalls")
    recipe: Figures = {name: getattr(options, name) for name in names}
    recipe |= {name: [path.name for path in getattr(options, name)] for name in ("data", "valid")}
    recipe["distances"] = list(options.distances)
    recipe["lengths"] = [list(LENGTHS.values), list(LENGTHS.shares)]
    found: Figures = read_result(options.output) if options.output.is_file() else {}
    variants = found["variants"] if found.get("recipe") == recipe else controls(options)
    for name in options.variants:
        if name not in variants:
            variants[name] = run(options, name)
            result.save({"recipe": recipe, "variants": variants})
    show_figures("short conversions", {name: _shown(each) for name, each in variants.items()})
    result.finish({"recipe": recipe, "variants": variants})


def _shown(variant: Figures) -> Figures:
    bits = {text: each["all"] for text, each in variant["bits_per_byte"].items()}
    told = {f"recall at {d}": each["accuracy"] for d, each in variant["recall"].items()}
    return {"trained": variant.get("trained"), "kl": variant.get("kl"), **bits, **told}


if __name__ == "__main__":
    main()
