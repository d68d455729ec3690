"""Tables of the bundled chat model next to its original."""

from __future__ import annotations

from benchmarks import oracle
from benchmarks.report import Figures, bullets, markdown, read_result
from benchmarks.studies.constant_state.__main__ import MODEL, RESULT
from benchmarks.studies.constant_state.subjects import (
    CONVERTED,
    ORIGINAL,
    SHORTER,
    SHORTER_CONTEXT,
    WINDOW,
    WITHOUT_FAR,
)

COLUMNS = {
    CONVERTED: f"`{MODEL}`",
    ORIGINAL: "original",
    WINDOW: "window of equal memory, untrained",
    WITHOUT_FAR: f"`{MODEL}` without far parts",
    SHORTER: f"`{MODEL}` with `--context {SHORTER_CONTEXT}`",
}
#: How many more bits per byte than the original a conversion may have.
AIMS = {"valid.txt": 0.01, "simple_stories_valid.txt": 0.02}
TEXTS = {"valid.txt": "prose", "simple_stories_valid.txt": "stories"}
HEAD = ("", *COLUMNS.values())


def summary() -> dict[str, str]:
    """State, bits per byte with what they are more than the original's, and recall."""
    models = _models()
    rows = [["state of a session", *map(_state, models)]]
    for file, text in TEXTS.items():
        bits = [model["bits_per_byte"][file]["all"] for model in models]
        of_original = dict(zip(COLUMNS, bits, strict=True))[ORIGINAL]
        rows.append([f"bits per byte, {text}", *(_bits(each, of_original) for each in bits)])
    for distance in models[0]["recall"]:
        shares = (f"{model['recall'][distance]['accuracy']:.2f}" for model in models)
        rows.append([f"recall after {int(distance):,} tokens", *shares])
    return {"quality": markdown(HEAD, rows)}


def tables() -> dict[str, str]:
    """What of it meets the aim."""
    return {"verdict": verdict(dict(zip(COLUMNS, _models(), strict=True)))}


def verdict(models: dict[str, Figures]) -> str:
    """Sentences about `AIMS`, the control and the far parts, from the figures alone."""
    ours, lines = models[CONVERTED], []
    for file, text in TEXTS.items():
        bits = {name: model["bits_per_byte"][file]["all"] for name, model in models.items()}
        more = bits[CONVERTED] / bits[ORIGINAL] - 1
        met = "meets" if more <= AIMS[file] else "misses"
        change = _than(bits[CONVERTED], bits[ORIGINAL])
        control = _than(bits[CONVERTED], bits[WINDOW])
        far = _than(bits[CONVERTED], bits[WITHOUT_FAR])
        lines.append(
            f"- On {text} it has {change} bits per byte than the original, which {met} the aim, "
            f"{control} than the control, and {far} than without its far parts."
        )
    for distance, told in ours["recall"].items():
        share, chance = told["accuracy"], 1 / 8
        others = {name: model["recall"][distance]["accuracy"] for name, model in models.items()}
        lines.append(
            f"- After {int(distance):,} tokens it recalls {share:.2f}, the original "
            f"{others[ORIGINAL]:.2f}, the control {others[WINDOW]:.2f}"
            f"{'; guesses are right as often' if share <= chance else ''}."
        )
    return bullets(lines)


def _than(ours: float, other: float) -> str:
    return f"{abs(ours / other - 1) * 100:.1f} % {'fewer' if ours < other else 'more'}"


def oracle_tables() -> dict[str, str]:
    """Our readers of the real file next to transformers and llama.cpp."""
    rows = [
        (
            f"{name}, next to {peer}",
            f"{row['same_tokens']} of {row['tokens']}",
            f"{row['max_difference']:.1e}",
            "" if row["mean_kl"] is None else f"{row['mean_kl']:.1e}",
        )
        for peer, readers in read_result(oracle.RESULT)["peers"].items()
        for name, row in readers.items()
    ]
    head = ("runtime", "same greedy tokens", "largest difference of log p", "mean KL, nats")
    return {"oracle": markdown(head, rows)}


def _models() -> list[Figures]:
    """In the order of `COLUMNS`."""
    models = read_result(RESULT)["models"]
    return [models[name] for name in COLUMNS]


def _state(model: Figures) -> str:
    if "context" in model:
        return f"{model['bytes_per_token']:,} bytes a token"
    return f"{model['state_bytes'] / 1e6:.2f} MB"


def _bits(bits: float, of_original: float) -> str:
    change = "" if bits == of_original else f" ({bits / of_original - 1:+.1%})"
    return f"{bits:.4f}{change}"
