"""gated_deltanet and delta_net of flash-linear-attention, against its own naive delta rules.

The weights are random, with the keys and shapes of the package's layers; the rest of the forward
pass is plain torch from its equations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from model.checkpoint import CheckpointError, load_checkpoint
from model.config import ConfigError, ModelConfig
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer
from tests.model.attention.packages import flash
from tests.model.foreign.conftest import tokens
from tests.model.ops.cpu.models import feed

#: Of float32 logits, relative to the largest. Without a decay and with negative eigenvalues the
#: rounding of no token fades.
TOLERANCE = 2e-4

WIDTH, LAYERS, VOCABULARY, INNER = 32, 2, 310, 48
SHARED: dict[str, Any] = {
    "attn": None,
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "conv_size": 4,
    "eos_token_id": 2,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "num_hidden_layers": LAYERS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_short_conv": True,
    "vocab_size": VOCABULARY,
}
GATED = {
    **SHARED,
    "model_type": "gated_deltanet",
    "allow_neg_eigval": False,
    "expand_v": 2.0,
    "head_dim": 6,
    "num_heads": 2,
    "num_v_heads": None,
    "use_gate": True,
}
PLAIN = {
    **SHARED,
    "model_type": "delta_net",
    "allow_neg_eigval": False,
    "expand_k": 1,
    "expand_v": 1,
    "num_heads": 4,
    "qk_activation": "silu",
    "qk_norm": "l2",
    "use_beta": True,
    "use_gate": False,
}
CASES: list[dict[str, Any]] = [
    GATED,
    {**GATED, "num_v_heads": 4},
    {**GATED, "num_v_heads": 6, "expand_v": 0.5, "conv_size": 3},
    {**GATED, "allow_neg_eigval": True, "use_gate": False, "norm_eps": 0.1},
    PLAIN,
    {**PLAIN, "expand_k": 0.5, "use_gate": True, "allow_neg_eigval": True},
    {**PLAIN, "expand_v": 2, "tie_word_embeddings": True},
]


class Theirs:
    """A random checkpoint of theirs. ``fused``: with the MLP of before February 2025."""

    def __init__(self, config: dict[str, Any], fused: bool = False) -> None:
        self.config, self.is_gated = config, config["model_type"] == "gated_deltanet"
        self.key_heads = config["num_heads"]
        self.heads = config.get("num_v_heads") or self.key_heads
        if self.is_gated:
            self.keys = config["head_dim"] * self.key_heads
            self.values = int(config["head_dim"] * config["expand_v"]) * self.heads
        else:
            self.keys = int(WIDTH * config["expand_k"])
            self.values = int(WIDTH * config["expand_v"])
        generator = torch.Generator().manual_seed(7)
        self.weights = {
            name: 0.3 * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
            for name, shape in self.shapes().items()
        }
        self.saved = dict(self.weights)
        if fused:
            for i in range(LAYERS):
                parts = [
                    self.saved.pop(f"model.layers.{i}.mlp.{n}_proj.weight") for n in ("gate", "up")
                ]
                self.saved[f"model.layers.{i}.mlp.gate_proj.weight"] = torch.cat(parts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "model.embeddings.weight": (VOCABULARY, WIDTH),
            "model.norm.weight": (WIDTH,),
        }
        if not self.config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (WIDTH,),
            "mlp_norm.weight": (WIDTH,),
            "mlp.gate_proj.weight": (INNER, WIDTH),
            "mlp.up_proj.weight": (INNER, WIDTH),
            "mlp.down_proj.weight": (WIDTH, INNER),
            "attn.b_proj.weight": (self.heads, WIDTH),
            "attn.o_norm.weight": (self.values // self.heads,),
            "attn.o_proj.weight": (WIDTH, self.values),
        }
        for name, size in (("q", self.keys), ("k", self.keys), ("v", self.values)):
            layer[f"attn.{name}_proj.weight"] = (size, WIDTH)
            layer[f"attn.{name}_conv1d.weight"] = (size, 1, self.config["conv_size"])
        if self.config["use_gate"]:
            layer["attn.g_proj.weight"] = (self.values, WIDTH)
        if self.is_gated:
            layer["attn.a_proj.weight"] = (self.heads, WIDTH)
            layer |= {"attn.A_log": (self.heads,), "attn.dt_bias": (self.heads,)}
        return shapes | {
            f"model.layers.{i}.{name}": shape
            for i in range(LAYERS)
            for name, shape in layer.items()
        }

    def save(self, folder: Path, tokenizer: Tokenizer) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.saved, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(folder / "tokenizer.json")
        return folder

    def logits(self, ids: Tensor) -> Tensor:
        """Of the ids with text."""
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

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config["norm_eps"])

    def attention(self, key: str, x: Tensor) -> Tensor:
        w = {n.removeprefix(f"{key}."): t for n, t in self.weights.items() if n.startswith(key)}
        q, k = (self.convolved(w, n, x).unflatten(-1, (self.key_heads, -1)) for n in ("q", "k"))
        repeats = self.heads // self.key_heads
        q, k = (t.repeat_interleave(repeats, dim=-2) for t in (q, k))
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        v = self.convolved(w, "v", x).unflatten(-1, (self.heads, -1))
        beta = torch.sigmoid(x @ w["b_proj.weight"].T) * (
            2 if self.config["allow_neg_eigval"] else 1
        )
        if self.is_gated:
            g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
            rule = flash("gated_delta_rule").naive_recurrent_gated_delta_rule
            o, _ = rule(q=q, k=k, v=v, beta=beta, g=g)
        else:
            q, k, v, b = (t.transpose(1, 2) for t in (q, k, v, beta))
            o, _ = flash("delta_rule").delta_rule_recurrence(q, k, v, b)
            o = o.transpose(1, 2)
        o = self.norm(o, w["o_norm.weight"]).flatten(-2)
        if self.config["use_gate"]:
            o = o * F.silu(x @ w["g_proj.weight"].T)
        return o @ w["o_proj.weight"].T

    def convolved(self, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        weight = w[f"{name}_conv1d.weight"]
        x = (x @ w[f"{name}_proj.weight"].T).transpose(1, 2)
        padded = F.pad(x, (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, weight, groups=len(weight))).transpose(1, 2)


@pytest.mark.package
@pytest.mark.parametrize("case", range(len(CASES)))
def test_logits_equal_the_naive_operation(case: int, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """In torch and on the native runtime."""
    theirs = Theirs(CASES[case])
    checkpoint = load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))
    ids = tokens(70)
    wanted = theirs.logits(ids)
    scale = wanted.abs().max()
    found = checkpoint.model.parallel(ids)
    torch.testing.assert_close(found / scale, wanted / scale, rtol=0, atol=TOLERANCE)
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32")
    native = torch.from_numpy(feed(runtime, runtime.empty_pool(1), 0, ids[0].tolist()))
    torch.testing.assert_close(native / scale, wanted[0] / scale, rtol=0, atol=TOLERANCE)


def test_config_has_the_sizes_and_only_the_options_that_differ(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = load_checkpoint(Theirs(CASES[1]).save(tmp_path / "a", tokenizer)).config
    assert isinstance(config, ModelConfig)
    assert (config.attention, config.num_attention_heads, config.head_dim) == ("delta", 4, 12)
    assert config.attention_options == {"key_dim": 6, "conv_size": 4, "decay": True}
    other = load_checkpoint(Theirs(CASES[5]).save(tmp_path / "b", tokenizer)).config
    options = {"key_dim": 4, "conv_size": 4, "decay": False, "negative_eigenvalues": True}
    assert other.attention_options == options


def test_fused_matrix_of_older_files_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    new = load_checkpoint(Theirs(PLAIN).save(tmp_path / "new", tokenizer))
    old = load_checkpoint(Theirs(PLAIN, fused=True).save(tmp_path / "old", tokenizer))
    assert torch.equal(new.model.parallel(tokens(9)), old.model.parallel(tokens(9)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GATED, "attn": {"layers": [1]}}, "gated_deltanet: attn .* is not supported"),
        ({**GATED, "use_short_conv": False}, "use_short_conv False is not supported, only True"),
        ({**GATED, "conv_bias": True}, "conv_bias True is not supported"),
        ({**GATED, "use_mamba_gate": False}, "use_mamba_gate False is not supported"),
        ({**GATED, "num_v_heads": 3}, "num_heads must divide num_v_heads 3, not 2"),
        ({**GATED, "expand_v": 0.7}, r"expand_v times 6 must be a whole number, not 4\.2"),
        ({**GATED, "surprise": 1}, "gated_deltanet: unknown field 'surprise'"),
        ({**PLAIN, "qk_norm": "sum"}, "delta_net: qk_norm 'sum' is not supported, only 'l2'"),
        ({**PLAIN, "qk_activation": "relu"}, "qk_activation 'relu' is not supported"),
        ({**PLAIN, "use_beta": False}, "use_beta False is not supported"),
        ({**PLAIN, "hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = Theirs(GATED if config["model_type"] == "gated_deltanet" else PLAIN)
    theirs.config = config
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))


Change = Callable[[dict[str, Tensor]], object]
ATTN = "model.layers.1.attn."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(ATTN + "A_log"), f"lack key '{ATTN}A_log'"),
        (lambda weights: weights.update({ATTN + "D": torch.ones(2)}), f"unknown key '{ATTN}D'"),
        (
            lambda weights: weights.pop(ATTN + "q_conv1d.weight"),
            f"lack key '{ATTN}q_conv1d",
        ),
    ],
)
def test_what_is_wrong_in_the_weights_is_named(
    change: Change, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = Theirs(GATED)
    change(theirs.saved)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))
