"""ARWKV equals its published equations in every form, and llama.cpp on the same file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.architectures import config_from_dict
from model.architectures.network import model_of
from model.checkpoint import load_checkpoint
from model.config import ConfigError
from model.families.rwkv7.config import Arwkv7Config
from model.families.rwkv7.network import Arwkv7
from model.native.runtime import Runtime
from model.state import StateLayout
from tests.arwkv7 import SHAPES, gguf_tensors, our_weights, published, write_gguf
from tests.gguf_files import byte_level_vocabulary
from tests.model.architectures.arwkv7_oracle import oracle
from tests.model.architectures.rwkv7_llama import logprobs_after, run_llama
from tests.model.attention.test_contract import assert_close, random_split
from tests.model.ops.cpu.models import random_tokens
from tests.tiny import tiny_tokenizer

NAMES = list(SHAPES)
#: Of float32 sums, relative to the largest: a norm divides heads' outputs by their size, which may
#: be small.
TOLERANCE = 3e-4
#: Of log-probabilities between -20 and 0. llama.cpp adds in another order, in float32.
LLAMA_TOLERANCE = 2e-4
#: With weights that both round, but llama.cpp rounds what it multiplies them with too.
LLAMA_ROUNDED = {"BF16": 0.15, "Q8_0": 0.4}


@cache
def model(name: str) -> Arwkv7:
    shape = SHAPES[name]
    network = model_of(shape.config, our_weights(shape, published(shape)))
    assert isinstance(network, Arwkv7)
    return network


@cache
def texts(name: str, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(SHAPES[name].vocab_size, (2, length), generator=generator)


def in_parts(name: str, tokens: Tensor, sizes: list[int]) -> tuple[Tensor, object]:
    """A size of 0 is one token through `step`."""
    network, outputs = model(name), []
    state, position = network.empty_state(len(tokens)), torch.zeros(len(tokens), dtype=torch.int64)
    for size in sizes:
        part, tokens = tokens[:, : size or 1], tokens[:, size or 1 :]
        if size:
            logits, state = network.chunk(part, state, position)
        else:
            logits, state = network.step(part[:, 0], state, position)
            logits = logits[:, None]
        outputs.append(logits)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[40], [0] * 40, [1, 16, 0, 22]])
def test_every_form_equals_the_equations(name: str, sizes: list[int]) -> None:
    tokens = texts(name, 40)
    logits, state = in_parts(name, tokens, sizes)
    for row, text in enumerate(tokens.tolist()):
        wanted, wanted_state = oracle(published(SHAPES[name]), text)
        assert_close(logits[row], wanted, TOLERANCE)
        for layer, wanted_layer in zip(state, wanted_state, strict=True):  # type: ignore[call-overload]
            assert layer.keys() == wanted_layer.keys()
            assert_close(layer["S"][row].transpose(-1, -2), wanted_layer["S"], TOLERANCE)
            assert_close(layer["time_shift"][row], wanted_layer["time_shift"], TOLERANCE)


def test_any_chunking_equals_the_whole() -> None:
    tokens = texts("odd_gated", 100)
    wanted = model("odd_gated").parallel(tokens)
    logits, _ = in_parts("odd_gated", tokens, random_split(100, 1))
    assert_close(logits, wanted.double(), TOLERANCE)


def test_published_sizes_have_their_bytes_of_state() -> None:
    """0.5B, 1.5B, 3B and 7B."""
    sizes = [(24, 896), (28, 1536), (36, 2048), (28, 3584)]
    configs = [Arwkv7Config(151936, width, layers) for layers, width in sizes]
    assert [round(StateLayout.of(c).num_bytes / 1e6, 1) for c in configs] == [5.6, 11.2, 19.2, 26.1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gate_rank": -1}, "gate_rank must be a positive integer"),
        ({"value_rank": 0}, "value_rank must be a positive integer"),
        ({"group_norm": 1}, "group_norm must be a boolean, not 1"),
        ({"tied": None}, "tied must be a boolean, not None"),
        ({"head_dim": 100}, "head_dim must divide 896, not 100"),
        ({"group_norm_eps": 0.0}, r"group_norm_eps must be in \(0, 1\)"),
    ],
)
def test_config_names_the_field(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict({"model_type": "everstream-arwkv7", "vocab_size": 9, **values})


def test_gate_and_norm_are_there_where_training_asks_for_them() -> None:
    chosen = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    plain = Arwkv7Config.for_training(300, 0, chosen)
    assert (plain.gate_rank, plain.group_norm, plain.intermediate_size) == (0, False, 192)
    options = {"gate_rank": 8, "group_norm": True}
    config = Arwkv7Config.for_training(300, 0, {**chosen, "attention_options": options})
    assert config.attention_options == {**plain.attention_options, **options}
    network = Arwkv7(config)
    network.init_weights(torch.Generator().manual_seed(0))
    assert network.get_parameter("blocks.1.mixer.shift_mix").shape == (6, 64)
    with pytest.raises(ConfigError, match="num_attention_heads is hidden_size / head_dim = 4"):
        Arwkv7Config.for_training(300, 0, {**chosen, "num_attention_heads": 2})


@pytest.fixture(params=["plain", "gated", "normed", "both"])
def gguf(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name = str(request.param)
    shape = SHAPES[name]
    fill = byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)
    tensors = gguf_tensors(shape, published(shape))
    return name, write_gguf(tmp_path / "model.gguf", shape, tensors, fill)


@pytest.mark.package
def test_llama_cpp_reads_the_same_file_alike(gguf: tuple[str, Path]) -> None:
    """All log-probabilities after a prompt, then 300 greedy tokens of the native runtime."""
    name, path = gguf
    checkpoint, prompt = load_checkpoint(path), random_tokens(SHAPES[name].config, 30)
    end = checkpoint.tokenizer.eos_token_id  # which llama.cpp never draws when told to continue
    theirs = np.array(logprobs_after(path, prompt, SHAPES[name].vocab_size))
    ours = checkpoint.model.parallel(torch.tensor([prompt]))[0, -1].log_softmax(-1).numpy()
    seen = np.isfinite(theirs)
    assert seen.sum() > 100
    assert np.abs(ours - theirs)[seen].max() <= LLAMA_TOLERANCE
    wanted = run_llama(path, prompt, 300)
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32")
    pool, draw = runtime.empty_pool(1), runtime.draw(temperature=0.0, logit_bias=[(end, -1e9)])
    tokens, fed, position = [], prompt, 0
    for _ in range(300):
        ((token,),) = runtime.run(pool, [0], [position], [fed], [draw])
        tokens.append(token)
        position, fed = position + len(fed), [token]
    assert tokens == wanted
    assert len(set(tokens)) > 20  # not one token again and again


@pytest.mark.package
@pytest.mark.parametrize("kind", LLAMA_ROUNDED)
def test_llama_cpp_reads_lower_precisions_alike(kind: str, tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    fill = byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)
    path = tmp_path / "model.gguf"
    write_gguf(path, shape, gguf_tensors(shape, published(shape)), fill, kind)
    checkpoint, prompt = load_checkpoint(path), random_tokens(shape.config, 30)
    theirs = np.array(logprobs_after(path, prompt, shape.vocab_size))
    ours = checkpoint.model.parallel(torch.tensor([prompt]))[0, -1].log_softmax(-1).numpy()
    errors = np.abs(ours - theirs)[np.isfinite(theirs)]
    assert 1e-6 < errors.max() <= LLAMA_ROUNDED[kind]
