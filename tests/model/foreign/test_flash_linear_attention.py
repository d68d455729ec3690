"""Folders of flash-linear-attention against its own naive operations.

Its models need Triton, and a GPU to run. So the weights are made from the
list of its keys (compared with a record of the package's own), and the
reference is its naive operation between plain torch.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from model.config import ConfigError
from model.state import StateLayout
from model.tokenizer import Tokenizer
from tests.model.foreign.conftest import tokens

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 310
#: config.json as version 0.6.0 writes it, of a small model with its defaults otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    name: json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    for name in ("gla", "retnet", "linear_attn")
}
CASES = [
    *[(family, {}) for family in FAMILIES],
    *[(family, {"num_kv_heads": 2}) for family in FAMILIES],
    *[(family, {"tie_word_embeddings": True, "norm_eps": 0.1}) for family in FAMILIES],
    *[(family, {"elementwise_affine": False}) for family in FAMILIES],
    *[(family, {"expand_k": 1.5, "expand_v": 0.5}) for family in FAMILIES],
    ("gla", {"use_short_conv": True}),
    ("gla", {"use_short_conv": True, "num_kv_heads": 2, "conv_size": 3}),
    ("gla", {"fuse_norm": False}),
    ("gla", {"num_kv_heads": 1}),
    ("retnet", {"fuse_norm": False}),
    *[("linear_attn", {"feature_map": name}) for name in ("elu", "relu", "identity")],
]


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{name}={value}" for name, value in case[1].items())])


class Theirs:
    """A random checkpoint of theirs."""

    def __init__(self, family: str, changes: dict[str, Any]) -> None:
        self.family, self.config = family, {**FAMILIES[family], **changes}
        self.kv_heads = self.config["num_kv_heads"] or HEADS
        self.keys = int(WIDTH * self.config["expand_k"])
        self.values = int(WIDTH * self.config["expand_v"])
        generator = torch.Generator().manual_seed(7)
        self.weights = {
            name: 0.3 * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
            for name, shape in self.shapes().items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all keys."""
        shapes = {
            "model.embeddings.weight": (VOCABULARY, WIDTH),
            "model.norm.weight": (WIDTH,),
        }
        if not self.config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
        inner = self.config["intermediate_size"]
        for i in range(LAYERS):
            layer = {
                "attn_norm.weight": (WIDTH,),
                "mlp_norm.weight": (WIDTH,),
                "mlp.gate_proj.weight": (inner, WIDTH),
                "mlp.up_proj.weight": (inner, WIDTH),
                "mlp.down_proj.weight": (WIDTH, inner),
                **{f"attn.{name}": shape for name, shape in self.attention_shapes().items()},
            }
            shapes.update({f"model.layers.{i}.{n}": shape for n, shape in layer.items()})
        return shapes

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        share, dim = self.kv_heads / HEADS, self.keys // HEADS
        sizes = {"q": self.keys, "k": int(self.keys * share), "v": int(self.values * share)}
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}_proj.weight": (size, WIDTH) for name, size in sizes.items()
        }
        shapes["o_proj.weight"] = (WIDTH, self.values)
        norm = "norm"
        if self.family != "linear_attn":
            norm = "g_norm_swish_gate" if self.config["fuse_norm"] else "g_norm"
            shapes["g_proj.weight"] = (self.values, WIDTH)
        if self.config["elementwise_affine"]:
            shapes[f"{norm}.weight"] = (self.values // HEADS,)
        if self.family == "gla":
            shapes["gk_proj.0.weight"] = (16, WIDTH)
            shapes["gk_proj.1.weight"] = (sizes["k"], 16)
            shapes["gk_proj.1.bias"] = (sizes["k"],)
            if self.config["use_short_conv"]:
                kernel = self.config["conv_size"]
                shapes.update({f"{n}_conv1d.weight": (s, 1, kernel) for n, s in sizes.items()})
        if self.config.get("feature_map") == "elementwise_product":
            for name in ("feature_map_q", "feature_map_k"):
                for number in (1, 2):
                    shapes[f"{name}.layer{number}.weight"] = (dim, dim)
                    shapes[f"{name}.layer{number}.bias"] = (dim,)
        return shapes

    def save(self, folder: Path, tokenizer: Tokenizer) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(folder / "tokenizer.json")
        return folder

    def logits(self, ids: Tensor) -> Tensor:
        """Their forward pass, with their naive operation in the middle; the ids with text."""
        w = self.weights
        x = w["model.embeddings.weight"][ids]
        for i in range(LAYERS):
            key = f"model.layers.{i}"
            x = x + self.attention(f"{key}.attn", self.norm(x, w[f"{key}.attn_norm.weight"]))
            h = self.norm(x, w[f"{key}.mlp_norm.weight"])
            gate, up = (h @ w[f"{key}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[f"{key}.mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embeddings.weight"])
        return self.norm(x, w["model.norm.weight"]) @ head[:300].T

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config["norm_eps"])

    def attention(self, key: str, x: Tensor) -> Tensor:
        project = {n: x @ self.weights[f"{key}.{n}_proj.weight"].T for n in "qkv"}
        if self.config.get("use_short_conv"):
            project = {n: self.convolve(f"{key}.{n}_conv1d.weight", t) for n, t in project.items()}
        q = project["q"].unflatten(-1, (HEADS, -1))
        k, v = (self.expand(project[n]) for n in "kv")
        o = {"gla": self.gla, "retnet": self.retnet, "linear_attn": self.linear}[self.family](
            key, x, q, k, v
        )
        names = [f"{key}.{n}.weight" for n in ("norm", "g_norm", "g_norm_swish_gate")]
        (weight,) = [self.weights[n] for n in names if n in self.weights] or [None]
        o = self.norm(o, weight).flatten(-2)
        if self.family != "linear_attn":
            o = o * F.silu(x @ self.weights[f"{key}.g_proj.weight"].T)
        return o @ self.weights[f"{key}.o_proj.weight"].T

    def expand(self, x: Tensor) -> Tensor:
        """Grouped heads, each for all its queries."""
        return x.unflatten(-1, (self.kv_heads, -1)).repeat_interleave(HEADS // self.kv_heads, -2)

    def convolve(self, key: str, x: Tensor) -> Tensor:
        weight = self.weights[key]
        padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, weight, groups=len(weight))).transpose(1, 2)

    def gla(self, key: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = self.weights
        low = x @ w[f"{key}.gk_proj.0.weight"].T
        gk = low @ w[f"{key}.gk_proj.1.weight"].T + w[f"{key}.gk_proj.1.bias"]
        gk = self.expand(F.logsigmoid(gk) / 16)
        o, _ = naive("gla").naive_recurrent_gla(q, k, v, gk)
        return o

    def retnet(self, key: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = q.shape[-1] // 2
        angle = torch.outer(torch.arange(x.shape[1]), 10_000.0 ** (-torch.arange(half) / half))
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def rotated(t: Tensor) -> Tensor:
            a, b = t.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
        return naive("retention").naive_retention(q, k, v).transpose(1, 2)

    def linear(self, key: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        maps: dict[str, Callable[[Tensor], Tensor]] = {
            "elu": lambda t: F.elu(t) + 1,
            "relu": F.relu,
            "identity": lambda t: t,
        }
        name = self.config["feature_map"]
        phi_q = maps.get(name, partial(self.product, f"{key}.feature_map_q"))
        phi_k = maps.get(name, partial(self.product, f"{key}.feature_map_k"))
        o, _ = naive("linear_attn").naive_recurrent_linear_attn(phi_q(q), phi_k(k), v)
        return o

    def product(self, key: str, x: Tensor) -> Tensor:
        w = self.weights
        a, b = (x @ w[f"{key}.layer{n}.weight"].T + w[f"{key}.layer{n}.bias"] for n in (1, 2))
        return a * b


def naive(operation: str) -> ModuleType:
    """A file of the package by its path, since importing the package needs Triton."""
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        pytest.fail("no fla: pip install --no-deps -r tests/oracle-packages.txt")
    path = Path(package.origin).parent / "ops" / operation / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{operation}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_logits_equal_the_naive_operation(
    case: tuple[str, dict[str, Any]], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = Theirs(*case)
    model = load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer)).model
    ids, zero = tokens(70), torch.zeros(2, dtype=torch.int64)
    wanted = theirs.logits(ids)
    scale = wanted.abs().max()
    torch.testing.assert_close(model.parallel(ids) / scale, wanted / scale, rtol=0, atol=2e-5)
    first, state = model.chunk(ids[:, :68], model.empty_state(2), zero)
    last, _ = model.step(ids[:, 68], state, zero + 68)
    found = torch.cat([first, last.unsqueeze(1)], dim=1)
    torch.testing.assert_close(found / scale, wanted[:, :69] / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_older_file_has_another_embedding_and_gate_and_value_in_one(
    family: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = Theirs(family, {"norm_eps": 0.1})
    ids = tokens(20)
    wanted = load_checkpoint(theirs.save(tmp_path / "new", tokenizer)).model.parallel(ids)
    weights = theirs.weights
    weights["model.embed_tokens.weight"] = weights.pop("model.embeddings.weight")
    for i in range(LAYERS):
        key = f"model.layers.{i}.mlp"
        both = [theirs.weights.pop(f"{key}.{name}_proj.weight") for name in ("gate", "up")]
        theirs.weights[f"{key}.gate_proj.weight"] = torch.cat(both)
    theirs.config = {
        name: value
        for name, value in theirs.config.items()
        if name not in ("attnres_block_size", "attn", "fuse_swiglu", "use_l2warp", "num_kv_heads")
    }
    theirs.config["rms_norm_eps"] = theirs.config.pop("norm_eps")
    theirs.config["share_conv_kernel"] = True
    found = load_checkpoint(theirs.save(tmp_path / "old", tokenizer)).model.parallel(ids)
    assert torch.equal(found, wanted)


def test_tied_feature_maps_may_be_stored_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    theirs = Theirs("linear_attn", {"tie_feature_map_qk": True})
    for name in [name for name in theirs.weights if "feature_map_k" in name]:
        theirs.weights[name] = theirs.weights[name.replace("map_k", "map_q")].clone()
    twice = load_checkpoint(theirs.save(tmp_path / "twice", tokenizer)).model
    for name in [name for name in theirs.weights if "feature_map_k" in name]:
        del theirs.weights[name]
    once = load_checkpoint(theirs.save(tmp_path / "once", tokenizer)).model
    ids = tokens(20)
    assert torch.equal(once.parallel(ids), twice.parallel(ids))


def test_size_of_the_mlp_follows_from_the_ratio(tmp_path: Path, tokenizer: Tokenizer) -> None:
    theirs = Theirs("retnet", {"intermediate_size": 256})
    theirs.config["intermediate_size"] = None
    loaded = load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))
    assert loaded.config.intermediate_size == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_constant_and_the_folder_can_be_written_as_ours(
    family: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    loaded = load_checkpoint(Theirs(family, {}).save(tmp_path / "theirs", tokenizer))
    assert StateLayout.of(loaded.config).num_bytes > 0
    assert loaded.config.eos_token_id == 2
    save_checkpoint(tmp_path / "ours", loaded.model, loaded.tokenizer)
    ids = tokens(20)
    again = load_checkpoint(tmp_path / "ours").model
    assert torch.equal(again.parallel(ids), loaded.model.parallel(ids))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gla", {"feature_map": "relu"}, "feature_map 'relu'"),
        ("gla", {"clamp_min": -1.0}, "clamp_min -1.0"),
        ("gla", {"use_gv": True}, "use_gv True"),
        ("gla", {"use_output_gate": False}, "use_output_gate False"),
        ("gla", {"attn": {"layers": [0], "num_heads": 4}}, "attn "),
        ("gla", {"attnres_block_size": 2}, "attnres_block_size 2"),
        ("gla", {"hidden_act": "powlu"}, "hidden_act 'powlu'"),
        ("gla", {"num_kv_heads": 3}, "num_kv_heads must divide 4, not 3"),
        ("gla", {"expand_k": 0.3}, "expand_k times 32"),
        ("gla", {"use_rope": True}, "unknown field 'use_rope'"),
        ("retnet", {"use_short_conv": True}, "use_short_conv True"),
        ("retnet", {"feature_map": "relu"}, "feature_map 'relu'"),
        ("linear_attn", {"feature_map": "hedgehog"}, "feature_map 'hedgehog'"),
        ("linear_attn", {"feature_map": "t2r"}, "feature_map 't2r'"),
        ("linear_attn", {"feature_map": "dpfp"}, "feature_map 'dpfp'"),
        ("linear_attn", {"norm_feature_map": True}, "norm_feature_map True"),
        ("linear_attn", {"norm_q": True}, "norm_q True"),
    ],
)
def test_config_beyond_ours_is_refused_by_name(
    family: str,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    theirs = Theirs(family, {})
    theirs.config.update(changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_and_unknown_keys_are_named(
    family: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = Theirs(family, {})
    removed = theirs.weights.pop("model.layers.1.attn.v_proj.weight")
    with pytest.raises(CheckpointError, match=r"lack key 'model\.layers\.1\.attn\.v_proj"):
        load_checkpoint(theirs.save(tmp_path / "lacking", tokenizer))
    theirs.weights["model.layers.1.attn.v_proj.weight"] = removed
    theirs.weights["model.layers.1.attn.w_proj.weight"] = removed.clone()
    with pytest.raises(CheckpointError, match=r"unknown key 'model\.layers\.1\.attn\.w_proj"):
        load_checkpoint(theirs.save(tmp_path / "more", tokenizer))


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("gla", "attn.k_proj.weight", (8, 31)),
        ("gla", "attn.v_proj.weight", (17, 32)),
        ("gla", "attn.k_conv1d.weight", (8, 1, 3)),
        ("gla", "attn.gk_proj.1.bias", (9,)),
        ("retnet", "attn.v_proj.weight", ()),
        ("retnet", "mlp.up_proj.weight", (16, 31)),
        ("linear_attn", "attn.feature_map_q.layer2.weight", (8, 7)),
        ("linear_attn", "attn.k_proj.weight", (0, 32)),
    ],
)
def test_misshapen_part_of_a_joined_matrix_is_named(
    family: str, name: str, shape: tuple[int, ...], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    changes: dict[str, Any] = {"use_short_conv": True} if family == "gla" else {}
    theirs = Theirs(family, {"num_kv_heads": 2, **changes})
    key = f"model.layers.1.{name}"
    assert key in theirs.weights
    theirs.weights[key] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=re.escape(f"{key} is {list(shape)}")):
        load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_keys_are_those_of_the_package(case: tuple[str, dict[str, Any]]) -> None:
    """As configs/record_keys.py found them, which needs Triton."""
    recorded = json.loads((Path(__file__).parent / "configs" / "keys.json").read_text())
    found = {name: list(shape) for name, shape in Theirs(*case).shapes().items()}
    assert found == recorded[case_id(case)]
