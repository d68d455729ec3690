"""The command ``everstream quantize``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from model.command_line import LoraAlpha, LoraFiles, errors_as_lines, lora_of

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("quantize")(quantize_command)


def quantize_command(
    model: Annotated[
        str, typer.Argument(help="Model to read: checkpoint folder, bundled model or hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; existing files are replaced.")],
    dtype: Annotated[
        Literal["int8", "bfloat16"], typer.Option(help="Type of the stored weights.")
    ] = "int8",
    evaluate: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text on which to measure bits per byte of each precision.", exists=True
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Number of threads of the evaluation.", min=1)] = 1,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Write a checkpoint with weights of a smaller type.

    With --evaluate, also measure the loss of quality.
    """
    from model.checkpoint import load_checkpoint, locate
    from model.evaluation import DataError
    from model.native.runtime import NativeError
    from model.quantization.quantize import save_quantized

    changes = lora_of(lora, lora_alpha)
    with errors_as_lines(DataError, NativeError):
        folder = locate(model)
        if out.resolve() == folder.resolve():
            raise typer.BadParameter("is the model's own folder", param_hint="OUT")
        checkpoint = load_checkpoint(folder, lora=changes)
        if checkpoint.tuned_state is not None:
            typer.echo("everstream: the model's tuned state is left out", err=True)
        save_quantized(out, checkpoint, dtype)
        typer.echo(f"{out}: {_num_bytes(out):,} bytes of weights, before {_num_bytes(folder):,}")
        if evaluate is not None:
            _compare(checkpoint, evaluate, threads)


def _num_bytes(folder: Path) -> int:
    """Size of the weight files in bytes."""
    from model.weights.folder import weight_files

    return sum(file.stat().st_size for file in weight_files(folder))


def _compare(checkpoint: Checkpoint, path: Path, threads: int) -> None:
    """Prints a line of JSON per precision; ``loss`` is relative to float32."""
    from model.native.runtime import DTYPES, Runtime
    from model.quantization.evaluate import evaluate

    exact: float | None = None
    for dtype in DTYPES:
        runtime = Runtime(checkpoint.config, checkpoint.weights, dtype, threads)
        result = evaluate(runtime, checkpoint.tokenizer, path).bits_per_byte
        exact = result if exact is None else exact
        values = {
            "data": path.name,
            "mode": "windows",
            "dtype": dtype,
            "bits_per_byte": round(result, 4),
            "loss": round(result - exact, 4),
        }
        typer.echo(json.dumps(values))
