"""The command ``everstream convert``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from model.training.cli import errors_as_lines


def register(app: typer.Typer) -> None:
    """Adds the command to ``app``."""
    app.command("convert")(convert_command)


#: The form of `model.convert.linearize`, next to the names of mechanisms.
CONSTANT = "constant"


def convert_command(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Model to convert: folder or hub id (GPT-2, Llama or Everstream); for constant"
            " also a GGUF file.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            help="Attention mechanism with a constant state, such as performer; or constant:"
            " windows and far parts for a published Llama, Qwen2 or Qwen3."
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(help="UTF-8 text; repeat for several. For constant also FILE:WEIGHT."),
    ],
    valid: Annotated[
        list[Path], typer.Option(help="UTF-8 text for validation; repeatable.", exists=True)
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the model is written to OUT/model.")
    ],
    attention_options: Annotated[
        str | None, typer.Option(help="Options of the mechanism, as a JSON object.")
    ] = None,
    match_steps: Annotated[
        int | None,
        typer.Option(
            help="Number of steps that match each layer's attention; default: 500; 0 is none."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Number of steps that fine-tune all weights; default: 1000."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Optimizer: muon or adamw; default: muon.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of both stages; default: 0.001.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="constant: state of a session, such as 6mb, or a .json file of a plan; default:"
            " that of a window of 256 tokens."
        ),
    ] = None,
    chat_tokens: Annotated[
        int | None,
        typer.Option(help="constant: tokens of chats that the source writes; default: 500000."),
    ] = None,
    match_tokens: Annotated[
        int | None, typer.Option(help="constant: tokens that match layers; default: 50000.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="constant: tokens of distillation; default: 1000000.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="constant: ranks of low-rank updates as a JSON object of qkv, out, up and down,"
            ' or all for all weights; default: {"qkv": 32, "out": 16}.'
        ),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="constant: write whole weights, not an adapter.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Number of streams read in parallel; default: 8, for constant 1."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens per stream and step; default: 512; for constant 1024, and"
            " some sequences are two or four times as long."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of new weights and of the order of the data.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Number of threads of torch.", min=1)] = None,
    eval_every: Annotated[int, typer.Option(help="Number of steps between validations.")] = 100,
) -> None:
    """Convert a trained model to an attention with a constant state.

    With --to constant, run the same command again to continue an interrupted conversion.
    """
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "window": window,
        "seed": seed,
        "device": device,
        "precision": precision,
        "threads": threads,
        "eval_every": eval_every,
    }
    of_mechanisms: dict[str, Any] = {
        "attention_options": attention_options,
        "match_steps": match_steps,
        "steps": steps,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
    }
    of_constant: dict[str, Any] = {
        "state": state,
        "chat_tokens": chat_tokens,
        "match_tokens": match_tokens,
        "tokens": tokens,
        "ranks": ranks,
        "merged": merged or None,
    }
    with errors_as_lines():
        if to == CONSTANT:
            chosen = _chosen(to, common | of_constant, of_mechanisms)
            finished = _to_constant(source, data, valid, out, chosen)
        else:
            chosen = _chosen(to, common | of_mechanisms, of_constant)
            finished = _to_mechanism(source, to, data, valid, out, chosen)
    typer.echo(finished)


def _chosen(to: str, options: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The options that were given. Raises `ConfigError` where one is for another form."""
    from model.files import ConfigError

    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does nothing with --to {to}")
    return {name: value for name, value in options.items() if value is not None}


def _to_mechanism(
    source: str, to: str, data: list[str], valid: list[Path], out: Path, chosen: dict[str, Any]
) -> str:
    from rich.console import Console

    from model.convert.convert import Conversion, convert
    from model.files import ConfigError
    from model.training.data import Source
    from model.training.loop import TrainConfig

    if len(valid) > 1:
        raise ConfigError(f"--to {to} has one --valid, not {len(valid)}")
    attention_options = json.loads(chosen.pop("attention_options", "{}"))
    match_steps, steps = chosen.pop("match_steps", 500), chosen.pop("steps", 1000)
    training = TrainConfig(
        data=tuple(Source(Path(path)) for path in data),
        out=out,
        valid=tuple(valid),
        num_steps=steps,
        warmup_steps=max(1, steps // 20),
        **{"batch_size": 8, "window": 512, "optimizer": "muon", "learning_rate": 1e-3, **chosen},
    )
    report = convert(Conversion(source, to, attention_options, match_steps, training))
    report.print(Console())
    return f"the model is in {out / 'model'}, the report in {out / 'report.json'}"


def _to_constant(
    source: str, data: list[str], valid: list[Path], out: Path, chosen: dict[str, Any]
) -> str:
    from model.convert.linearize.conversion import Settings, convert_to_constant
    from model.files import ConfigError
    from model.memory import keep_freed_memory
    from model.training.data import Source
    from model.training.loop import signals_remembered

    keep_freed_memory()
    if "ranks" in chosen:
        ranks = None if chosen["ranks"] == "all" else json.loads(chosen["ranks"])
        if not isinstance(ranks, dict | None):
            raise ConfigError(f"--ranks must be a JSON object, or all, not {ranks!r:.80}")
        chosen["ranks"] = ranks
    texts = tuple(Source.parse(text) for text in data)
    settings = Settings(source, out, texts, tuple(valid), **chosen)
    with signals_remembered() as stop:
        if not convert_to_constant(settings, stop, typer.echo):
            return f"stopped; all is in {out}, and the same command again continues"
    return f"the model is in {out / 'model'}, the report in {out / 'report.json'}"
