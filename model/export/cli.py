"""The command ``everstream export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from model.command_line import LoraAlpha, LoraFiles, errors_as_lines, lora_of

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint

Format = Literal["everstream", "gguf", "pth", "hf"]
Dtype = Literal["float32", "bfloat16", "float16", "q8_0", "q4_0"]


def export_command(
    model: Annotated[
        str, typer.Argument(help="Folder, .pth, .st or .gguf file, bundled model or hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write, or file for gguf and pth.")],
    format: Annotated[
        Format,
        typer.Option(
            help="Format to write: gguf and hf for RWKV-7, Mamba, Qwen3.5, LFM2 and Llama, gguf for"
            " Granite, Nemotron-H, Falcon-H1 and Jamba too, hf for LFM3 and delta, pth for RWKV-7."
        ),
    ] = "everstream",
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the stored weights; q8_0 and q4_0 are for gguf only.")
    ] = "bfloat16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer file, if it is not in the model's folder.")
    ] = None,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Write a model in another format or dtype."""
    from model.checkpoint import load_checkpoint, locate

    if dtype in ("q8_0", "q4_0") and format != "gguf":
        raise typer.BadParameter(f"{dtype} is for --format gguf", param_hint="--dtype")
    changes = lora_of(lora, lora_alpha)
    is_file = format in ("gguf", "pth")
    if is_file and out.suffix != f".{format}":
        raise typer.BadParameter(f"must end in .{format}", param_hint="OUT")
    with errors_as_lines():
        source = locate(model)
        if out.resolve() == source.resolve():
            kind = "file" if source.is_file() else "folder"
            raise typer.BadParameter(f"is the model's own {kind}", param_hint="OUT")
        checkpoint = load_checkpoint(source, tokenizer=tokenizer, lora=changes)
        _write(checkpoint, out, format, dtype, is_file)
    if checkpoint.tuned_state is not None and format != "pth":
        typer.echo("everstream: the model's tuned state is left out: only pth has it", err=True)
    size = out.stat().st_size if is_file else sum(f.stat().st_size for f in out.iterdir())
    typer.echo(f"{out}: {size:,} bytes")


def _write(checkpoint: Checkpoint, out: Path, format: str, dtype: str, is_file: bool) -> None:
    """Writes a file under a temporary name, and renames it when it is complete."""
    if format == "everstream":
        import torch

        from model.checkpoint import save_chat, save_checkpoint

        save_checkpoint(out, checkpoint.model, checkpoint.tokenizer, getattr(torch, dtype))
        save_chat(out, checkpoint)
        return
    from model.export import writer_of

    write = writer_of(checkpoint, format)
    if not is_file:
        write(out, checkpoint, dtype)
        return
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        write(unfinished, checkpoint, dtype)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
