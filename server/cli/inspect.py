"""``everstream inspect``: what a checkpoint is, and the memory of its sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from model.architectures.config import Config
from model.bundled_models import DEFAULT_MODEL
from model.chat import PLAIN, ChatTemplate
from model.checkpoint import Checkpoint, load_checkpoint, locate
from model.command_line import LoraAlpha, LoraFiles, lora_of
from model.hub.on_disk import num_bytes
from model.state import StateLayout, kv_cache_bytes_per_token
from model.tensor_spec import POSITION_BLOCK
from model.weights import StoredWeights, num_parameters
from server.cli.options import Context, PastMode, StateDtype, TokenizerFile, clear_errors

if TYPE_CHECKING:
    from rich.table import Table

    from model.foreign import MultiTokenHead

GIB = 1 << 30

#: Of one weight.
SERVED_BYTES = {"bfloat16": 2, "int8": 1}
TOKEN_COUNTS = (1_000, 100_000, 1_000_000)


def format_bytes(count: int) -> str:
    """A size with three digits or so: ``438 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .pth, .st or .gguf file, bundled model or hub id.")
    ] = None,
    tokenizer: TokenizerFile = None,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
    state_dtype: StateDtype = "float32",
    context: Context = None,
    past: PastMode = "stop",
) -> None:
    """Show a model's parameters and the memory of a session.

    For comparison it also shows the memory of a KV cache of the same shape.
    """
    from rich.console import Console

    from model.bounds import Bound, bounded

    console, source = Console(), model or str(DEFAULT_MODEL)
    with clear_errors():
        checkpoint = load_checkpoint(source, tokenizer=tokenizer, lora=lora_of(lora, lora_alpha))
        checkpoint = bounded(checkpoint.with_state_dtype(state_dtype), Bound(context, past))
        console.print(_model_table(checkpoint, num_bytes(locate(source))))
        console.print(_memory_table(checkpoint))


def _model_table(checkpoint: Checkpoint, stored_bytes: int) -> Table:
    from rich.table import Table

    config = checkpoint.config
    table = Table(title="model", show_header=False)
    state_bytes = StateLayout.of(config).num_bytes
    tokenizer = checkpoint.tokenizer
    for name, value in (
        ("family", config.model_type.removeprefix("everstream-")),
        ("attention", config.attention),
        ("parameters", f"{num_parameters(config):,}"),
        ("layers x width", f"{config.num_hidden_layers} x {config.hidden_size}"),
        ("heads x features", f"{config.num_attention_heads} x {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("weights stored", _stored(checkpoint, stored_bytes)),
        ("weights in memory", _served(num_parameters(config))),
        *_bound_rows(config),
        ("state of a session", f"{state_bytes:,} bytes{_sums(config)}"),
        ("sessions per GiB", f"{GIB // state_bytes:,}" if state_bytes else "any number"),
        ("tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids"),
        ("chat template", _template(checkpoint.chat_template)),
        *([("tuned state", "merged in")] if checkpoint.tuned_state is not None else []),
        *([("multi-token head", _head(checkpoint.head))] if checkpoint.head is not None else []),
        ("digest", checkpoint.digest[:16]),
    ):
        table.add_row(name, value)
    if config.attention_options:
        table.add_row("options", str(config.attention_options))
    return table


def _bound_rows(config: Config) -> list[tuple[str, str]]:
    """What is known of a bounded past; the state of a session is that at the bound."""
    if not config.context:
        return []
    layout = StateLayout.of(config)
    ends = "then texts end" if config.past == "stop" else "then old tokens slide out"
    return [
        ("model's longest text", f"{config.max_context:,} tokens"),
        ("context", f"{config.context:,} tokens, {ends}"),
        ("fixed state", f"{layout.fixed_bytes:,} bytes"),
        ("state per token", f"{layout.group_bytes // POSITION_BLOCK:,} bytes"),
    ]


def _head(head: MultiTokenHead) -> str:
    return f"{num_parameters(head.config):,} parameters, drafts where that pays"


def _sums(config: Config) -> str:
    return "" if config.state_dtype == "float32" else f", sums in {config.state_dtype}"


def _template(template: ChatTemplate) -> str:
    """Whether it is a text of the checkpoint's or its family's, and whether the model thinks."""
    if template.source == PLAIN:
        return "none: each message is a paragraph"
    size = f"{len(template.source):,} characters"
    return f"{size}, with thinking" if template.thinking is not None else size


def _served(num_weights: int) -> str:
    """What a server holds at least by its ``--dtype``: scales and padding come on top."""
    megabytes = {dtype: num_weights * width / 1e6 for dtype, width in SERVED_BYTES.items()}
    return ", ".join(f"{size:,.0f} MB in {dtype}" for dtype, size in megabytes.items())


def _stored(checkpoint: Checkpoint, stored_bytes: int) -> str:
    size = f"{stored_bytes:,} bytes"
    weights = checkpoint.weights
    if not isinstance(weights, StoredWeights):
        return size
    calibrated = f", calibrated with {checkpoint.calibration}" if checkpoint.calibration else ""
    return f"{weights.stored_dtype}{calibrated}, {size}"


def _memory_table(checkpoint: Checkpoint) -> Table:
    from rich.table import Table

    config = checkpoint.config
    table = Table("tokens seen", "state", "KV cache", title="one session's memory")
    layout = StateLayout.of(config)
    for count in TOKEN_COUNTS:
        cache = kv_cache_bytes_per_token(config) * count
        table.add_row(f"{count:,}", _state_at(config, layout, count), format_bytes(cache))
    if config.context:
        table.caption = "KV cache: 16 bits, were all layers attention"
        return table
    table.caption = "KV cache: 16 bits, softmax attention of the same shape"
    return table


def _state_at(config: Config, layout: StateLayout, count: int) -> str:
    if config.context and config.past == "stop" and count > config.context:
        return "more than the context"
    return format_bytes(layout.used_bytes(count))
