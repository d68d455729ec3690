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
        typer.Option("--from", help="Folder or hub id: GPT-2, Llama, or a checkpoint of ours."),
    ],
    to: Annotated[str, typer.Option(help="Mechanism with a constant state, such as performer.")],
    data: Texts,
    valid: Annotated[Path, typer.Option(help="Validation text.", exists=True)],
    out: Annotated[Path, typer.Option(help="Folder of the run; its model comes into OUT/model.")],
    attention_options: Annotated[str, typer.Option(help="JSON object of its options.")] = "{}",
    match_steps: Annotated[
        int, typer.Option(help="Steps of matching each layer's attention; 0 for none.")
    ] = 500,
    steps: Annotated[int, typer.Option(help="Steps of fine-tuning all weights.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Streams read side by side.")] = 8,
    window: Annotated[int, typer.Option(help="Tokens per stream and step.")] = 512,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    learning_rate: Annotated[float, typer.Option(help="Peak, of both stages.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of new weights and of the order of the data.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of torch.", min=1)] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between validations.")] = 100,
) -> None:
    """Give a trained model an attention with a constant state."""
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
