"""A small good file of each format that a stranger may hand to a user, made once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from model.hub.base import describe
from model.state import StateLayout
from model.tokenization.world import FILE as WORLD
from server.engine.session import SessionValue, StateBlock
from server.models.backend import Backend
from server.models.storage import identity_of
from server.store.base import Identity
from server.store.states import export_session, export_state, named_state
from tests.adapted import write_adapter, write_base_file
from tests.gguf_files import byte_level_vocabulary, gguf_tensors, world_vocabulary, write_gguf
from tests.published_layouts import LAYOUTS, Layout
from tests.rwkv7 import Shape, fla_config, fla_names, published, write_fla, write_pth
from tests.rwkv_cpp import rwkv_cpp_tensors, write_rwkv_cpp
from tests.tiny import tiny_checkpoint, tiny_tokenizer, write_model

SHAPE = Shape(301, 32, 2, 16, 48, (8, 8, 4, 12))
WORLD_TOKENS = {id + 1: bytes([id]) for id in range(256)} | {257: b"\n\n", 258: b" the", 259: b"On"}


@dataclass(frozen=True)
class Format:
    """``name`` is the folder that has the files; ``entry`` reads ``path``, or the folder, "."."""

    name: str
    entry: str
    path: str
    write: Callable[[Path], None]


def world_text() -> bytes:
    lines = (f"{id} {token!r} {len(token)}\n" for id, token in WORLD_TOKENS.items())
    return "".join(lines).encode()


def _own(folder: Path) -> None:
    write_model(folder)
    settings = {"eos_token": "<|endoftext|>", "bos_token": None, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}\n{{ m.content }}{% endfor %}"
    )


def _hugging_face(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    write_fla(folder, weights, config)
    tiny_tokenizer().save(folder / "tokenizer.json")


def _llama(folder: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "rms_norm_eps": 1e-6}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config |= {"intermediate_size": 48, "tie_word_embeddings": True, "rope_theta": 10000.0}
    layer = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    layer |= {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32)}
    layer |= {"self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32)}
    layer |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    whole = {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,)}
    _hugging_face(folder, config, shapes | whole)


def _gla(folder: Path) -> None:
    config = {"model_type": "gla", "vocab_size": 300, "hidden_size": 32, "num_heads": 2}
    config |= {"num_hidden_layers": 1, "expand_k": 0.5, "expand_v": 1.0, "num_kv_heads": 1}
    config |= {"intermediate_size": 48, "tie_word_embeddings": True, "elementwise_affine": False}
    layer = {"attn_norm": (32,), "mlp_norm": (32,), "attn.q_proj": (16, 32)}
    layer |= {"attn.k_proj": (8, 32), "attn.v_proj": (16, 32), "attn.o_proj": (32, 32)}
    layer |= {"attn.g_proj": (32, 32), "attn.gk_proj.0": (16, 32), "attn.gk_proj.1": (8, 16)}
    layer |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.layers.0.attn.gk_proj.1.bias"] = (8,)
    whole = {"model.embeddings.weight": (300, 32), "model.norm.weight": (32,)}
    _hugging_face(folder, config, shapes | whole)


def _fla(folder: Path) -> None:
    write_fla(folder, fla_names(published(SHAPE)), fla_config(SHAPE), shards=2)
    (folder / WORLD).write_bytes(world_text())


def _pth(folder: Path) -> None:
    write_pth(folder / "model.pth", published(SHAPE))
    (folder / WORLD).write_bytes(world_text())


def _rwkv_cpp(folder: Path) -> None:
    write_rwkv_cpp(folder / "model.bin", SHAPE, rwkv_cpp_tensors(published(SHAPE)))
    (folder / WORLD).write_bytes(world_text())


def _gguf(folder: Path) -> None:
    fill = world_vocabulary(WORLD_TOKENS, SHAPE.vocab_size)
    write_gguf(folder / "model.gguf", SHAPE, gguf_tensors(published(SHAPE)), "F16", fill)


def _gguf_bpe(folder: Path) -> None:
    fill = byte_level_vocabulary(tiny_tokenizer(), SHAPE.vocab_size)
    write_gguf(folder / "model.gguf", SHAPE, gguf_tensors(published(SHAPE)), "Q8_0", fill)


def _adapter(folder: Path) -> None:
    base = write_base_file(folder / "tiny.gguf")
    write_adapter(folder, describe(base))


def _state(folder: Path) -> None:
    (folder / "file").write_bytes(b"".join(export_state(named_state(VALUE), identity("own"))))


def _tuned(folder: Path, name: str) -> None:
    states = {f"blocks.{layer}.att.time_state": torch.ones(2, 16, 16) for layer in range(2)}
    if name == "state.pth":
        write_pth(folder / name, states)
    else:
        save_file(states, folder / name)


def _session(folder: Path) -> None:
    (folder / "file").write_bytes(export_session(VALUE, identity("own"), b"key"))


def _keys(folder: Path) -> None:
    key = '[[key]]\nname = "ann"\nhash = "sha256:{}"\nscopes = ["generate"]\n'
    limits = "[key.limits]\nmax_running = 3\nmax_stored_bytes = '1GiB'\n"
    (folder / "keys.toml").write_text(key.format("0" * 64) + limits + key.format("1" * 64))
    (folder / "keys.toml").chmod(0o600)


def _settings(folder: Path) -> None:
    text = 'port = 9000\nmodel = ["a=b"]\nsession_ttl_s = 3.5\nhost = "::1"\n'
    (folder / "settings.toml").write_text(text)
    (folder / "settings.toml").chmod(0o600)


def _bin(folder: Path) -> None:
    weights, config = fla_names(published(SHAPE)), fla_config(SHAPE)
    write_fla(folder, weights, config, 2, "pytorch_model.bin")
    (folder / WORLD).write_bytes(world_text())


def _gguf_split(folder: Path) -> None:
    fill, tensors = world_vocabulary(WORLD_TOKENS, SHAPE.vocab_size), gguf_tensors(published(SHAPE))
    write_gguf(folder / "model.gguf", SHAPE, tensors, "Q4_0", fill, split=40)


def _published(layout: Layout) -> Format:
    def write(folder: Path) -> None:
        folder.rmdir()  # it is made
        layout.write(folder, SHAPE, published(SHAPE))

    path = "rwkv7-g1.st" if layout.name == "web-rwkv" else "."
    return Format(f"published {layout.name}", "model", path, write)


FORMATS = (
    Format("own", "model", ".", _own),
    Format("llama", "model", ".", _llama),
    Format("gla", "model", ".", _gla),
    Format("fla", "model", ".", _fla),
    Format("pth", "model", "model.pth", _pth),
    Format("rwkv.cpp", "model", "model.bin", _rwkv_cpp),
    Format("gguf", "model", "model.gguf", _gguf),
    Format("gguf-bpe", "model", "model.gguf", _gguf_bpe),
    Format("bin", "model", ".", _bin),
    Format("adapter", "model", ".", _adapter),
    Format("gguf-split", "model", "model-00001-of-00002.gguf", _gguf_split),
    *(_published(layout) for layout in LAYOUTS if layout.name not in ("native", "GGUF")),
    Format("state", "state", "file", _state),
    Format("tuned-pth", "state", "state.pth", lambda folder: _tuned(folder, "state.pth")),
    Format("tuned", "state", "state.safetensors", lambda f: _tuned(f, "state.safetensors")),
    Format("session", "session", "file", _session),
    Format("keys", "keys", "keys.toml", _keys),
    Format("settings", "settings", "settings.toml", _settings),
)


def identity(name: str) -> Identity:
    """Of the model that states of the format ``name`` belong to."""
    checkpoint = tiny_checkpoint("rwkv7" if name.startswith("tuned") else "gated")
    backend = Backend(
        "native", "float32", "float32", checkpoint.config, checkpoint.tokenizer, _no_runner
    )
    return identity_of(checkpoint, backend)


def _no_runner(pool: object) -> Any:
    raise AssertionError


def _value() -> SessionValue:
    num_bytes = StateLayout.of(tiny_checkpoint().config).num_bytes
    block = StateBlock(np.zeros(num_bytes, np.uint8))
    return SessionValue("s", "ann", position=3, pending=4, recent=(1, 2, 3), state=block)


VALUE = _value()


def write_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes each format into a folder of its own; what a child has to know of it."""
    models = {name: folder / "models" / name for name in ("gated", "rwkv7")}
    for name, path in models.items():
        write_model(path, attention=name)
    abouts: dict[str, dict[str, Any]] = {}
    for format in FORMATS:
        (folder / format.name).mkdir()
        format.write(folder / format.name)
        model = models["rwkv7" if format.name.startswith("tuned") else "gated"]
        abouts[format.name] = {
            "model": str(model),
            "identity": dataclasses.asdict(identity(format.name)),
        }
    return abouts
