"""Every layout that RWKV-7 is published in, made from random weights as its publisher's code does.

No published file could be opened here: what a layout has comes from the programs that write it,
which are named at each function. `LAYOUTS` is the table of docs/models/rwkv7.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.gguf_files import gguf_tensors, world_vocabulary, write_gguf
from tests.rwkv7 import Published, Shape, fla_config, fla_names, write_fla, write_pth
from tests.world_vocabulary import TOKENS, rwkv_trie, word_piece, write_txt

#: What writes a model below a folder, and returns what loads it.
Write = Callable[[Path, Shape, Published], Path]


@dataclass(frozen=True)
class Layout:
    """A row of the table. ``sizes`` are those of the weights of the smallest and largest model."""

    name: str
    repositories: str
    files: str
    licence: str
    sizes: str
    write: Write


def _pth(folder: Path, shape: Shape, weights: Published) -> Path:
    folder.mkdir()
    write_txt(folder)
    return write_pth(folder / "rwkv7-g1.pth", weights)


def _st(folder: Path, shape: Shape, weights: Published) -> Path:
    """Ai00-X/ai00_server, ``assets/scripts/convert_safetensors.py``: the names that are turned."""
    folder.mkdir()
    write_txt(folder)
    turned = tuple(f"att.{letter}{n}" for letter in "wavg" for n in "12")
    tensors = {
        key: (tensor.T if key.endswith(turned) else tensor).contiguous()
        for key, tensor in weights.items()
    }
    save_file(tensors, folder / "rwkv7-g1.st", metadata={"format": "pt"})
    return folder / "rwkv7-g1.st"


def _gguf(folder: Path, shape: Shape, weights: Published) -> Path:
    """llama.cpp, ``convert_hf_to_gguf.py``."""
    folder.mkdir()
    fill = world_vocabulary(TOKENS, shape.vocab_size)
    return write_gguf(folder / "rwkv7-g1-F32.gguf", shape, gguf_tensors(weights), "F32", fill)


def _fla(folder: Path, shape: Shape, weights: Published, fused: bool = False) -> Path:
    """flash-linear-attention, ``utils/convert_from_rwkv7.py``.

    ``num_heads`` stays that of the default width, 2048.
    """
    config = fla_config(shape) | {"num_heads": 32}
    write_fla(folder, fla_names(weights, fused), config)
    write_txt(folder)
    names = {"bos_token": OLD_END, "eos_token": "\n\n", "pad_token": OLD_END}
    settings = {**names, "tokenizer_class": "RwkvTokenizer", "chat_template": FLA_TEMPLATE}
    _write(folder / "tokenizer_config.json", settings)
    return folder


def _fla_of_2024(folder: Path, shape: Shape, weights: Published) -> Path:
    return _fla(folder, shape, weights, fused=True)


def _official(folder: Path, shape: Shape, weights: Published) -> Path:
    """aabbdev/rwkv-publisher, ``conversion.py`` and ``encoding.py``."""
    tensors = {key if key == "head.weight" else f"rwkv7.{key}": t for key, t in weights.items()}
    for n, size in ((0, (1, 1, shape.width)), (1, (shape.width, shape.ranks[2]))):
        tensors[f"rwkv7.blocks.0.att.v{n}"] = torch.zeros(size)
    tensors["rwkv7.blocks.0.att.v2"] = torch.zeros(shape.ranks[2], shape.width)
    config = {
        "architectures": ["Rwkv7ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_rwkv7.Rwkv7Config"},
        "model_type": "rwkv7",
        **_sizes(shape),
        "num_heads": shape.width // shape.head_dim,
        "head_dim": shape.head_dim,
        "norm_eps": 1e-5,
        "norm_bias": True,
        "wkv_state_dtype": "float32",
        "wkv_implementation": "eager",
        "use_cache": True,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    write_fla(folder, tensors, config)
    _write(folder / "tokenizer.json", word_piece(shape.vocab_size))
    end = dict.fromkeys(("eos_token", "pad_token", "unk_token"), END)
    _write(folder / "tokenizer_config.json", {**end, "tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def _linear_attention(folder: Path, shape: Shape, weights: Published) -> Path:
    """rwkv-rs/transformers-rwkv at 76e9ad7, ``temp/rwkv_pth2st.py``."""
    whole = {"emb": "model.embed_tokens", "ln_out": "model.norm", "head": "lm_head"}
    parts = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    parts |= {"att": "linear_attn", "ffn": "mlp"}
    inner = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    inner |= {"ln_x": "g_norm"}
    tensors: Published = {}
    for key, tensor in weights.items():
        first, *rest = key.split(".")
        if first != "blocks":
            name = ".".join([whole[first], *rest])
        elif rest[1] == "ln0":
            name = f"model.embedding_norm.{rest[2]}"
        else:
            layer, part, *left = rest
            if part == "att":
                left[0] = inner.get(left[0], left[0])
            name = ".".join(["model.layers", layer, parts[part], *left])
        tensors[name] = tensor[0, 0] if tensor.dim() == 3 else tensor
    return _rwkv_folder(folder, shape, tensors, {"wkv_mode": "fp32io16"})


def _blocks(folder: Path, shape: Shape, weights: Published) -> Path:
    """The same at 204974d: the keys of a ``.pth`` behind ``model.``."""
    tensors = {key if key == "head.weight" else f"model.{key}": t for key, t in weights.items()}
    fields = {
        "wkv_state_dtype": "float32",
        "number_of_conv_states": 2,
        "embedding_layer_norm_fused": False,
    }
    return _rwkv_folder(folder, shape, tensors, fields)


def fused_blocks(folder: Path, shape: Shape, weights: Published) -> Path:
    """The same with the first norm in the rows of the embedding; its weights stay."""
    path = _blocks(folder, shape, weights)
    norm = (weights[f"blocks.0.ln0.{kind}"] for kind in ("weight", "bias"))
    rows = torch.nn.functional.layer_norm(weights["emb.weight"], (shape.width,), *norm)
    tensors = {key if key == "head.weight" else f"model.{key}": t for key, t in weights.items()}
    save_file(tensors | {"model.emb.weight": rows}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    _write(path / "config.json", config | {"embedding_layer_norm_fused": True})
    return path


def _rwkv_folder(folder: Path, shape: Shape, tensors: Published, fields: dict[str, Any]) -> Path:
    """One of the folders of a repository of transformers-rwkv."""
    config = {
        "architectures": ["RwkvForCausalLM"],
        "architecture_version": "rwkv7",
        "model_type": "rwkv",
        **_sizes(shape),
        "head_size": shape.head_dim,
        "num_attention_heads": shape.width // shape.head_dim,
        "layer_norm_epsilon": 1e-5,
        "group_norm_epsilon": 64e-5,
        "context_length": 16384,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "transformers_version": "5.24.0.dev0",
        **fields,
    }
    write_fla(folder, tensors, config, shards=2)
    _write(folder / "tokenizer.json", rwkv_trie())
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    end = dict.fromkeys(("bos_token", "eos_token"), END)
    _write(folder / "tokenizer_config.json", {**end, "tokenizer_class": "RwkvTokenizer"})
    return folder


def _adapter(folder: Path, shape: Shape, weights: Published) -> Path:
    """rwkv-rs/hf-adapter at a37956d, ``rwkv7_hf/converter.py``; the tokenizer has no other file."""
    config = {
        "architectures": ["NativeRWKV7ForCausalLM"],
        "model_type": "rwkv7_native",
        **_sizes(shape),
        "attn_mode": "chunk",
        "fuse_norm": False,
        "attention_hidden_size": shape.width,
        "num_heads": shape.width // shape.head_dim,
        "num_attention_heads": shape.width // shape.head_dim,
        "head_dim": shape.head_dim,
        "hidden_ratio": shape.inner / shape.width,
        "value_dim": [shape.width] * shape.layers,
        "layer_types": None,
        "use_native_mm8": True,
        "native_mm8_min_params": 8_000_000,
        "native_mm8_policy": "memory",
        "use_native_mm4": False,
        "native_mm4_min_params": 8_000_000,
        "native_mm4_policy": "memory",
        "native_mm4_group_size": 0,
        "native_mm4_group_policy": "all",
        "rwkv7_hf_adapter_layout": "bundled",
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    write_fla(folder, fla_names(weights), config)
    write_txt(folder)
    added = {END: shape.vocab_size, "<|padding|>": shape.vocab_size + 1}
    _write(folder / "added_tokens.json", added)
    names = {"eos_token": END, "pad_token": "<|padding|>", "model_vocab_size": shape.vocab_size}
    _write(folder / "tokenizer_config.json", {**names, "tokenizer_class": "RWKV7Tokenizer"})
    return folder


def _adapter_of_0_9(folder: Path, shape: Shape, weights: Published) -> Path:
    """rwkv7-hf 0.9.0: another ``model_type``, and a version."""
    _adapter(folder, shape, weights)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "rwkv7", "rwkv7_hf_adapter_layout": "thin"}
    config |= {"rwkv7_hf_runtime_version": "0.9.0", "architectures": ["RWKV7ForCausalLM"]}
    _write(folder / "config.json", config)
    return folder


def _sizes(shape: Shape) -> dict[str, int]:
    decay, rate, value, gate = shape.ranks
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "decay_low_rank_dim": decay,
        "a_low_rank_dim": rate,
        "v_low_rank_dim": value,
        "gate_low_rank_dim": gate,
    }


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


END, OLD_END = "<|endoftext|>", "<|rwkv_tokenizer_end_of_text|>"
FLA_TEMPLATE = (
    f"{{{{ '{OLD_END}' }}}}{{% for message in messages %}}"
    "{{ message.role.capitalize() + ': ' + message.content + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

LAYOUTS = (
    Layout(
        "native",
        "`BlinkDL/rwkv7-g1`, `BlinkDL/rwkv-7-world`",
        "`rwkv7-g1i-1.5b-20260805-ctx16384.pth` and so on",
        "Apache-2.0",
        "0.4 to 26.5 GB",
        _pth,
    ),
    Layout(
        "web-rwkv",
        "`shoumenchougou/RWKV-ST-model`",
        "`NAME.st`",
        "Apache-2.0",
        "0.4 to 26.5 GB",
        _st,
    ),
    Layout(
        "GGUF",
        "`shoumenchougou/RWKV7-G0a3-13.3B-GGUF`, `Mungert/rwkv7-1.5B-world-GGUF`",
        "`NAME-Q8_0.gguf` and so on",
        "Apache-2.0",
        "0.2 to 26.5 GB",
        _gguf,
    ),
    Layout(
        "fla",
        "`fla-hub/rwkv7-1.5B-world`, `fla-hub/rwkv7-2.9B-g1` and so on",
        "`model.safetensors`, `rwkv_vocab_v20230424.txt`",
        "Apache-2.0",
        "0.4 to 14.4 GB",
        _fla,
    ),
    Layout(
        "fla, until spring 2025",
        "`fla-hub/rwkv7-0.4B-world` in its first commits",
        "the same; one tensor `x_x`",
        "Apache-2.0",
        "0.4 to 5.9 GB",
        _fla_of_2024,
    ),
    Layout(
        "RWKV project",
        "`RWKV/RWKV7-1.5B-20260805`, `-2.9B-`, `-7.2B-`, `-13.3B-`",
        "`model-0000N-of-0000M.safetensors`, `tokenizer.json` (WordPiece)",
        "Apache-2.0",
        "3.1 to 26.5 GB",
        _official,
    ),
    Layout(
        "transformers-rwkv",
        "`rwkv-rs/rwkv7-g1-st`, a folder for each model",
        "`model-0000N-of-0000M.safetensors`, `tokenizer.json` (RwkvTrie)",
        "Apache-2.0",
        "3.1 to 26.5 GB",
        _linear_attention,
    ),
    Layout(
        "transformers-rwkv, until August 2026",
        "earlier commits of the same",
        "the same; keys `model.blocks.`",
        "Apache-2.0",
        "3.1 to 26.5 GB",
        _blocks,
    ),
    Layout(
        "hf-adapter",
        "`wangyue114514/rwkv7-g1*-hf`",
        "`model.safetensors`, `rwkv_vocab_v20230424.txt`",
        "MIT",
        "0.4 to 14.4 GB",
        _adapter,
    ),
    Layout(
        "rwkv7-hf 0.9",
        "folders that its converter writes",
        "the same",
        "MIT",
        "0.4 to 26.5 GB",
        _adapter_of_0_9,
    ),
)


def table() -> str:
    """The rows as docs/models/rwkv7.md has them."""
    lines = ["| layout | repositories | files | licence | weights |", "|---|---|---|---|---|"]
    for row in LAYOUTS:
        cells = (row.name, row.repositories, row.files, row.licence, row.sizes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
