"""What a run shows: a progress bar, a CSV log, a plot of the curves, samples."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from model.architectures.network import Network
from model.tokenizer import Tokenizer

COLUMNS = ("step", "tokens", "seconds", "loss", "lr_factor", "grad_norm", "valid_bits_per_byte")

#: Where in a row the validation begins: the mean over its texts, then each text.
VALID = COLUMNS.index("valid_bits_per_byte")


class Report:
    """Writes ``log.csv``, ``curve.png`` and ``samples.txt`` into ``out``.

    The log has a column for each of the texts ``valid``, by file name, after `COLUMNS`.
    """

    def __init__(self, out: Path, step: int, num_steps: int, valid: Sequence[Path] = ()) -> None:
        self.out = out
        self.columns = (*COLUMNS, *(path.name for path in valid))
        self._rows = _read(out / "log.csv", step, len(self.columns))
        self.flush()
        measured = (row[VALID] for row in reversed(self._rows) if row[VALID])
        self._valid = next((f"{bits} bits/byte" for bits in measured), "-")
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("", total=num_steps, completed=step)
        self._bar.start()

    def step(
        self,
        step: int,
        tokens: int,
        seconds: float,
        loss: float,
        lr_factor: float,
        grad_norm: float,
        tokens_per_s: float,
    ) -> None:
        numbers = (f"{seconds:.1f}", f"{loss:.4f}", f"{lr_factor:.4f}", f"{grad_norm:.3f}")
        self._rows.append([str(step), str(tokens), *numbers, *[""] * (len(self.columns) - VALID)])
        if step % 10 == 0:
            self.flush()
        text = f"loss {loss:.3f}  valid {self._valid}  {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable and step % 50 == 0:
            print(f"step {step}  {text}", flush=True)

    def evaluation(self, step: int, bits_per_byte: Sequence[float]) -> None:
        """Bits per byte of each validation text."""
        mean = sum(bits_per_byte) / len(bits_per_byte)
        self._valid = f"{mean:.4f} bits/byte"
        self._rows[-1][VALID:] = [f"{bits:.4f}" for bits in (mean, *bits_per_byte)]
        self.flush()
        self._plot()
        each = ", ".join(self._rows[-1][VALID + 1 :])
        self._bar.console.print(f"step {step}: validation {each} bits per byte")

    def sample(self, step: int, text: str) -> None:
        with (self.out / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"=== step {step}\n{text}\n\n")

    def close(self) -> None:
        self.flush()
        self._bar.stop()

    def flush(self) -> None:
        """Replaces ``log.csv`` in one piece, so that a kill never leaves half a row."""
        partial = self.out / "log.csv.partial"
        with partial.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self._rows])
        partial.replace(self.out / "log.csv")

    def _plot(self) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return  # the plot needs the extra 'train'; the log holds the same numbers
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="tokens", ylabel="training loss, nats per token")
        tokens = [int(row[1]) for row in self._rows]
        axes.plot(tokens, _smooth([float(row[3]) for row in self._rows]), color="tab:blue")
        right = axes.twinx()
        right.set_ylabel("validation, bits per byte")
        measured = [row for row in self._rows if row[VALID]]
        at = [int(row[1]) for row in measured]
        for column in range(VALID + 1, len(self.columns)):
            right.plot(
                at,
                [float(row[column]) for row in measured],
                ".-",
                color=f"C{column - VALID}",
                label=self.columns[column],
            )
        right.legend()
        figure.savefig(self.out / "curve.png", dpi=120)


def _smooth(values: list[float], weight: float = 0.98) -> list[float]:
    """Exponential moving average, started at the first value."""
    result, mean = [], values[0]
    for value in values:
        mean = weight * mean + (1 - weight) * value
        result.append(mean)
    return result


def _read(path: Path, step: int, width: int) -> list[list[str]]:
    """The whole rows up to ``step`` of an earlier part of the run."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in list(csv.reader(file))[1:] if len(row) == width]
    return [row for row in rows if int(row[0]) <= step]


# -------------------------------------------------------------------------------------------------
# A short sample while training, by the plainest means; the server has its own sampler.


@torch.no_grad()
def sample_text(
    model: Network,
    tokenizer: Tokenizer,
    seed: int,
    num_tokens: int = 120,
    temperature: float = 0.8,
) -> str:
    """The model's own text from the end-of-text token on."""
    device = model.head_weight.device
    generator = torch.Generator(device).manual_seed(seed)
    state, ids = model.empty_state(1), [tokenizer.eos_token_id]
    for position in range(num_tokens):
        where = torch.tensor([position], device=device)
        logits, state = model.step(torch.tensor(ids[-1:], device=device), state, where)
        logits = logits[0, : tokenizer.vocab_size]  # the model may have more ids: padding
        p = torch.softmax(logits.float() / temperature, dim=-1)
        ids.append(int(torch.multinomial(p, 1, generator=generator)))
    return tokenizer.decode(ids)
