"""The card of the bundled models, from the committed results of `facts.py`.

``python -m benchmarks.studies.model_card`` writes the page, from its template ``template.md``, and
the picture of the curves. A test compares the page with the results, and the results with the
files of the models.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.process import ROOT
from benchmarks.report import Figures, markdown
from benchmarks.studies.model_card.facts import CREDITS_OF_DATA, VALIDATION, read
from model.bundled_models import DEFAULT_NAME, FOLDER
from server.engine.types import SamplingParams

TEMPLATE = Path(__file__).parent / "template.md"
PAGE = FOLDER / "README.md"
CURVE = ROOT / "docs/images/training-curve.png"
#: Samples on the page, of the default model.
NUM_SAMPLES = 3
WIDTH = 116

PURPOSES = {
    "everstream-stories": "what `everstream serve` starts with",
}
MECHANISMS = {
    "delta": "the gated delta rule: a key's old value is taken out before the new one goes in",
}
#: What the texts are, by file.
SOURCES = {
    "train_children.txt": "books from Standard Ebooks, public domain in the US, productions CC0",
    "train_fiction.txt": "books from Standard Ebooks, public domain in the US, productions CC0",
    "simple_stories.txt": "short stories in simple English",
    "valid.txt": "E. Nesbit, The Magic City; H. G. Wells, The Invisible Man; never trained on",
    "simple_stories_valid.txt": "stories of the same sources, never trained on",
    CREDITS_OF_DATA: "the authors of the stories under CC BY",
}


def main() -> None:
    """Writes both."""
    result = read()
    PAGE.write_text(card(result), encoding="utf-8")
    draw_curves(result["models"])
    print(f"{PAGE.relative_to(ROOT)} and {CURVE.relative_to(ROOT)} are written")


def card(result: Figures) -> str:
    """The whole page."""
    models = result["models"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        overview=overview(models),
        quality=quality(models),
        num_samples=NUM_SAMPLES,
        prompt=result["prompt"],
        max_tokens=result["max_tokens"],
        sampling=sampling(result["sampling"]),
        samples=samples(models[DEFAULT_NAME]["samples"]),
        data=data(result["data"]),
        made="\n\n".join(made(name, model) for name, model in models.items()),
        files=files(models),
    )


def overview(models: Figures) -> str:
    """A column for each model."""
    columns = [_overview(name, model) for name, model in models.items()]
    rows = ([word, *(column[word] for column in columns)] for word in columns[0])
    return table(("", *models), rows)


def _overview(name: str, model: Figures) -> dict[str, str]:
    config = model["config"]
    attention, size = config["attention"], sum(file["bytes"] for file in model["files"].values())
    heads = f"{config['num_attention_heads']} heads of {config['head_dim']}"
    return {
        "for": PURPOSES.get(name, ""),
        "attention": f"`{attention}`: {MECHANISMS.get(attention, attention)}",
        "state of a session, any length": f"{model['state_bytes']:,} bytes",
        "parameters": f"{model['parameters']:,}",
        "shape": f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, {heads},"
        f" MLP of {config['intermediate_size']}, vocabulary {config['vocab_size']:,}",
        "files": f"{size / 1e6:.2f} MB, weights in {model['stored_dtype']}",
    }


def quality(models: Figures) -> str:
    """A row for each model, text and mode."""
    rows = [
        [name, text, mode, *(_bits(model, kind, text, mode) for kind in (None, "float32", "int8"))]
        for name, model in models.items()
        for text in VALIDATION
        for mode in ("windows", "stream")
    ]
    return table(("model", "text", "mode", "trained", "stored", "served"), rows)


def _bits(model: Figures, computed: str | None, text: str, mode: str) -> str:
    """The second half's and the first one's, of stored weights or (None) of those trained."""
    value = {
        row["half"]: row["bits_per_byte"]
        for row in (model["unrounded"] if computed is None else model["quality"])
        if (row["data"], row["mode"], row.get("computed")) == (text, mode, computed)
    }
    return f"{value['second']:.4f} ({value['first']:.4f})" if value else "-"


def sampling(settings: Figures) -> str:
    """Those that are not neutral."""
    neutral = SamplingParams()
    chosen = [
        f"`{name}` {value:g}" for name, value in settings.items() if value != getattr(neutral, name)
    ]
    return ", ".join(chosen)


def samples(made: Sequence[Figures]) -> str:
    """The first texts."""
    shown = made[:NUM_SAMPLES]
    return "\n\n".join(_filled(f"**{one['seed']}.** {_one_line(one['text'])}") for one in shown)


def _one_line(text: str) -> str:
    """One line of Markdown, with the special characters escaped."""
    one_line = " ".join(" / ".join(re.split(r"\n\s*\n", text.strip())).split())
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", one_line)


def data(texts: Figures) -> str:
    """Size and hash of each text."""
    rows = [
        [name, SOURCES.get(name, ""), f"{facts['bytes']:,}", f"`{facts['sha256']}`"]
        for name, facts in texts.items()
    ]
    return table(("text", "what it is", "bytes", "SHA-256"), rows)


def made(name: str, model: Figures) -> str:
    """The commands of a model and what they cost."""
    runs = [
        f"{run['steps']:,} steps, {run['tokens']:,} tokens, {run['seconds']:,} seconds of steps:"
        f"\n\n```sh\n{_wrapped(run['command'])}\n```"
        for run in model["runs"]
    ]
    folders = [run["command"].rpartition(" --out ")[2] for run in model["runs"]]
    if folders:
        last, commands = f"{folders[-1]}/model", []
        if model.get("averaged"):
            parts, last = " ".join(f"{folder}/model" for folder in folders), "runs/average"
            commands.append(f"everstream average {parts} {last}")
        commands.append(f"everstream quantize {last} model/bundled/{name}")
        runs.append("```sh\n" + "\n".join(commands) + "\n```")
    return "\n\n".join([f"### Training {name}", *runs])


def files(models: Figures) -> str:
    """Size and hash of each file of a model."""
    rows = [
        [f"{name}/{file}", f"{facts['bytes']:,}", f"`{facts['sha256']}`"]
        for name, model in models.items()
        for file, facts in model["files"].items()
    ]
    return table(("file", "bytes", "SHA-256"), rows)


def draw_curves(models: Figures) -> None:
    """The loss of each model's runs, and the validations of the default's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(xlabel="tokens", ylabel="training loss, nats per token")
    right.set(xlabel="tokens", ylabel=f"validation of {DEFAULT_NAME}, bits per byte")
    for name, model in models.items():
        points = list(_joined([run["loss"] for run in model["runs"]]))
        left.plot([x for x, _ in points], [y for _, y in points], label=name)
    runs = [run["valid_bits_per_byte"] for run in models[DEFAULT_NAME]["runs"]]
    for text in sorted({text for run in runs for row in run for text in row} - {"tokens"}):
        points = list(_joined([[(r["tokens"], r[text]) for r in run if text in r] for run in runs]))
        right.plot([x for x, _ in points], [y for _, y in points], marker=".", label=text)
    for axes in (left, right):
        if axes.lines:
            axes.legend()
    figure.savefig(CURVE, dpi=120)


def _joined(runs: Iterable[Sequence[Sequence[float]]]) -> Iterator[tuple[float, float]]:
    """The points of runs one after another."""
    start = 0.0
    for points in runs:
        for x, y in points:
            yield start + x, y
        start += points[-1][0] if points else 0.0


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, all columns of words."""
    return markdown(head, rows, align="---")


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _wrapped(command: str) -> str:
    """A command over several lines, broken before options."""
    lines, *options = re.sub(r" (?=--)", "\n", command).splitlines()
    for option in options:
        fits = len(lines.rpartition("\n")[2]) + len(option) + 3 <= WIDTH
        lines += f" {option}" if fits else f" \\\n  {option}"
    return lines


if __name__ == "__main__":
    main()
