"""A run of a family other than our own blocks: the loop sees the contract alone."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.architectures.config import Config
from model.architectures.hybrid import HybridConfig
from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config
from model.families.rwkv7.config import Arwkv7Config, Rwkv7Config
from model.tokenizer import Tokenizer
from model.training.data import Source
from model.training.loop import TrainConfig, train
from tests.model.commands import everstream, refused
from tests.model.training.conftest import assert_same_run, elsewhere, tensors
from tests.rwkv7 import Shape, published, write_pth

RUN = "--steps 4 --batch-size 2 --window 32 --threads 1 --vocab-size 280 --layers 2"
RWKV7 = "--architecture rwkv7 --hidden-size 16 --head-dim 8"


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> TrainConfig:
    (tmp_path / "run").mkdir()
    return TrainConfig(
        (Source(corpus),),
        tmp_path / "run",
        num_steps=8,
        batch_size=3,
        window=40,  # not a multiple of the blocks of the recurrence
        warmup_steps=2,
        precision="float32",
        threads=1,
    )


@pytest.fixture
def rwkv7(tokenizer: Tokenizer) -> Rwkv7Config:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    return Rwkv7Config.for_training(tokenizer.vocab_size, tokenizer.eos_token_id, sizes)


@pytest.fixture
def mamba2(tokenizer: Tokenizer) -> Mamba2Config:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    options = {"attention_options": {"state_size": 12}}
    return Mamba2Config.for_training(
        tokenizer.vocab_size, tokenizer.eos_token_id, {**sizes, **options}
    )


@pytest.fixture
def mamba(tokenizer: Tokenizer) -> MambaConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2}
    return MambaConfig.for_training(tokenizer.vocab_size, tokenizer.eos_token_id, sizes)


@pytest.fixture
def arwkv7(tokenizer: Tokenizer) -> Arwkv7Config:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    options = {"attention_options": {"gate_rank": 8}}
    return Arwkv7Config.for_training(
        tokenizer.vocab_size, tokenizer.eos_token_id, {**sizes, **options}
    )


@pytest.fixture
def gated_deltanet(tokenizer: Tokenizer) -> ModelConfig:
    """Our `delta` with every option that models of this family may have."""
    options = {"key_dim": 4, "gate": False, "negative_eigenvalues": True}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    return ModelConfig.for_training(
        tokenizer.vocab_size, tokenizer.eos_token_id, {**sizes, "attention_options": options}
    )


@pytest.fixture
def qwen35(tokenizer: Tokenizer) -> Qwen35Config:
    """A gated delta net in each layer."""
    heads = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 8}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    options = {"attention_options": {"attention_layers": [], **heads}}
    return Qwen35Config.for_training(
        tokenizer.vocab_size, tokenizer.eos_token_id, {**sizes, **options}
    )


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Config:
    """A config by the name of its fixture."""
    found: Config = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("muon", "float32"), ("adamw", "float32"), ("muon", "bfloat16")]
)
@pytest.mark.parametrize(
    "family", ["rwkv7", "mamba2", "arwkv7", "gated_deltanet", "qwen35"], indirect=True
)
def test_stopped_run_resumes_bit_for_bit(
    optimizer: str, precision: str, config: TrainConfig, family: Config, tokenizer: Tokenizer
) -> None:
    config = dataclasses.replace(config, optimizer=optimizer, precision=precision)
    train(config, family, tokenizer)
    other = elsewhere(config, "other")
    train(dataclasses.replace(other, stop_at_step=3), family, tokenizer)
    train(other, family, tokenizer)
    assert_same_run(config.out, other.out)


def test_run_learns_carries_its_state_samples_and_leaves_the_best_model(
    config: TrainConfig, rwkv7: Rwkv7Config, tokenizer: Tokenizer, corpus: Path
) -> None:
    shown = {"valid": (corpus,), "eval_every": 15, "sample_every": 30}
    config = dataclasses.replace(config, num_steps=30, **shown)  # type: ignore[arg-type]
    folder = train(config, rwkv7, tokenizer)
    with (config.out / "log.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    assert float(rows[29]["valid_bits_per_byte"]) < float(rows[14]["valid_bits_per_byte"])
    assert (config.out / "samples.txt").read_text(encoding="utf-8").count("step 30") == 1
    saved = tensors(config.out)
    assert saved["state.1.S"].shape == (3, 2, 8, 8)
    assert saved["state.1.S"].any()
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == rwkv7


@pytest.mark.parametrize("family", ["rwkv7", "mamba2", "mamba"], indirect=True)
def test_every_weight_is_trained(config: TrainConfig, family: Config, tokenizer: Tokenizer) -> None:
    train(dataclasses.replace(config, stop_at_step=1), family, tokenizer)
    early = tensors(config.out)
    train(config, family, tokenizer)
    for name, tensor in tensors(config.out).items():
        if name.startswith("model.") and "embedding.weight" not in name:
            assert (tensor != early[name]).any(), name


def test_command_trains_and_a_second_run_starts_from_its_model(
    corpus: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--data", corpus, *RUN.split()]
    ranks = ["--attention-options", '{"gate_rank": 12}']
    everstream("train", *options, *RWKV7.split(), *ranks, "--out", first)
    config = json.loads((first / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "everstream-rwkv7"
    assert (config["gate_rank"], config["intermediate_size"]) == (12, 64)
    everstream("train", *options, "--init-from", first / "model", "--out", second)
    assert json.loads((second / "model" / "config.json").read_text(encoding="utf-8")) == config


def test_command_trains_a_mamba2(corpus: Path, tmp_path: Path) -> None:
    sizes = "--architecture mamba2 --hidden-size 16 --head-dim 8"
    options = ["--attention-options", '{"state_size": 12}', "--out", tmp_path / "run"]
    everstream("train", "--data", corpus, *RUN.split(), *sizes.split(), *options)
    config = load_checkpoint(tmp_path / "run" / "model").config
    assert isinstance(config, Mamba2Config)
    assert (config.num_attention_heads, config.head_dim, config.state_size) == (4, 8, 12)


@pytest.mark.parametrize(
    ("family", "options", "attention_layers", "constant"),
    [
        ("qwen35", {}, (3,), False),
        ("qwen35", {"attention_layers": []}, (), True),
        ("lfm2", {}, (2,), False),
        ("mamba2_hybrid", {"attention_layers": [1], "mamba_layers": [0, 1]}, (1,), False),
        ("mamba2_hybrid", {"mamba_layers": [0, 1, 2, 3]}, (), True),
        ("jamba", {"attention_layers": [1], "inner_size": 32, "dt_rank": 4}, (1,), False),
        ("lfm3", {"window_layers": [1], "window": 8}, (2,), False),
        ("lfm3", {"attention_layers": [0, 3], "window": 8}, (0, 3), False),
    ],
)
def test_command_trains_a_hybrid(
    corpus: Path,
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    attention_layers: tuple[int, ...],
    constant: bool,
) -> None:
    sizes = f"--architecture {family} --hidden-size 16 --heads 2 --head-dim 8 --layers 4"
    options = {"num_key_value_heads": 1, "conv_size": 3, **options}
    if family == "qwen35":
        heads = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
        options |= heads | {"rotary_dim": 4}
    if family == "mamba2_hybrid":
        options |= {"num_mamba_heads": 2, "mamba_head_dim": 8, "state_size": 8}
    more = ["--intermediate-size", 24, "--attention-options", json.dumps(options)]
    run = "--steps 4 --batch-size 2 --window 32 --threads 1 --vocab-size 280"
    everstream(
        "train", "--data", corpus, *run.split(), *sizes.split(), *more, "--out", tmp_path / "run"
    )
    config = load_checkpoint(tmp_path / "run" / "model").config
    assert isinstance(config, HybridConfig)
    assert (config.attention, config.attention_layers) == (family, attention_layers)
    assert config.constant_state == constant
    assert config.attention_options.items() >= options.items()


def test_layer_that_is_named_for_mamba_stays_one_where_attention_is_usual() -> None:
    options = {"mamba_layers": list(range(8))}
    chosen = {"num_hidden_layers": 8, "attention_options": options}
    config = Mamba2HybridConfig.for_training(97, 0, chosen)
    assert config.attention_layers == (7,)
    assert all(config.is_mamba)


def test_name_of_the_field_trains_our_delta(corpus: Path, tmp_path: Path) -> None:
    sizes = "--architecture gated_deltanet --hidden-size 16 --heads 2 --head-dim 8"
    options = ["--attention-options", '{"key_dim": 4}', "--out", tmp_path / "run"]
    everstream("train", "--data", corpus, *RUN.split(), *sizes.split(), *options)
    config = load_checkpoint(tmp_path / "run" / "model").config
    assert isinstance(config, ModelConfig)
    assert (config.attention, config.attention_options) == ("delta", {"key_dim": 4})


def test_softmax_and_elu_train_with_convolution_norm_and_gate(corpus: Path, tmp_path: Path) -> None:
    sizes = "--hidden-size 16 --heads 2 --head-dim 8 --intermediate-size 16"
    parts = {"conv_size": 3, "gate": True, "norm": True}
    for name in ("softmax", "elu"):
        out = tmp_path / name
        options = ["--attention", name, "--attention-options", json.dumps(parts), "--out", out]
        everstream("train", "--data", corpus, *RUN.split(), *sizes.split(), *options)
        checkpoint = load_checkpoint(out / "model")
        assert checkpoint.config.attention_options == parts
        names = dict(checkpoint.model.named_parameters())
        for part in ("conv_weight", "gate.weight", "norm_weight"):
            assert names[f"blocks.0.attention.{part}"].isfinite().all()


def write_vocabulary(path: Path) -> Path:
    """RWKV's: the bytes and two words, with ids up to 258."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"the ", b" fox"]
    lines = [f"{id} {token!r} {len(token)}\n" for id, token in enumerate(tokens, start=1)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_published_file_is_trained_on_with_its_vocabulary(corpus: Path, tmp_path: Path) -> None:
    shape = Shape(600, 16, 2, 8, 24, (4, 3, 2, 5))  # most ids are padding, which no sample has
    weights = published(shape)
    file = write_pth(tmp_path / "theirs.pth", weights)
    write_vocabulary(tmp_path / "rwkv_vocab_v20230424.txt")
    options = ["--data", corpus, "--init-from", file, "--out", tmp_path / "run"]
    everstream("train", *options, "--learning-rate", 1e-6, "--sample-every", 4, *RUN.split())
    checkpoint = load_checkpoint(tmp_path / "run" / "model")
    assert checkpoint.config == shape.config
    assert checkpoint.tokenizer.vocab_size == 259
    head = torch.from_numpy(checkpoint.weights["head.weight"].copy())
    torch.testing.assert_close(head, weights["head.weight"], rtol=0, atol=1e-4)
    assert not torch.equal(head, weights["head.weight"])
    assert "=== step 4" in (tmp_path / "run" / "samples.txt").read_text(encoding="utf-8")


def test_rwkv_vocabulary_is_a_tokenizer_to_train_with(corpus: Path, tmp_path: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    options = ["--data", corpus, "--tokenizer", vocabulary, "--out", tmp_path / "run"]
    everstream("train", *options, *RUN.split(), *RWKV7.split())
    checkpoint = load_checkpoint(tmp_path / "run" / "model")
    assert checkpoint.config.vocab_size == checkpoint.tokenizer.vocab_size == 259
    assert checkpoint.tokenizer.encode("the fox") == [257, 103, 112, 121]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--architecture gru", "architecture must be everstream or rwkv7 or "),
        (
            "--architecture rwkv7 --heads 3",
            "num_attention_heads is hidden_size / head_dim = 4, not 3",
        ),
        ("--architecture rwkv7 --attention delta", "attention must be 'rwkv7', not 'delta'"),
        ("--architecture rwkv7 --head-dim 60", "head_dim must divide 256, not 60"),
        ("--architecture everstream --attention rwkv7", "'rwkv7' is unknown"),
        (
            "--architecture gated_deltanet --attention elu",
            "attention must be 'delta' for gated_deltanet, not 'elu'",
        ),
        (
            '--architecture qwen35 --attention-options {"rank":3}',
            "attention_options must be an object of attention_layers, num_key_value_heads, rotary",
        ),
        (
            "--architecture lfm3 --attention-options [1]",
            "attention_options must be an object of attention_layers, window_layers, window,",
        ),
        (
            "--architecture qwen35 --head-dim 32",
            "rotary_dim must be even and at most 32, not 64",
        ),
    ],
)
def test_mistake_is_one_line_and_status_2(
    corpus: Path, tmp_path: Path, more: str, message: str
) -> None:
    command = ["train", "--data", corpus, "--out", tmp_path / "run", *RUN.split()]
    assert message in refused(*command, *more.split())
