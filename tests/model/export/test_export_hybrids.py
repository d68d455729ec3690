"""Hybrids and Llama in GGUF and as folders of transformers: read back, and by their makers."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from model.architectures.hybrid import HybridConfig
from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.export import WRITERS, writer_of
from model.families.qwen35.network import Qwen35
from model.foreign.config import SCALINGS, Rotary
from tests.hybrid_gguf import hybrid_tensors
from tests.hybrids import FAMILIES, HYBRIDS, ours, qwen35, randomise, texts
from tests.model.architectures.rwkv7_llama import logprobs_after, run_llama
from tests.tiny import tiny_checkpoint, tiny_tokenizer

#: With a vocabulary that holds `tiny_tokenizer`'s, and keys and values of one width.
SERVED = ["qwen35-wide", "qwen35-triple", "lfm2-wide", "llama-wide", "qwen2-wide", "qwen3-wide"]
#: The same with Mamba, which are written in GGUF alone; files of the last have its scale in the
#: weights.
OVER_MAMBA = ["granite-wide", "nemotron-wide", "jamba-wide", "falcon-wide"]
GGUF_ALONE = ["granite3-wide", *OVER_MAMBA]
#: All that are written as folders.
WRITTEN = [
    name for name, hybrid in HYBRIDS.items() if "hf" in WRITERS.get(hybrid.config.attention, {})
]
#: Of logarithms of probabilities down to -12: llama.cpp adds up in other orders.
LLAMA_TOLERANCE = 2e-4
#: Of matrices in GGUF those that stay float32, whatever is asked for.
FLOAT32 = ("conv1d.weight", "conv.weight", "ssm_a", "ssm_d", "_norm.weight")
#: Tensors with other numbers than the converter's: what logits are multiplied with is in the norm.
MULTIPLIED = {
    "granite-wide": ("output_norm.weight",),
    "granite3-wide": ("output_norm.weight",),
    "falcon-wide": ("output_norm.weight", "output.weight"),
}
#: A gated delta net in each layer.
PURE = "pure"


def checkpoint(name: str) -> Checkpoint:
    if name == PURE:
        sizes = {"key_head_dim": 16, "value_head_dim": 16, "num_value_heads": 4}
        config: HybridConfig = qwen35(attention_layers=(), vocab_size=330, **sizes).config
        assert config.constant_state
        model: torch.nn.Module = Qwen35(config)  # type: ignore[arg-type]
        randomise(model, one_plus=False)
    else:
        config, model = HYBRIDS[name].config, ours(name)
    weights = {key: tensor.detach().numpy() for key, tensor in model.state_dict().items()}
    return Checkpoint(config, weights, tiny_tokenizer(), name)


def written(source: Checkpoint, folder: Path, kind: str, dtype: str = "float32") -> Path:
    out = folder / ("model.gguf" if kind == "gguf" else "model")
    writer_of(source, kind)(out, source, dtype)
    return out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(SERVED, ["hf", "gguf"]),
        *itertools.product(GGUF_ALONE[:-1], ["gguf"]),
        (PURE, "hf"),
        ("lfm3-wide", "hf"),
    ],
)
def test_what_is_written_is_read_back_as_the_same(tmp_path: Path, name: str, kind: str) -> None:
    """Bit for bit, but for norms that folders store less one and the logarithm of the decay."""
    source = checkpoint(name)
    found = load_checkpoint(written(source, tmp_path, kind))
    for field, value in source.config.to_dict().items():
        if field != "context":  # which is chosen by who loads it
            wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert getattr(found.config, field) == wanted, field
    assert set(found.weights) == set(source.weights)
    for key, tensor in source.weights.items():
        is_exact = not key.endswith("A_log" if kind == "gguf" else "norm.weight")
        error = np.abs(np.asarray(found.weights[key]) - tensor).max()
        assert error <= (0.0 if is_exact else 5e-7), key
    assert found.tokenizer.digest == source.tokenizer.digest


@pytest.mark.parametrize("tied", [False, True])
def test_scale_of_embeddings_is_part_of_a_falcon_h1(tmp_path: Path, tied: bool) -> None:
    """As in the converter's files, but that the last norm makes up for it in a tied head."""
    source = checkpoint("falcon-wide")
    config = dataclasses.replace(source.config, tied=tied)  # type: ignore[type-var]
    names = config.weight_shapes()
    source = Checkpoint(
        config, {name: source.weights[name] for name in names}, source.tokenizer, source.digest
    )
    found = load_checkpoint(written(source, tmp_path, "gguf"))
    assert found.config.tied == tied  # type: ignore[attr-defined]
    assert found.config.embedding_scale == 1.0  # type: ignore[attr-defined]
    ids = texts("falcon-wide", 60)
    wanted = source.model.parallel(ids)
    assert (found.model.parallel(ids) - wanted).abs().max() < 2e-6 * wanted.abs().max()
    changed = {
        name
        for name in names
        if not name.endswith("A_log")
        and not np.array_equal(found.weights[name], source.weights[name])
    }
    assert changed == {"embedding.weight", *(["norm.weight"] if tied else [])}


@pytest.mark.parametrize("name", [*WRITTEN, PURE])
def test_transformers_reads_the_folder_and_agrees(tmp_path: Path, name: str) -> None:
    """By the largest logit: float32 alone moves transformers' by 2e-4 where that is 3."""
    source = checkpoint(name)
    theirs = AutoModelForCausalLM.from_pretrained(written(source, tmp_path, "hf"))
    family = "qwen3_5_text" if name == PURE else HYBRIDS[name].family
    assert type(theirs) is FAMILIES[family][1]
    ids = torch.arange(2, 60)[None]
    with torch.no_grad():
        wanted = theirs(ids).logits
    scale = wanted.abs().max()
    found = source.model.parallel(ids)
    torch.testing.assert_close(found / scale, wanted / scale, rtol=0, atol=1e-4)


@pytest.mark.package
@pytest.mark.parametrize("name", [*SERVED, *GGUF_ALONE])
def test_llama_cpp_reads_the_gguf_file_and_agrees(tmp_path: Path, name: str) -> None:
    source = checkpoint(name)
    prompt = texts("qwen35-wide", 40, batch=1)
    file = written(source, tmp_path, "gguf")
    wanted = torch.tensor(logprobs_after(file, prompt[0].tolist(), source.config.vocab_size))
    found = source.model.parallel(prompt)[0, -1].log_softmax(dim=-1)
    said = ~wanted.isnan()
    assert said.sum() > 320
    assert (found - wanted)[said].abs().max() < LLAMA_TOLERANCE


@pytest.mark.package
@pytest.mark.parametrize("name", GGUF_ALONE)
def test_llama_cpp_writes_the_same_tokens(tmp_path: Path, name: str) -> None:
    source, prompt = checkpoint(name), texts(name, 44, batch=1)[0].tolist()
    ids = run_llama(written(source, tmp_path, "gguf"), prompt, 300)
    logits = source.model.parallel(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
    logits[:, source.tokenizer.eos_token_ids] = -torch.inf  # as it was told to continue
    assert ids == logits.argmax(dim=-1).tolist()
    assert len(set(ids)) > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "q8_0"])
@pytest.mark.parametrize(
    "name", ["qwen35-wide", "lfm2-wide", "llama-wide", "qwen2-wide", *GGUF_ALONE]
)
def test_gguf_has_the_tensors_and_types_of_the_converter(
    tmp_path: Path, name: str, dtype: str
) -> None:
    file = written(checkpoint(name), tmp_path, "gguf", dtype)
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}[dtype]
    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    wanted = hybrid_tensors(name)
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert tuple(reversed(tensor.shape.tolist())) == wanted[key].shape, key
        stays = wanted[key].ndim == 1 or key.endswith(FLOAT32)
        assert tensor.tensor_type.name == ("F32" if stays else kind), key
        if dtype == "float32" and key not in MULTIPLIED.get(name, ()):
            np.testing.assert_allclose(tensor.data, wanted[key], rtol=0, atol=5e-7, err_msg=key)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen35-wide", {"value_head_dim": 16}, "GGUF implies a value_head_dim of 32, the model"),
        (PURE, {}, "llama.cpp reads no hybrid without a layer of attention"),
        ("lfm2-wide", {"head_dim": 32}, "GGUF implies a head_dim of 64 / 4, the model has 32"),
        ("llama-wide", {"out_bias": True}, "no family that is known elsewhere has out_bias alone"),
        ("qwen3-wide", {"qkv_bias": True, "out_bias": True}, "GGUF has no biases of qwen3"),
        ("granite-wide", {"attention_layers": (), "context": 0}, "no hybrid without a layer of at"),
        ("granite-wide", {"rotary_dim": 8}, "GGUF implies rotary_dim 16, the model has 8"),
        ("granite-wide", {"mamba_head_dim": 8}, r"heads \* mamba_head_dim 128, the model has 64"),
        ("granite-wide", {"mixer_norm": False}, "implies a mixer_norm in granitehybrid, the mode"),
        ("granite-wide", {"head_dim": 15}, "GGUF implies an even head_dim, the model has 15"),
        ("granite-wide", {"mamba_layers": (0, 1, 2, 3, 4)}, "no model with both mixers in some of"),
        ("nemotron-wide", {"rotary_dim": 16}, "GGUF implies rotary_dim 0, the model has 16"),
        ("nemotron-wide", {"embedding_scale": 2.0}, "GGUF implies embedding_scale 1, the model h"),
        ("falcon-wide", {"rotary_dim": 0}, "GGUF implies rotary_dim 16, the model has 0"),
        ("falcon-wide", {"residual_scale": 2.0}, "GGUF implies residual_scale 1, the model has 2"),
        ("falcon-wide", {"attention_scale": 0.3}, r"implies attention_scale 0\.25, the model has"),
        ("jamba-wide", {"inner_size": 96}, "GGUF implies inner_size 128, the model has 96"),
        ("smollm3-odd", {"unrotated_layers": (1,)}, r"GGUF implies unrotated_layers \[3\], the"),
    ],
)
def test_model_that_gguf_cannot_say_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    source = checkpoint(name)
    config = dataclasses.replace(source.config, **change)  # type: ignore[type-var]
    with pytest.raises(CheckpointError, match=message):
        written(dataclasses.replace(source, config=config), tmp_path, "gguf")


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_llama_with_a_constant_state_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError, match="a Llama with windows is exported with --format eve"):
        written(tiny_checkpoint("llama-windows"), tmp_path, kind)
    assert list(tmp_path.iterdir()) == []


def scaled(factors: tuple[float, ...]) -> Checkpoint:
    source = checkpoint("llama-wide")
    config = dataclasses.replace(source.config, rope_factors=factors)  # type: ignore[type-var]
    return dataclasses.replace(source, config=config)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize(("scaling", "factor"), [("linear", 2.5), ("llama3", 32.0)])
def test_scaled_positions_are_read_back(
    tmp_path: Path, scaling: str, factor: float, kind: str
) -> None:
    numbers = {**SCALINGS[scaling], "factor": factor}
    factors = Rotary(1e4, 1.0, scaling, numbers).factors(32)
    found = load_checkpoint(written(scaled(factors), tmp_path, kind)).config
    exact = kind == "hf"
    assert found.rope_factors == (factors if exact else pytest.approx(factors, rel=1e-6))  # type: ignore[attr-defined]


def test_factors_without_a_scaling_are_for_gguf_alone(tmp_path: Path) -> None:
    source = scaled((1.0, 3.0, *[8.0] * 14))
    found, wanted = load_checkpoint(written(source, tmp_path, "gguf")).config, source.config
    assert found.rope_factors == wanted.rope_factors  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="rope_factors are those of no scaling that transf"):
        written(source, tmp_path, "hf")


def test_part_of_a_head_that_turns_survives_rounding(tmp_path: Path) -> None:
    """2 / 98 times 98 is below 2 in floating point."""
    source = checkpoint(PURE)
    config = dataclasses.replace(source.config, head_dim=98, rotary_dim=2)  # type: ignore[type-var]
    found = load_checkpoint(written(dataclasses.replace(source, config=config), tmp_path, "hf"))
    assert found.config == config
