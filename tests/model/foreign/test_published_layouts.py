"""Each published layout of RWKV-7 is the model of the same weights in a native file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.chat import FENCED
from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ConfigError
from model.families.rwkv7.chat import ENDS
from model.families.rwkv7.read import read_native
from model.weights import CheckpointError
from model.weights.torch_file import TorchFile
from tests.published_layouts import LAYOUTS, Layout, fused_blocks
from tests.rwkv7 import SHAPES, Published, published, write_pth
from tests.server.api.openai.rwkv_templates import OFFICIAL, SWITCHED
from tests.world_vocabulary import TOKENS

SHAPE = SHAPES["square"]
WEIGHTS = published(SHAPE)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """What the weights compute."""
    path = BY_NAME["native"].write(tmp_path_factory.mktemp("native") / "model", SHAPE, WEIGHTS)
    return logits(load_checkpoint(path))


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint.model.parallel(torch.arange(2, 40)[None])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_is_the_model(layout: Layout, native: torch.Tensor, tmp_path: Path) -> None:
    """The same bits, the same ids for every text, texts from and to id 0 whatever a config says."""
    checkpoint = load_checkpoint(layout.write(tmp_path / "model", SHAPE, WEIGHTS))
    assert torch.equal(logits(checkpoint), native)
    assert checkpoint.config == SHAPE.config
    tokenizer = checkpoint.tokenizer
    assert [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)] == [
        TOKENS.get(id, b"") for id in range(max(TOKENS) + 1)
    ]
    assert tokenizer.eos_token_ids == (0,)
    for name in ("<|endoftext|>", "<|rwkv_tokenizer_end_of_text|>"):
        assert tokenizer.encode(f"{name} the", allow_special=True)[0] == 0
        assert 0 not in tokenizer.encode(name)
    chat = checkpoint.chat_template
    assert (chat.turns.ends, chat.calls) == (ENDS, FENCED)
    assert chat.thinking is None or chat.thinking.default is False


@pytest.mark.parametrize(
    ("name", "template", "switch"),
    [("RWKV project", OFFICIAL, "thinking"), ("fla", SWITCHED, "rwkv_generation_prompt")],
)
def test_chat_is_that_of_the_folder(name: str, template: str, switch: str, tmp_path: Path) -> None:
    folder = BY_NAME[name].write(tmp_path / "model", SHAPE, WEIGHTS)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    chat = load_checkpoint(folder).chat_template
    assert (chat.source, chat.calls, chat.turns.ends[:2]) == (template, FENCED, ENDS)
    assert chat.thinking is not None and chat.thinking.default is False
    assert chat.thinking.switches[0].name == switch


def test_norm_that_is_in_the_embedding_already_is_not_computed_again(
    native: torch.Tensor, tmp_path: Path
) -> None:
    folder = fused_blocks(tmp_path / "model", SHAPE, WEIGHTS)
    checkpoint = load_checkpoint(folder)
    assert not checkpoint.config.to_dict()["embedding_norm"]
    torch.testing.assert_close(logits(checkpoint), native, rtol=1e-5, atol=1e-5)


def test_file_that_is_not_turned_is_read_as_it_is(native: torch.Tensor, tmp_path: Path) -> None:
    file = BY_NAME["web-rwkv"].write(tmp_path / "model", SHAPE, WEIGHTS)
    save_file(WEIGHTS, file)
    assert torch.equal(logits(load_checkpoint(file)), native)


@pytest.mark.parametrize("name", ["fla", "hf-adapter"])
def test_other_width_of_the_attention_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    folder = BY_NAME[name].write(tmp_path / "model", SHAPE, WEIGHTS)
    file = folder / "model.safetensors"
    wide = {"model.layers.0.attn.r_k": torch.ones(3, SHAPE.head_dim)}
    save_file(load_file(file) | wide, file)
    with pytest.raises(CheckpointError, match="an attention_hidden_size other than hidden_size"):
        load_checkpoint(folder)


def test_packed_weights_are_refused_by_their_reason(tmp_path: Path) -> None:
    folder = BY_NAME["hf-adapter"].write(tmp_path / "model", SHAPE, WEIGHTS)
    file = folder / "model.safetensors"
    packed = {"model.layers.0.ffn.key.packed_row": torch.ones(3, 3)}
    save_file(load_file(file) | packed, file)
    with pytest.raises(CheckpointError, match="is packed for the kernels of rwkv7-hf"):
        load_checkpoint(folder)


@pytest.mark.parametrize("fields", [{}, {"rescale_every": 6, "attention_hidden_size": 128}])
def test_rwkv_of_the_year_2023_is_refused_as_what_it_is(
    fields: dict[str, object], tmp_path: Path
) -> None:
    folder = BY_NAME["transformers-rwkv"].write(tmp_path / "model", SHAPE, WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"model_type": "rwkv", **fields}))
    with pytest.raises(ConfigError, match="they are RWKV-4, and of this family only RWKV-7 is"):
        load_checkpoint(folder)
    old: Published = {"rwkv.blocks.0.attention.time_decay": torch.ones(4)}
    file = write_pth(tmp_path / "old.pth", old)
    with pytest.raises(CheckpointError, match=r"old\.pth is an RWKV-4 or RWKV-5 model"):
        read_native(TorchFile(file), file.name)
