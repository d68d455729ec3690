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
        Literal["int8", "int4", "bfloat16"], typer.Option(help="Type of the stored weights.")
    ] = "int8",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text for whose inputs int4 is rounded; without, to the nearest.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text on which to measure bits per byte of each precision.", exists=True
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Number of threads of calibration and evaluation.", min=1)
    ] = 1,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Write a checkpoint with weights of a smaller type.

    With --evaluate, also measure the loss of quality.
    """
    from model.checkpoint import load_checkpoint, locate
    from model.evaluation import DataError
    from model.hub.on_disk import num_bytes
    from model.native.runtime import NativeError
    from model.quantization.quantize import save_int4, save_quantized

    if calibration is not None and dtype != "int4":
        raise typer.BadParameter("is for --dtype int4", param_hint="--calibration")
    changes = lora_of(lora, lora_alpha)
    with errors_as_lines(DataError, NativeError):
        folder = locate(model)
        if out.resolve() == folder.resolve():
            raise typer.BadParameter("is the model's own folder", param_hint="OUT")
        checkpoint = load_checkpoint(folder, lora=changes)
        if checkpoint.tuned_state is not None:
            typer.echo("everstream: the model's tuned state is left out", err=True)
        if dtype == "int4":
            save_int4(out, checkpoint, calibration, threads)
        else:
            save_quantized(out, checkpoint, dtype)
        typer.echo(f"{out}: {num_bytes(out):,} bytes of weights, before {num_bytes(folder):,}")
        if evaluate is not None:
            calibrated = load_checkpoint(out) if calibration else None
            _compare(checkpoint, calibrated, evaluate, threads)


def _compare(
    checkpoint: Checkpoint, calibrated: Checkpoint | None, path: Path, threads: int
) -> None:
    """Prints a line of JSON per precision, of int4 also one of the ``calibrated`` weights.

    ``loss`` is relative to float32.
    """
    from model.evaluation import evaluate_native
    from model.native.runtime import DTYPES, Runtime

    exact: float | None = None
    rows = [(checkpoint, dtype) for dtype in DTYPES]
    for model, dtype in [*rows, *([(calibrated, "int4")] if calibrated else [])]:
        runtime = Runtime(model.config, model.weights, dtype, threads)
        result = evaluate_native(runtime, checkpoint.tokenizer, path).bits_per_byte
        exact = result if exact is None else exact
        values = {
            "data": path.name,
            "mode": "windows",
            "dtype": dtype,
            **({"calibration": model.calibration} if model is calibrated else {}),
            "bits_per_byte": round(result, 4),
            "loss": round(result - exact, 4),
        }
        typer.echo(json.dumps(values))
