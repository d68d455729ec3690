"""Tables of the bundled chat model next to its original."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import oracle
from benchmarks.constant_state.__main__ import MODEL, NAMES, RESULT
from benchmarks.constant_state.subjects import CONVERTED, ORIGINAL, WINDOW, WITHOUT_FAR
from benchmarks.report import Figures, markdown, read_result

COLUMNS = {
    CONVERTED: f"`{MODEL}`",
    ORIGINAL: "original",
    WINDOW: "window of equal memory, untrained",
    WITHOUT_FAR: f"`{MODEL}` without far parts",
}
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
    """The same, and bits per byte by the position of a token."""
    models = _models()
    return summary() | {"positions": markdown(HEAD, _position_rows(models))}


def oracle_tables() -> dict[str, str]:
    """Our readers of the real file next to transformers."""
    rows = [
        (
            name,
            f"{row['same_tokens']} of {row['tokens']}",
            f"{row['max_difference']:.1e}",
            f"{row['mean_kl']:.1e}",
        )
        for name, row in read_result(oracle.RESULT)["readers"].items()
    ]
    head = ("runtime", "same greedy tokens", "largest difference of log p", "mean KL, nats")
    return {"oracle": markdown(head, rows)}


def _models() -> list[Figures]:
    """In the order of `COLUMNS`."""
    models = read_result(RESULT)["models"]
    return [models[name] for name in COLUMNS]


def _position_rows(models: list[Figures]) -> Iterator[list[str]]:
    for file, text in TEXTS.items():
        bins = [model["bits_per_byte"][file]["by_position"] for model in models]
        for name in NAMES:
            if name in bins[0]:
                yield [f"{text}, tokens {name}", *(f"{each[name]:.4f}" for each in bins)]


def _state(model: Figures) -> str:
    if "context" in model:
        return f"{model['bytes_per_token']:,} bytes a token"
    return f"{model['state_bytes'] / 1e6:.2f} MB"


def _bits(bits: float, of_original: float) -> str:
    change = "" if bits == of_original else f" ({bits / of_original - 1:+.1%})"
    return f"{bits:.4f}{change}"
