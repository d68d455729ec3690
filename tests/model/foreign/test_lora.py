"""LoRA and MiSS files: the weights are those of the published formulas, computed in float64."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint import Checkpoint, load_checkpoint
from model.checkpoint_files import Lora
from model.config import ConfigError
from model.foreign.lora import DirectedChange, LowRankChange, with_lora
from model.weights import CheckpointError, StoredWeights
from model.weights.torch_file import TorchFile
from tests.gguf_files import gguf_tensors, write_gguf
from tests.rwkv7 import SHAPES, Published, fla_config, fla_names, published, write_fla, write_pth
from tests.tiny import tiny_tokenizer

SHAPE = SHAPES["square"]
BASE = published(SHAPE)
ALPHA = 24.0
#: Of Linear weights: our part of the name, and the file's.
LINEAR = {
    "time_mix.receptance": "att.receptance",
    "time_mix.key": "att.key",
    "time_mix.value": "att.value",
    "time_mix.output": "att.output",
    "channel_mix.key": "ffn.key",
    "channel_mix.value": "ffn.value",
}
Wide = npt.NDArray[np.float64]
#: The change of a weight [out, in] by the shape of what is drawn for it, and its formula.
Draw = Callable[[int, int], dict[str, tuple[int, ...]]]
Formula = Callable[[Wide, dict[str, Wide]], Wide]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save(folder / "tokenizer.json")
    return write_pth(folder / "model.pth", BASE)


def modules() -> dict[str, str]:
    """Our names of all Linear weights of blocks, and the file's."""
    return {
        f"blocks.{layer}.{ours}.weight": f"blocks.{layer}.{theirs}"
        for layer in range(SHAPE.layers)
        for ours, theirs in LINEAR.items()
    }


def drawn(draw: Draw, prefix: str = "") -> Published:
    """A file with changes of all Linear weights, in 16 bits as they are written."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for theirs in modules().values():
        for end, shape in draw(*BASE[f"{theirs}.weight"].shape).items():
            tensors[f"{prefix}{theirs}.{end}"] = torch.randn(shape, generator=generator).bfloat16()
    return tensors


def check(found: Checkpoint, tensors: Published, formula: Formula, prefix: str = "") -> None:
    """Every weight is its formula's, or the model's own; some rows are those of the whole."""
    assert isinstance(found.weights, StoredWeights)
    plain = modules()
    for name in found.weights:
        whole = found.weights[name]
        if name in plain:
            key = f"{prefix}{plain[name]}."
            base = BASE[f"{plain[name]}.weight"].double().numpy()
            parts = {
                k.removeprefix(key): t.double().numpy()
                for k, t in tensors.items()
                if k.startswith(key)
            }
            wanted = formula(base, parts)
            np.testing.assert_allclose(whole, wanted, rtol=1e-6, atol=1e-6)
            assert not np.allclose(whole, base, rtol=0.1, atol=0.1)
        for begin, end in ((0, 5), (33, 90), (len(whole) - 3, None), (3, 3)):
            assert np.array_equal(found.weights.rows(name, begin, end), whole[begin:end]), name


def low_rank(base: Wide, parts: dict[str, Wide], ends: str = "", by: float = 8) -> Wide:
    return base + ALPHA / by * parts[f"lora_B{ends}"] @ parts[f"lora_A{ends}"]


def test_lora_of_rwkv_peft_is_added(model: Path, tmp_path: Path) -> None:
    tensors = drawn(lambda out, width: {"lora_A": (8, width), "lora_B": (out, 8)})
    file = write_pth(tmp_path / "rwkv-0.pth", tensors)
    found = load_checkpoint(model, lora=Lora((file,), ALPHA))
    check(found, tensors, low_rank)
    other = load_checkpoint(model, lora=Lora((file,), 1.0))
    assert len({found.digest, other.digest, load_checkpoint(model).digest}) == 3
    assert load_checkpoint(model, lora=Lora((file,), ALPHA)).digest == found.digest


def write_peft(folder: Path, tensors: Published, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


PEFT = "base_model.model."
CONFIG = {"peft_type": "LORA", "lora_alpha": 24, "r": 8, "bias": "none", "use_dora": False}


@pytest.mark.parametrize("by_root", [False, True])
def test_lora_of_peft_states_its_alpha(model: Path, tmp_path: Path, by_root: bool) -> None:
    ends = ".weight"
    tensors = drawn(
        lambda out, width: {f"lora_A{ends}": (8, width), f"lora_B{ends}": (out, 8)}, PEFT
    )
    folder = write_peft(tmp_path / "adapter", tensors, CONFIG | {"use_rslora": by_root})
    by = 8**0.5 if by_root else 8
    found = load_checkpoint(model, lora=Lora((folder,)))
    check(found, tensors, lambda base, parts: low_rank(base, parts, ends, by), PEFT)


def tiled(base: Wide, d: Wide) -> Wide:
    """One number at a time."""
    wanted, (rank, period) = base.copy(), d.shape
    for i in range(base.shape[1]):
        for o in range(base.shape[0]):
            wanted[o, i] += d[i % rank, o % period]
    return wanted


@pytest.mark.parametrize("rank", [16, 24])
@pytest.mark.parametrize("name", ["disha", "bone"])
def test_miss_of_rwkv_peft_is_added_to_each_shard(
    model: Path, tmp_path: Path, name: str, rank: int
) -> None:
    """The second rank does not divide the width."""
    tensors = drawn(lambda out, width: {name: (rank, out)})
    file = write_pth(tmp_path / "rwkv-0.pth", tensors)
    found = load_checkpoint(model, lora=Lora((file,)))
    check(found, tensors, lambda base, parts: tiled(base, parts[name]))


@pytest.mark.parametrize("mini_rank", [None, 4])
def test_miss_of_peft_is_added_to_each_shard(
    model: Path, tmp_path: Path, mini_rank: int | None
) -> None:
    tensors = drawn(lambda out, width: {"miss_block": (16, mini_rank or out)}, PEFT)
    mini = {} if mini_rank is None else {"init_weights": "mini", "mini_r": mini_rank}
    folder = write_peft(tmp_path / "adapter", tensors, {"peft_type": "MISS", **mini})
    found = load_checkpoint(model, lora=Lora((folder,)))
    check(found, tensors, lambda base, parts: tiled(base, parts["miss_block"]), PEFT)


def in_blocks(base: Wide, d: Wide, by_row: bool) -> Wide:
    wanted, rank = base.copy(), d.shape[-1]
    for a in range(base.shape[0] // rank):
        for b in range(base.shape[1] // rank):
            place = np.s_[a * rank : (a + 1) * rank, b * rank : (b + 1) * rank]
            part = d[a if by_row else b]
            wanted[place] = base[place] + base[place] @ part + part
    return wanted


def test_bat_turns_the_blocks_of_a_column(model: Path, tmp_path: Path) -> None:
    tensors = drawn(lambda out, width: {"disha": (width // 16, 16, 16)})
    file = write_pth(tmp_path / "rwkv-0.pth", tensors)
    found = load_checkpoint(model, lora=Lora((file,)))
    check(found, tensors, lambda base, parts: in_blocks(base, parts["disha"], by_row=False))


@pytest.mark.parametrize("is_renamed", [False, True])
def test_bat_of_peft_turns_the_blocks_of_a_row(
    model: Path, tmp_path: Path, is_renamed: bool
) -> None:
    tensors = drawn(lambda out, width: {"miss_block": (out // 16, 16, 16)}, PEFT)
    config = {"peft_type": "MISS", "init_weights": "bat"}
    adapter = write_peft(tmp_path / "adapter", tensors, config)
    if is_renamed:
        file = next(adapter.glob("adapter_model.*"))
        adapter = file.rename(tmp_path / f"changes{file.suffix}")
    found = load_checkpoint(model, lora=Lora((adapter,)))
    check(found, tensors, lambda base, parts: in_blocks(base, parts["miss_block"], True), PEFT)


def test_whole_tensors_replace_those_of_the_model(model: Path, tmp_path: Path) -> None:
    """As RWKV-PEFT writes the parts that it trains as they are."""
    other = published(SHAPE, seed=1)
    keys = ["emb.weight", "head.weight", "ln_out.bias", "blocks.0.ln0.weight", "blocks.1.ln2.bias"]
    keys += ["blocks.1.att.ln_x.weight", "blocks.0.att.x_v", "blocks.1.att.w1", "blocks.1.att.k_k"]
    file = write_pth(tmp_path / "parts.pth", {key: other[key] for key in keys})
    found = load_checkpoint(model, lora=Lora((file,)))
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    changed = write_pth(tmp_path / "wanted.pth", BASE | {key: other[key] for key in keys})
    wanted = load_checkpoint(changed)
    for name in wanted.weights:
        assert np.array_equal(found.weights[name], wanted.weights[name]), name
    ids = torch.arange(2, 40)[None]
    assert torch.equal(found.model.parallel(ids), wanted.model.parallel(ids))


def test_files_are_merged_in_their_order_into_every_format(model: Path, tmp_path: Path) -> None:
    first = write_pth(
        tmp_path / "first.pth", drawn(lambda out, width: {"disha": (width // 16, 16, 16)})
    )
    second = write_pth(
        tmp_path / "second.pth",
        drawn(lambda out, width: {"lora_A": (4, width), "lora_B": (out, 4)}),
    )
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    gguf = write_gguf(tmp_path / "model.gguf", SHAPE, gguf_tensors(BASE))
    folder = write_fla(tmp_path / "fla", fla_names(BASE), fla_config(SHAPE))
    tiny_tokenizer().save(folder / "tokenizer.json")
    lora = Lora((first, second), ALPHA)
    wanted = load_checkpoint(model, lora=lora).weights
    for path in (gguf, folder):
        found = load_checkpoint(path, lora=lora).weights
        for name in wanted:
            assert np.array_equal(found[name], wanted[name]), name
    turned = load_checkpoint(model, lora=Lora((second, first), ALPHA)).weights
    name = "blocks.0.time_mix.key.weight"
    assert not np.allclose(turned[name], wanted[name], rtol=1e-3)


def test_names_of_a_folder_are_known_too(model: Path, tmp_path: Path) -> None:
    a, b = torch.randn(8, 128), torch.randn(128, 8)
    names = (
        "model.layers.1.attn.r_proj",
        "blocks.1.att.receptance",
        "rwkv7.blocks.1.att.receptance",
    )
    found = []
    for number, name in enumerate(names):
        tensors = {f"{PEFT}{name}.lora_A.weight": a, f"{PEFT}{name}.lora_B.weight": b}
        folder = write_peft(tmp_path / str(number), tensors, CONFIG)
        found.append(load_checkpoint(model, lora=Lora((folder,))).weights)
    key = "blocks.1.time_mix.receptance.weight"
    assert all(np.array_equal(each[key], found[0][key]) for each in found)
    assert not np.array_equal(found[0][key], load_checkpoint(model).weights[key])


A, B = "blocks.0.att.key.lora_A", "blocks.0.att.key.lora_B"
PAIR = {A: torch.ones(4, 128), B: torch.ones(128, 4)}


@pytest.mark.parametrize(
    ("tensors", "alpha", "message"),
    [
        (PAIR, None, "does not state its alpha: --lora-alpha gives it"),
        ({A: PAIR[A]}, 1.0, f"'{A}' has no lora_B"),
        ({B: PAIR[B]}, 1.0, f"'{B}' has no lora_A"),
        (PAIR | {A: torch.ones(4, 64)}, 1.0, rf"{A} is \[4, 64\], wanted \[4, 128\]"),
        (PAIR | {B: torch.ones(128, 5)}, 1.0, rf"{B} is \[128, 5\], wanted \[128, 4\]"),
        (PAIR | {A: torch.ones(4, 128).int()}, 1.0, f"{A} is of integers"),
        (PAIR | {"blocks.7.att.key.disha": torch.ones(4, 128)}, 1.0, "which is no weight of the"),
        (PAIR | {"extra": torch.ones(4)}, 1.0, "has the key 'extra', which is no weight"),
        (
            PAIR | {"blocks.0.ln1.weight": torch.ones(4)},
            1.0,
            r"ln1.weight is \[4\], wanted \[128\]",
        ),
        (
            {"blocks.0.att.key.bone": torch.ones(128, 16)},
            None,
            r"is \[128, 16\], wanted \[128, 128",
        ),
        (
            {"blocks.0.att.key.bone": torch.ones(7, 16, 16)},
            None,
            r"is \[7, 16, 16\], wanted \[8, 16",
        ),
        (
            {"blocks.0.att.key.bone": torch.ones(8, 15, 15)},
            None,
            r"is \[8, 15, 15\], for \[128, 128",
        ),
        ({"blocks.0.ffn.key.bone": torch.ones(32, 16, 16)}, None, r"wanted \[8, 16, 16\]"),
        ({"blocks.0.ln1.disha": torch.ones(4, 4)}, None, "is of no Linear weight"),
        ({"emb.disha": torch.ones(4, 4)}, None, "is of no Linear weight"),
        ({"blocks.0.att.key.init_lora_A": torch.ones(4, 4)}, None, "the initial matrices of PiSSA"),
        ({"blocks.0.att.key.lora_magnitude_vector": torch.ones(4)}, None, "r' has no lora_A"),
        (
            PAIR | {"blocks.0.att.key.lora_magnitude_vector": torch.ones(4)},
            1.0,
            r"lora_magnitude_vector is \[4\], wanted \[128\]",
        ),
        ({"emb.lora_embedding_A": torch.ones(4, 4)}, None, "LoRA of an embedding, which is not"),
        (PAIR | {f"{B}.bias": torch.ones(128)}, 1.0, "a bias of LoRA, which is not supported"),
        ({"blocks.0.att.key.lokr_w1": torch.ones(4)}, None, "a method that is not supported"),
        ({"blocks.0.att.time_state": torch.ones(2, 64, 64)}, None, "a tuned state: --state"),
        ({}, None, "has no tensors"),
    ],
)
def test_what_does_not_fit_is_named(
    model: Path, tmp_path: Path, tensors: Published, alpha: float | None, message: str
) -> None:
    file = write_pth(tmp_path / "rwkv-0.pth", tensors)
    with pytest.raises(CheckpointError, match=rf"rwkv-0\.pth.*{message}"):
        load_checkpoint(model, lora=Lora((file,), alpha))


def test_pissa_is_known_by_the_file_next_to_it(model: Path, tmp_path: Path) -> None:
    file = write_pth(tmp_path / "rwkv-0.pth", PAIR)
    write_pth(tmp_path / "init_pissa.pth", {})
    with pytest.raises(CheckpointError, match=r"is of PiSSA, as init_pissa\.pth next to it shows"):
        load_checkpoint(model, lora=Lora((file,), ALPHA))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"use_dora": 1}, "use_dora must be a boolean, not 1"),
        ({"use_rslora": "yes"}, "use_rslora must be a boolean, not 'yes'"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying True is not supported"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication \[\[0, 2\]\] is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"alpha_pattern": {"key": 3}}, "alpha_pattern {'key': 3} is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not"),
        ({"lora_alpha": -1}, "lora_alpha must be a positive number, not -1"),
        ({"lora_alpha": None}, "lora_alpha must be a positive number, not None"),
        ({"alora_invocation_tokens": [9, 8]}, r"alora_invocation_tokens \[9, 8\] is not supported"),
        (
            {"peft_type": "MISS", "init_weights": "mini", "mini_r": 0.5},
            "mini_r must be a positive integer, not 0.5",
        ),
    ],
)
def test_config_that_asks_for_something_else_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_peft(tmp_path / "adapter", PAIR, CONFIG | change)
    with pytest.raises(CheckpointError, match=f"adapter_config.json: {message}"):
        load_checkpoint(model, lora=Lora((folder,)))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        load_checkpoint(model, lora=Lora((folder,)))


def test_row_of_zeros_has_no_direction_for_dora() -> None:
    values = np.array([[3.0, 4.0], [0.0, 0.0]])
    change = LowRankChange(np.ones((1, 2)), np.zeros((2, 1)), 1.0)
    found = DirectedChange(change, np.array([10.0, 10.0])).apply(values, 0)
    assert found.tolist() == [[6.0, 8.0], [0.0, 0.0]]


def test_change_of_dora_needs_its_lengths(model: Path, tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "adapter", PAIR, CONFIG | {"use_dora": True})
    with pytest.raises(CheckpointError, match=rf"'{A}' has no lora_magnitude_vector of DoRA"):
        load_checkpoint(model, lora=Lora((folder,)))


def test_embedding_that_is_normed_already_is_not_replaced(tmp_path: Path) -> None:
    config = dataclasses.replace(SHAPE.config, embedding_norm=False)
    file = write_pth(tmp_path / "emb.pth", {"emb.weight": BASE["emb.weight"]})
    with pytest.raises(CheckpointError, match=r"emb\.weight is not normed, as the model's is"):
        with_lora(config, TorchFile(file), Lora((file,)))


def test_other_families_and_missing_files_are_named(model: Path, tmp_path: Path) -> None:
    file = write_pth(tmp_path / "rwkv-0.pth", PAIR)
    with pytest.raises(CheckpointError, match=r"--lora is for rwkv7, .*, not for delta models"):
        load_checkpoint("everstream-stories", lora=Lora((file,), ALPHA))
    with pytest.raises(CheckpointError, match=r"no\.pth: No such file"):
        load_checkpoint(model, lora=Lora((tmp_path / "no.pth",), ALPHA))
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        load_checkpoint(model, lora=Lora((tmp_path,), ALPHA))
