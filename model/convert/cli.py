"""The command ``everstream convert``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from model.training.cli import Texts, errors_as_lines


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("convert")(convert_command)


def convert_command(
    source: Annotated[
        str,
        typer.Option(
            "--from", help="Model to convert: folder or hub id (GPT-2, Llama or Everstream)."
        ),
    ],
    to: Annotated[
        str, typer.Option(help="Attention mechanism with a constant state, such as performer.")
    ],
    data: Texts,
    valid: Annotated[Path, typer.Option(help="UTF-8 text for validation.", exists=True)],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the model is written to OUT/model.")
    ],
    attention_options: Annotated[
        str, typer.Option(help="Options of the mechanism, as a JSON object.")
    ] = "{}",
    match_steps: Annotated[
        int, typer.Option(help="Number of steps that match each layer's attention; 0 is none.")
    ] = 500,
    steps: Annotated[int, typer.Option(help="Number of steps that fine-tune all weights.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Number of streams read in parallel.")] = 8,
    window: Annotated[int, typer.Option(help="Number of tokens per stream and step.")] = 512,
    optimizer: Annotated[str, typer.Option(help="Optimizer: muon or adamw.")] = "muon",
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of both stages.")] = 1e-3,
    seed: Annotated[
        int, typer.Option(help="Seed of new weights and of the order of the data.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Number of threads of torch.", min=1)] = None,
    eval_every: Annotated[int, typer.Option(help="Number of steps between validations.")] = 100,
) -> None:
    """Convert a trained model to an attention with a constant state."""
    from rich.console import Console

    from model.convert.convert import Conversion, convert
    from model.training.config import TrainConfig
    from model.training.data import Source

    with errors_as_lines():
        training = TrainConfig(
            data=tuple(Source(path) for path in data),
            out=out,
            valid=(valid,),
            num_steps=steps,
            batch_size=batch_size,
            window=window,
            optimizer=optimizer,
            learning_rate=learning_rate,
            warmup_steps=max(1, steps // 20),
            seed=seed,
            device=device,
            precision=precision,
            threads=threads,
            eval_every=eval_every,
        )
        report = convert(
            Conversion(source, to, json.loads(attention_options), match_steps, training)
        )
    report.print(Console())
    typer.echo(f"the model is in {out / 'model'}, the report in {out / 'report.json'}")
