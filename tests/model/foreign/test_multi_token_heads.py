"""Multi-token heads of published files: the same numbers, and left out where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import foreign
from model.checkpoint import load_checkpoint
from model.foreign import MultiTokenHead
from model.tokenizer import Tokenizer
from model.weights.gguf_file import GgufFile
from tests.hybrid_gguf import hybrid_tensors, write_hybrid
from tests.hybrids import HYBRIDS, theirs
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_gpt2 import edit_config
from tests.model.foreign.test_hybrids import TOLERANCE, edit_weights, multimodal, save, text_model
from tests.multi_token_heads import PublishedHead, from_start, in_torch
from tests.tiny import checkpoint_with_head, write_model_with_head

QWEN = "qwen35-wide"
OTHER = "the multi-token head is left out: only one of one layer drafts"
#: Our names of what surrounds the block in GGUF.
NEXTN = {"fc": "eh_proj", "norm": "shared_head_norm"}
NEXTN |= {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}


def folder_with(
    path: Path, tokenizer: Tokenizer, build: Callable[[], Any] = text_model
) -> tuple[Path, PublishedHead]:
    model = build()
    save(model, path, tokenizer)
    head = PublishedHead(model.config.get_text_config(), seed=1)
    edit_weights(path, lambda tensors: tensors.update(head.tensors()))
    return path, head


def assert_same(found: MultiTokenHead | None, wanted: PublishedHead) -> None:
    assert found is not None
    generator = torch.Generator().manual_seed(0)
    width = found.config.hidden_size
    embedded, hidden = (torch.randn(2, 50, width, generator=generator) for _ in range(2))
    ours = from_start(in_torch(found), embedded, hidden)
    torch.testing.assert_close(ours, wanted(embedded, hidden), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("build", [text_model, multimodal, lambda: multimodal(tied=True)])
def test_head_of_a_folder_equals_the_published_one(
    build: Callable[[], Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path, wanted = folder_with(tmp_path / "theirs", tokenizer, build)
    assert_same(load_checkpoint(path).head, wanted)


def test_model_is_the_same_without_its_head(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = load_checkpoint(save(text_model(), tmp_path / "plain", tokenizer))
    found = load_checkpoint(folder_with(tmp_path / "theirs", tokenizer)[0])
    assert plain.head is None
    assert found.config == plain.config
    assert torch.equal(found.model.parallel(tokens(10)), plain.model.parallel(tokens(10)))


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["mtp.norm.weight"]


def widen(tensors: dict[str, Tensor]) -> None:
    tensors["mtp.fc.weight"] = torch.ones(20, 60)


def add_layer(tensors: dict[str, Tensor]) -> None:
    tensors["mtp.layers.1.mlp.gate_proj.weight"] = torch.ones(37, 20)


@pytest.mark.parametrize(
    ("change", "fields", "line"),
    [
        (drop, {}, "lacks key 'mtp.norm.weight' (1 in all)"),
        (widen, {}, "mtp.fc.weight is [20, 60], wanted [20, 40]"),
        (add_layer, {}, "unknown key 'mtp.layers.1.mlp.gate_proj.weight'"),
        (None, {"mtp_num_hidden_layers": 2}, OTHER),
        (None, {"mtp_use_dedicated_embeddings": True}, OTHER),
    ],
)
def test_other_head_is_left_out_with_a_line(
    change: Callable[[Any], None] | None,
    fields: dict[str, Any],
    line: str,
    tmp_path: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, _ = folder_with(tmp_path / "theirs", tokenizer)
    edit_config(path, **fields)
    if change is not None:
        edit_weights(path, change)
    with caplog.at_level("INFO", "everstream.models"):
        assert load_checkpoint(path).head is None
    assert [line in message for message in caplog.messages] == [True]


def gguf_with_head(path: Path, num: int = 1) -> PublishedHead:
    """A file with so many heads, all but the last one of the same weights."""
    head = PublishedHead(theirs(QWEN).config, seed=1)
    tensors = hybrid_tensors(QWEN)
    layers = HYBRIDS[QWEN].config.num_hidden_layers
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
    names |= {"self_attn.o_proj": "attn_output"}
    for block in range(layers, layers + num):
        for key, tensor in head.state_dict().items():
            part = key.removeprefix("layers.0.").removesuffix(".weight")
            found = f"nextn.{NEXTN[part]}" if part in NEXTN else names.get(part)
            if found is None:
                found = part.replace("self_attn.", "attn_").replace("mlp.", "ffn_")
                found = found.removesuffix("_proj")
            data = tensor.numpy() + np.float32("norm" in part)
            tensors[f"blk.{block}.{found}.weight"] = data
    change = {"block_count": layers + num, "nextn_predict_layers": num}
    write_hybrid(path, QWEN, change=change, tensors=tensors)
    return head


def test_head_of_a_gguf_file_equals_the_published_one(tmp_path: Path) -> None:
    wanted = gguf_with_head(path := tmp_path / "model.gguf")
    file = GgufFile(path)
    config, _ = foreign.read_gguf(file, path.name)
    assert_same(foreign.read_gguf_head(file, config), wanted)


def test_two_heads_of_a_gguf_file_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gguf_with_head(path := tmp_path / "model.gguf", num=2)
    file = GgufFile(path)
    config, _ = foreign.read_gguf(file, path.name)
    with caplog.at_level("INFO", "everstream.models"):
        assert foreign.read_gguf_head(file, config) is None
    assert caplog.messages == [OTHER]


def test_exported_folder_has_the_head(tmp_path: Path) -> None:
    wanted = checkpoint_with_head().head
    found = load_checkpoint(write_model_with_head(tmp_path / "a")).head
    assert found is not None and wanted is not None
    assert found.config.num_attention_heads == wanted.config.num_attention_heads
    for name in wanted.weights:
        np.testing.assert_allclose(found.weights[name], wanted.weights[name], atol=1e-6)
