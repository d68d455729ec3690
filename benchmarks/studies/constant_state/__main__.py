"""What the bundled chat model of constant state keeps of its original, as both are served.

    python -m benchmarks.studies.constant_state --data FOLDER

FOLDER has the validation texts of the bundled models. Five models are measured on the native
runtime with one thread (`subjects.py`): the converted one; its original with a past of 2,048
tokens that slides; the original with a window of equal memory in all layers, which is not trained;
the converted one without its far parts; and the converted one with shorter windows, in 3 MB.

- Bits per byte of the second halves of the texts, with the state carried through each document, in
  all and by the position of a token.
- How often a told colour is recalled so many tokens later, among eight: the questions of
  `model.convert.linearize.report`, by the likeliest of the colours. For these the original keeps
  4,096 tokens, which hold the fact at every distance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.report import (
    RESULTS,
    Figures,
    Result,
    command_line,
    read_result,
    show_figures,
)
from benchmarks.studies.constant_state.subjects import Subject, subjects
from model.bundled_models import bundled_models
from model.checkpoint_files import ADAPTER
from model.convert.linearize.report import COLORS, color_ids, half_ids, questions
from model.evaluation import documents
from model.hub.base import file_digest
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer

RESULT = RESULTS / "constant_state.json"
MODEL = "smollm2"
#: The texts, and how many bytes of each of their documents are read.
TEXTS = {"valid.txt": 30_000, "simple_stories_valid.txt": 3_000}
#: Other text between a fact and its question.
FILLER = "simple_stories_valid.txt"
DISTANCES = (30, 300, 900, 3000)
#: Positions at which a bin of `bits_per_byte` begins.
BINS = (0, 256, 512, 1024, 2048)
NAMES = (*(f"{begin}-{end - 1}" for begin, end in pairwise(BINS)), f"{BINS[-1]}+")
#: Tokens that are scored at a time; any cut gives the same numbers.
PART = 512


def read_texts(file: Path, max_bytes: int) -> list[str]:
    """The documents of the second half, each of at most ``max_bytes``."""
    whole = documents(file, "second")
    return [text.encode()[:max_bytes].decode("utf-8", "ignore") for text in whole]


def bits_per_byte(runtime: Runtime, tokenizer: Tokenizer, texts: Iterable[str]) -> Figures:
    """Of all tokens, and of those in each bin of positions that has any."""
    nats, num_bytes = np.zeros(len(BINS)), np.zeros(len(BINS))
    pool = runtime.empty_pool(1)
    for text in texts:
        pool[:] = 0
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        for start in range(0, len(ids) - 1, PART):
            *fed, following = ids[start : start + PART + 1]
            scores = runtime.score(pool, 0, start, fed, following)
            bins = np.searchsorted(BINS, start + np.arange(len(scores)), side="right") - 1
            sizes = [len(tokenizer.token_bytes(id)) for id in (*fed[1:], following)]
            np.add.at(nats, bins, -np.array(scores))
            np.add.at(num_bytes, bins, sizes)
    bits = nats / math.log(2)
    found = np.flatnonzero(num_bytes)
    return {
        "all": float(bits.sum() / num_bytes.sum()),
        "by_position": {NAMES[bin]: float(bits[bin] / num_bytes[bin]) for bin in found},
        "bytes": {NAMES[bin]: int(num_bytes[bin]) for bin in found},
    }


def recall(
    runtime: Runtime,
    tokenizer: Tokenizer,
    filler: list[int],
    distances: Sequence[int],
    count: int,
) -> Figures:
    """By distance: how often the told colour is the likeliest, and the mean log2 of its share."""
    colors, draw = color_ids(tokenizer), runtime.draw(temperature=0.0)
    right, bits = dict.fromkeys(distances, 0), dict.fromkeys(distances, 0.0)
    pool = runtime.empty_pool(2)
    for question in questions(tokenizer, count):
        pool[:] = 0
        fed, position, num_between = question.told, 0, 0
        between = question.between(filler, max(distances))
        for distance in sorted(distances):
            end = distance - len(question.asked)
            fed = [*fed, *between[num_between:end]]
            runtime.run(pool, [0], [position], [fed], [None])
            fed, position, num_between = [], position + len(fed), end
            pool[1] = pool[0]  # is asked; the other one reads on
            runtime.run(pool, [1], [position], [question.asked], [draw])
            logits = runtime.logits()[0][colors].astype(np.float64)
            shares = np.exp(logits - logits.max())
            right[distance] += int(shares.argmax() == question.color)
            bits[distance] += math.log2(shares[question.color] / shares.sum())
    return {
        str(distance): {"accuracy": right[distance] / count, "bits": bits[distance] / count}
        for distance in distances
    }


def measured(
    subject: Subject, texts: dict[str, list[str]], filler: list[int], options: argparse.Namespace
) -> Figures:
    """All of one model."""
    tokenizer, weights = subject.checkpoint.tokenizer, subject.checkpoint.weights
    runtime = Runtime(subject.config, weights, options.dtype)
    bits = {name: bits_per_byte(runtime, tokenizer, each) for name, each in texts.items()}
    if subject.recall != subject.config:
        runtime = Runtime(subject.recall, weights, options.dtype)
    told = recall(runtime, tokenizer, filler, options.distances, options.recalls)
    return {**subject.state(), "bits_per_byte": bits, "recall": told}


def main(command: Sequence[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--model", type=Path, default=bundled_models()[MODEL])
    parser.add_argument("--data", type=Path, required=True, help="folder of the validation texts")
    parser.add_argument("--max-bytes", type=int, help="of each document; default: by the text")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--recalls", type=int, default=24, help="questions of each distance")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    options = parser.parse_args(command)
    result = Result("studies.constant_state", options.output)
    texts = {
        name: read_texts(options.data / name, options.max_bytes or max_bytes)
        for name, max_bytes in TEXTS.items()
    }
    about: Figures = {
        "adapter": file_digest(options.model / ADAPTER),
        "dtype": options.dtype,
        "documents": {name: len(each) for name, each in texts.items()},
        "recalls": options.recalls,
        "chance": 1 / len(COLORS),
    }
    models = _measured_before(options.output, about)
    for subject in subjects(options.model):
        if subject.name in models:
            continue
        tokenizer = subject.checkpoint.tokenizer
        filler = half_ids(options.data / FILLER, tokenizer, "second").tolist()
        models[subject.name] = measured(subject, texts, filler, options)
        result.save({**about, "models": models})
    show_figures("next to the original", {name: _shown(model) for name, model in models.items()})
    result.finish({**about, "models": models})


def _measured_before(file: Path | None, about: Figures) -> Figures:
    """The models in a result of an interrupted run that read the same."""
    if file is None or not file.is_file():
        return {}
    found = read_result(file)
    return found["models"] if about.items() <= found.items() else {}


def _shown(model: Figures) -> Figures:
    bits = {name: round(each["all"], 4) for name, each in model["bits_per_byte"].items()}
    told = {f"recall at {d}": each["accuracy"] for d, each in model["recall"].items()}
    return {"state_bytes": model["state_bytes"], **bits, **told}


if __name__ == "__main__":
    main()
