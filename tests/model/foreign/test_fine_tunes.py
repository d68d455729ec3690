"""Fine-tunes of other programs: adapters of every family, and folders of merged models.

The oracle is the model of transformers, whose modules get the published formulas; the package
``peft`` gave the same logits when these tests were written.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.checkpoint import CheckpointError, load_checkpoint
from model.checkpoint_files import Lora
from model.export import writer_of
from model.files import ConfigError
from model.foreign.lora import LAYOUTS
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer
from model.weights import StoredWeights
from tests import arwkv7, mamba
from tests.gguf_files import byte_level_vocabulary
from tests.hybrid_gguf import write_hybrid
from tests.hybrids import randomise, theirs
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_hybrids import lfm2_model, multimodal, text_model
from tests.model.foreign.test_jamba import jamba_model
from tests.model.foreign.test_lfm3 import FLOAT16_STEP
from tests.model.foreign.test_lfm3 import built as lfm3_model
from tests.model.foreign.test_llama import llama
from tests.model.foreign.test_mamba2_hybrid import (
    falcon_model,
    granite3_model,
    granite_model,
    nemotron_model,
)

#: Of logits, by the largest: transformers adds up float32 in another order.
TOLERANCE = 1e-4
RANK, ALPHA = 4, 9.0
PEFT = "base_model.model."
#: Of Linear modules that transformers reads without calling them.
NOT_CALLED = ("dt_proj", "out_proj")
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen35": text_model,
    "qwen35-multimodal": multimodal,
    "lfm2": lfm2_model,
    "lfm3": lfm3_model,
    "llama": lambda: llama(attention_bias=True),
    "llama-tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=2),
    "granite": granite_model,
    "granite3": granite3_model,
    "jamba": jamba_model,
    "nemotron": nemotron_model,
    "mamba": lambda: copy.deepcopy(mamba.theirs("first")),
    "mamba2": lambda: copy.deepcopy(mamba.theirs("odd")),
}
Adapter = dict[str, Tensor]


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> PreTrainedModel:
    return made(name)


def made(name: str) -> PreTrainedModel:
    model = MODELS[name]()
    if not name.startswith("mamba"):
        randomise(model, one_plus=name.startswith("qwen35"))
    return model.eval().requires_grad_(False)


@pytest.fixture
def base(model: PreTrainedModel, tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return save(model, tmp_path / "base", tokenizer)


def save(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer) -> Path:
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Those of text that ``target_modules="all-linear"`` takes, but the head."""
    is_mamba = "mamba" in model.config.model_type
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not (name == "lm_head" or "visual" in name)
        and not (is_mamba and name.endswith(NOT_CALLED))
    }


def add(module: nn.Linear, a: Tensor, b: Tensor, scale: float, m: Tensor | None = None) -> None:
    """The published formula, in float64."""
    changed = module.weight.double() + scale * (b.double() @ a.double())
    if m is not None:
        changed *= (m.double() / changed.norm(dim=1))[:, None]
    module.weight.copy_(changed.float())


def tune(model: PreTrainedModel, scale: float, dora: bool = False) -> Adapter:
    """Changes all Linear modules; the file that says so."""
    generator, adapter = torch.Generator().manual_seed(3), {}
    for name, module in linear_modules(model).items():
        out, width = module.weight.shape
        a = 0.3 * torch.randn(RANK, width, generator=generator)
        b = 0.3 * torch.randn(out, RANK, generator=generator)
        m = 0.5 + torch.rand(out, generator=generator) if dora else None
        add(module, a, b, scale, m)
        adapter |= {f"{PEFT}{name}.lora_A.weight": a, f"{PEFT}{name}.lora_B.weight": b}
        if m is not None:
            adapter[f"{PEFT}{name}.lora_magnitude_vector"] = m
    return adapter


def write(folder: Path, adapter: Adapter, **config: Any) -> Path:
    """As ``peft`` writes it, with the fields that Unsloth and Axolotl leave there."""
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    values = {
        "alora_invocation_tokens": None,
        "auto_mapping": {"base_model_class": "Any", "unsloth_fixed": True},
        "base_model_name_or_path": "unsloth/any",
        "bias": "none",
        "corda_config": None,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_core": "megatron.core",
        "peft_type": "LORA",
        "r": RANK,
        "rank_pattern": {},
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "use_qalora": False,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n", encoding="utf-8")
    return folder


def assert_same(base: Path, adapter: Path, model: PreTrainedModel) -> None:
    """And the base without the adapter is another model."""
    ids = tokens(30)
    found, plain = load_checkpoint(base, lora=Lora((adapter,))), load_checkpoint(base)
    size = found.config.vocab_size
    wanted = model(ids).logits[..., :size]
    largest = wanted.abs().max()
    logits = found.model.parallel(ids)
    torch.testing.assert_close(logits / largest, wanted / largest, rtol=0, atol=TOLERANCE)
    assert (plain.model.parallel(ids) - wanted).abs().max() > 0.01 * largest
    assert found.digest != plain.digest


KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "lora": (ALPHA / RANK, {}),
    "rslora": (ALPHA / RANK**0.5, {"use_rslora": True}),
    "dora": (ALPHA / RANK, {"use_dora": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_gives_the_logits_of_transformers(
    base: Path, model: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    scale, config = KINDS[kind]
    adapter = tune(model, scale, dora=kind == "dora")
    assert_same(base, write(tmp_path / "adapter", adapter, **config), model)


@pytest.mark.parametrize("saved", ["both", "embedding", "head", "norm"])
def test_modules_to_save_replace_those_of_the_model(
    base: Path, model: PreTrainedModel, tmp_path: Path, saved: str
) -> None:
    """A head that was the embedding and is not changed stays as it was."""
    untie(model)
    adapter, generator = tune(model, ALPHA / RANK), torch.Generator().manual_seed(4)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    norm = next(module for name, module in norms.items() if "visual" not in name)
    names = {id(module): name for name, module in model.named_modules()}
    modules = {"both": (embedding, head), "embedding": (embedding,), "head": (head,)}
    for module in modules.get(saved, (norm,)):
        noise = torch.randn(module.weight.shape, generator=generator)
        module.weight.add_(0.2 * noise)
        adapter[f"{PEFT}{names[id(module)]}.weight"] = module.weight.clone()
    assert_same(base, write(tmp_path / "adapter", adapter), model)


def test_change_of_the_head_has_what_it_changes_next_to_it(
    base: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """As ``peft`` saves a head that is a target, whose base may be the embedding."""
    untie(model)
    head = model.get_output_embeddings()
    a, b = torch.randn(RANK, head.weight.shape[1]) / 9, torch.randn(head.weight.shape[0], RANK)
    adapter = {f"{PEFT}lm_head.base_layer.weight": head.weight.clone()}
    adapter |= {f"{PEFT}lm_head.lora_A.weight": a, f"{PEFT}lm_head.lora_B.weight": b}
    add(head, a, b, ALPHA / RANK)
    assert_same(base, write(tmp_path / "adapter", adapter), model)


def untie(model: PreTrainedModel) -> None:
    """Gives the head weights of its own."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)


def test_merged_model_with_a_head_of_its_own_is_exported(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    base = save(made("lfm2"), tmp_path / "base", tokenizer)
    model = made("lfm2")
    weight = model.get_input_embeddings().weight + 1
    adapter = write(tmp_path / "adapter", {f"{PEFT}model.embed_tokens.weight": weight})
    merged = load_checkpoint(base, lora=Lora((adapter,)))
    writer_of(merged, "hf")(tmp_path / "out", merged, "float32")
    found = load_checkpoint(tmp_path / "out")
    assert isinstance(merged.weights, StoredWeights)
    assert set(found.weights) == set(merged.weights) and "head.weight" in found.weights
    for key in found.weights:
        assert (found.weights[key] == merged.weights[key]).all(), key
        assert (merged.weights.rows(key, 1, 3) == merged.weights[key][1:3]).all(), key
    assert (found.weights["embedding.weight"] == found.weights["head.weight"] + 1).all()
    runtime, ids = Runtime(merged.config, merged.weights, "float32"), tokens(9)[0]
    runtime.run(runtime.empty_pool(1), [0], [0], [ids.tolist()], [runtime.draw()])
    wanted = merged.model.parallel(ids[None])[0, -1]
    error = (torch.from_numpy(runtime.logits()[0]) - wanted).abs().max()
    assert error <= 4 * FLOAT16_STEP * wanted.abs().max()  # keys and values are float16


@pytest.mark.parametrize("name", ["qwen35-triple", "lfm2-wide", "llama-wide", "granite3-wide"])
def test_gguf_and_folder_get_the_same_from_an_adapter(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    """Though llama.cpp's converter changes the order of heads and of channels."""
    model = copy.deepcopy(theirs(name))
    folder = save(model, tmp_path / "base", tokenizer)
    fill = byte_level_vocabulary(tokenizer, model.config.vocab_size)
    gguf = write_hybrid(tmp_path / "base.gguf", name, fill=fill)
    lora = Lora((write(tmp_path / "adapter", tune(model, ALPHA / RANK)),))
    wanted, found = (load_checkpoint(each, lora=lora).weights for each in (folder, gguf))
    assert found.keys() == wanted.keys()
    for key in wanted:
        size = len(found[key])
        torch.testing.assert_close(
            torch.tensor(found[key]), torch.tensor(wanted[key][:size]), rtol=0, atol=2e-6
        )


def test_adapter_of_arwkv_has_the_keys_of_its_folders(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Transformers has no such model: the formula on its weights."""
    shape, generator = arwkv7.SHAPES["plain"], torch.Generator().manual_seed(6)
    published, config = arwkv7.published(shape), arwkv7.folder_config(shape)
    base = arwkv7.write_folder(tmp_path / "base", published, config, tokenizer)
    modules = ("self_attn.time_mixer.receptance", "self_attn.time_mixer.output", "mlp.down_proj")
    adapter: Adapter = {}
    for module in (f"model.layers.1.{name}" for name in modules):
        linear = nn.Linear(*published[f"{module}.weight"].T.shape, bias=False).requires_grad_(False)
        linear.weight.copy_(published[f"{module}.weight"])
        a = torch.randn(RANK, linear.in_features, generator=generator)
        b = torch.randn(linear.out_features, RANK, generator=generator)
        adapter |= {f"{PEFT}{module}.lora_A.weight": a, f"{PEFT}{module}.lora_B.weight": b}
        add(linear, a, b, ALPHA / RANK)
        published[f"{module}.weight"] = linear.weight
    lora = Lora((write(tmp_path / "adapter", adapter),))
    found, plain = load_checkpoint(base, lora=lora).weights, load_checkpoint(base).weights
    wanted = arwkv7.our_weights(shape, published)
    for key in found:
        assert found[key] == pytest.approx(wanted[key], abs=1e-5), key
    assert sum((found[key] != plain[key]).any() for key in found) == len(modules)


def test_adapter_of_a_model_with_multipliers_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = falcon_model().requires_grad_(False)
    base = save(model, tmp_path / "base", tokenizer)
    adapter = write(tmp_path / "adapter", tune(model, ALPHA / RANK))
    with pytest.raises(ConfigError, match="--lora is not for falcon_h1 models"):
        load_checkpoint(base, lora=Lora((adapter,)))


def test_template_of_the_adapter_is_that_of_the_training(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = made("llama")
    base = save(model, tmp_path / "base", tokenizer)
    adapter = write(tmp_path / "adapter", tune(model, ALPHA / RANK))
    plain = load_checkpoint(base, lora=Lora((adapter,)))
    assert plain.chat_template == load_checkpoint(base).chat_template
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    found = load_checkpoint(base, lora=Lora((adapter,)))
    assert found.chat_template.source == "{{ messages[0].content }}"
    assert found.digest == plain.digest


def test_adapter_in_the_place_of_a_model_names_its_base(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", {f"{PEFT}lm_head.lora_A.weight": torch.ones(1, 1)})
    message = r"adapter has no config\.json: it is an adapter, for --lora; .*\(unsloth/any\)"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_other_files_of_a_fine_tune_are_left_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A merged folder of Unsloth, in the output folder of a run of Axolotl."""
    folder = save(made("qwen35"), tmp_path / "merged", tokenizer)
    wanted = load_checkpoint(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values |= {"unsloth_fixed": True, "unsloth_version": "2026.9.1", "model_name": "unsloth/any"}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    for file in ("training_args.bin", "optimizer.pt", "debug.log", "README.md", "rng_state.pth"):
        (folder / file).write_bytes(b"not a model")
    for file in ("trainer_state.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / file).write_text("{}", encoding="utf-8")
    checkpoint = folder / "checkpoint-10"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{", encoding="utf-8")
    save_file({"side": torch.ones(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    found = load_checkpoint(folder)
    assert found.config == wanted.config
    assert torch.equal(found.model.parallel(tokens(9)), wanted.model.parallel(tokens(9)))


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("model.visual.blocks.0.attn.qkv.lora_A.weight", (4, 8), "which is no weight of the model"),
        ("model.layers.0.conv.conv.lora_A.weight", (4, 8), "is of no Linear weight"),
        ("model.layers.0.operator_norm.lora_A.weight", (4, 8), "is of no Linear weight"),
        ("model.embed_tokens.lora_embedding_A", (4, 8), "LoRA of an embedding"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (1, 8), "single rows of an"),
        ("model.embed_tokens.weight", (320, 20), r"is \[320, 20\], wanted \[310, 20\]"),
    ],
)
def test_what_cannot_be_merged_is_named(
    tmp_path: Path, tokenizer: Tokenizer, key: str, shape: tuple[int, ...], message: str
) -> None:
    base = save(made("lfm2"), tmp_path / "base", tokenizer)
    folder = write(tmp_path / "adapter", {f"{PEFT}{key}": torch.ones(shape)})
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(base, lora=Lora((folder,)))


def test_every_family_that_is_published_has_adapters() -> None:
    from model.architectures import ARCHITECTURES

    families = {family.name for family in ARCHITECTURES.values()}
    assert LAYOUTS.keys() == families - {"everstream"}
