"""How to draw tokens by default: texts of many settings, scored against held-out text.

    python -m benchmarks.sampling --data FOLDER [--model NAME] [--judge CHECKPOINT]

Every setting continues the same openings of held-out stories, with its own seeds, as the
server does. Its texts are compared with the stories' own continuations: runs of four words that
come again, variety of words, words that no training text has, and (with ``--judge``) bits
per byte under another model, which are too low where a text is dull and too high where it is
confused. A setting is as good as its texts are near to what people wrote: ``distance`` is the
mean over these figures of |setting - held-out| / their standard deviation among held-out texts.

Writes `RESULT`, and prints a table with the nearest setting first.
`server.engine.sampling` refers to it.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Figures, Result, command_line, show_figures
from model.bundled_models import DEFAULT_NAME
from model.checkpoint import Checkpoint, load_checkpoint
from model.evaluation import documents
from model.native.runtime import Runtime
from server.engine.limits import EngineConfig
from server.engine.sampling import DEFAULTS
from server.engine.types import Finished, Request, SamplingParams, TokenEvent
from server.models.backend import Backend, open_backend

RESULT = RESULTS / "sampling.json"
TRAINING = ("train_children.txt", "train_fiction.txt", "simple_stories.txt")
HELD_OUT = "simple_stories_valid.txt"
OPENING_WORDS = 8

TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0)
#: top_p and min_p, each alone; the first is neither.
CUTS = ((1.0, 0.0), (0.95, 0.0), (0.9, 0.0), (1.0, 0.05), (1.0, 0.1))
REPETITION_PENALTIES = (1.05, 1.1, 1.2)

#: Bits per byte of a text, its opening included.
Judge = Callable[[str], float]
Settings = dict[str, Any]
#: Words over which variety is taken, so that it does not depend on a text's length.
STRETCH = 50


def main() -> None:
    """Draws, scores and writes."""
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--model", default=DEFAULT_NAME)
    parser.add_argument("--judge", help="checkpoint of a larger model")
    parser.add_argument("--stories", type=int, default=40, help="stories to continue")
    parser.add_argument("--seeds", type=int, default=3, help="texts of each opening and setting")
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    result = Result("sampling", options.output)
    known = vocabulary(options.data / name for name in TRAINING)
    figures = {
        "model": options.model,
        "judge": options.judge and Path(options.judge).name,
        "stories": options.stories,
        "seeds": options.seeds,
        "max_tokens": options.max_tokens,
        **compared(
            load_checkpoint(options.model),
            load_checkpoint(options.judge) if options.judge else None,
            list(documents(options.data / HELD_OUT, "first"))[: options.stories],
            known,
            options.seeds,
            options.max_tokens,
        ),
    }
    rows = {
        ", ".join(f"{name} {value:g}" for name, value in row.pop("sampling").items()): row
        for row in copy.deepcopy(figures["settings"])
    }
    show_figures("sampling", {"held-out text": figures["held_out"], **rows})
    result.finish(figures)


def compared(
    checkpoint: Checkpoint,
    judging: Checkpoint | None,
    stories: Sequence[str],
    known: set[str],
    num_seeds: int,
    max_tokens: int,
) -> Figures:
    """The figures of the held-out stories and, the nearest first, of every setting."""
    judge = None if judging is None else judge_of(judging)
    backend = open_backend(checkpoint, threads=1)
    openings = [opening_of(story) for story in stories for _ in range(num_seeds)]
    rows = [scores(cut(story, backend, max_tokens), known, judge) for story in stories]
    held_out, spread = mean(rows), {name: deviation(rows, name) for name in rows[0]}
    settings = []
    for each in grid():
        texts = draw(backend, openings, each, max_tokens)
        found = mean([scores(text, known, judge) for text in texts])
        near = (abs(found[name] - held_out[name]) / spread[name] for name in found)
        settings.append({"sampling": each, **found, "distance": round(statistics.mean(near), 3)})
    settings.sort(key=lambda row: row["distance"])
    return {"held_out": held_out, "settings": settings}


def grid() -> Iterator[Settings]:
    """Temperatures by cuts, then repetition penalties at the present defaults."""
    for temperature in TEMPERATURES:
        for top_p, min_p in CUTS:
            yield {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    default = {name: getattr(DEFAULTS, name) for name in ("temperature", "top_p", "min_p")}
    for penalty in REPETITION_PENALTIES:
        yield {**default, "repetition_penalty": penalty}


def draw(
    backend: Backend, openings: Sequence[str], settings: Settings, max_tokens: int
) -> list[str]:
    """A text for each opening, which it begins with, side by side; each has a seed of its own."""
    names = iter(range(len(openings)))
    engine = backend.engine(len(openings), EngineConfig(new_id=lambda: f"text_{next(names)}"))
    texts = list(openings)
    for number, opening in enumerate(openings):
        tokens = tuple(backend.tokenizer.encode(opening))
        sampling = SamplingParams(**settings, seed=number, max_tokens=max_tokens)
        engine.submit(Request(str(number), "benchmark", tokens, sampling), now=0.0)
    while engine.has_work():
        for event in engine.step(now=0.0):
            if isinstance(event, TokenEvent | Finished):
                texts[int(event.request_id)] += event.text
    return texts


def opening_of(story: str) -> str:
    """The first words of a story, to its eighth space."""
    return " ".join(story.split(" ")[:OPENING_WORDS])


def cut(story: str, backend: Backend, max_tokens: int) -> str:
    """As much of a written story as a drawn one can have."""
    tokenizer = backend.tokenizer
    num_tokens = len(tokenizer.encode(opening_of(story))) + max_tokens
    return tokenizer.decode(tokenizer.encode(story)[:num_tokens])


def judge_of(checkpoint: Checkpoint) -> Judge:
    """Scores a text as `everstream eval` does a document."""
    runtime = Runtime(checkpoint.config, checkpoint.weights, "bfloat16", 1)
    tokenizer, pool = checkpoint.tokenizer, runtime.empty_pool(1)

    def judge(text: str) -> float:
        pool[:] = 0
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        nats = -sum(runtime.score(pool, 0, 0, ids))
        return nats / math.log(2) / len(text.encode())

    return judge


def scores(text: str, known: set[str], judge: Judge | None) -> dict[str, float | None]:
    """The figures of one text."""
    words = words_of(text)
    found = {
        "repeated_4grams": repeated_4grams(words),
        "variety": variety(words),
        "unknown_words": unknown_words(words, known),
    }
    return found if judge is None else {**found, "bits_per_byte": judge(text)}


def mean(rows: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """Of each figure, over the texts that have it."""
    return {name: round(statistics.fmean(_values(rows, name)), 4) for name in rows[0]}


def deviation(rows: Sequence[dict[str, float | None]], name: str) -> float:
    """Among texts; never 0, to divide by."""
    return max(statistics.stdev(_values(rows, name)), 1e-3)


def _values(rows: Sequence[dict[str, float | None]], name: str) -> list[float]:
    return [value for row in rows if (value := row[name]) is not None] or [0.0, 0.0]


def words_of(text: str) -> list[str]:
    """The words in lower case, without marks; an apostrophe inside is part of one."""
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


def repeated_4grams(words: list[str]) -> float:
    """The part of the runs of four words that have come before in the same text."""
    grams = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def variety(words: list[str]) -> float | None:
    """Different words / words, over stretches of `STRETCH`; None for a shorter text."""
    starts = range(0, len(words) + 1, STRETCH)
    stretches = [words[start:end] for start, end in pairwise(starts)]
    if not stretches:
        return None
    return sum(len(set(each)) for each in stretches) / (STRETCH * len(stretches))


def unknown_words(words: list[str], known: Set[str]) -> float:
    """The part of the words that are not in ``known``."""
    return sum(word not in known for word in words) / len(words) if words else 0.0


def vocabulary(files: Iterable[Path]) -> set[str]:
    """Every word of some texts."""
    found: set[str] = set()
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                found.update(words_of(line))
    return found


if __name__ == "__main__":
    main()
