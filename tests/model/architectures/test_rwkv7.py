"""RWKV-7 equals its published equations in every form, for any split of a text."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.architectures.network import ModelState, model_of
from model.families.rwkv7.network import Rwkv7
from model.families.rwkv7.read import read_native
from model.weights.torch_file import TorchFile
from tests.model.architectures.forms import (
    assert_bfloat16_is_near,
    assert_gradients_agree,
    chunk,
    parallel,
    random_texts,
    steps,
)
from tests.model.architectures.rwkv7_oracle import oracle
from tests.model.architectures.rwkv7_package import run_package
from tests.model.attention.test_contract import assert_close, random_split
from tests.rwkv7 import SHAPES, filled, published, write_pth

PACKAGE_TOLERANCE = 1e-4
#: Half a unit in the last place of bfloat16, over the depth of the model.
BFLOAT16_TOLERANCE = 0.1


@cache
def equations(name: str, length: int) -> list[tuple[Tensor, list[dict[str, Tensor]]]]:
    """What the equations say of `texts`, row by row."""
    return [oracle(published(SHAPES[name]), row.tolist()) for row in texts(name, length)]


@pytest.fixture(params=["odd", "square"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rwkv7")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Rwkv7]:
    return {name: load(name, folder) for name in SHAPES}


@pytest.fixture
def model(models: dict[str, Rwkv7], name: str) -> Rwkv7:
    return models[name]


def load(name: str, folder: Path) -> Rwkv7:
    file = write_pth(folder / f"{name}.pth", published(SHAPES[name]))
    network = model_of(*read_native(TorchFile(file), file.name))
    assert isinstance(network, Rwkv7)
    return network


@pytest.mark.parametrize("form", ["parallel", "chunk", "step"])
def test_every_form_equals_the_equations(model: Rwkv7, name: str, form: str) -> None:
    tokens = texts(name, 40)
    logits, state = {"parallel": parallel, "chunk": chunk, "step": steps}[form](model, tokens)
    for row, (wanted, wanted_state) in enumerate(equations(name, 40)):
        assert_close(logits[row], wanted)
        for layer, wanted_layer in zip(state, wanted_state, strict=True) if state else ():
            assert_close(layer["S"][row].transpose(-1, -2), wanted_layer["S"])
            for shift in ("time_shift", "channel_shift"):
                assert_close(layer[shift][row], wanted_layer[shift])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_the_steps(model: Rwkv7, name: str, seed: int) -> None:
    tokens = texts(name, 200)
    wanted, wanted_state = steps(model, tokens)
    logits, state = chunk(model, tokens, random_split(200, seed))
    assert_close(logits, wanted.double())
    assert_same(state, wanted_state)


def test_rows_do_not_mix(model: Rwkv7, name: str) -> None:
    tokens = texts(name, 70)
    logits, _ = chunk(model, tokens, [64, 6])
    for row in range(len(tokens)):
        alone, _ = chunk(model, tokens[row : row + 1], [64, 6])
        assert_close(logits[row], alone[0].double())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_future_never_changes_the_past(model: Rwkv7, name: str, length: int) -> None:
    """Not even in rounding."""
    tokens = texts(name, 80)
    changed = tokens.clone()
    changed[:, length:] = (changed[:, length:] + 1) % SHAPES[name].vocab_size
    first, second = (chunk(model, each)[0] for each in (tokens, changed))
    assert torch.equal(first[:, :length], second[:, :length])
    assert not torch.equal(first[:, length], second[:, length])


def test_strong_decay_and_full_removal_equal_the_equations(name: str) -> None:
    """Every channel decays as fast as it can, and each token removes what its key reads."""
    weights = filled(SHAPES[name], w0=30.0, a0=30.0)
    model = model_from(weights)
    tokens = texts(name, 48)
    wanted, _ = oracle(weights, tokens[0].tolist())
    for form in (parallel, chunk, steps):
        assert_close(form(model, tokens[:1])[0][0], wanted)


def test_key_of_zeros_equals_the_equations(name: str) -> None:
    """The norm of the removal key has a floor."""
    weights = filled(SHAPES[name], k_k=0.0)
    model, tokens = model_from(weights), texts(name, 20)
    wanted, _ = oracle(weights, tokens[0].tolist())
    assert_close(steps(model, tokens[:1])[0][0], wanted)
    assert_close(chunk(model, tokens[:1])[0][0], wanted)


def test_arguments_are_not_changed(model: Rwkv7, name: str) -> None:
    tokens = texts(name, 20)
    _, state = chunk(model, tokens)
    before = copy.deepcopy(state)
    chunk(model, tokens, state=state)
    model.step(tokens[:, 0], state, positions())
    assert_same(state, before, exact=True)


def test_gradients_of_the_forms_agree(model: Rwkv7, name: str) -> None:
    assert_gradients_agree(model, texts(name, 24), 1e-4)


def test_bfloat16_is_near_float32_and_keeps_its_state_wide(model: Rwkv7, name: str) -> None:
    assert_bfloat16_is_near(model, texts(name, 40), BFLOAT16_TOLERANCE)


@pytest.mark.slow
def test_a_long_text_stays_with_the_equations(folder: Path) -> None:
    """Errors of chunks and steps do not add up."""
    model, tokens = load("odd", folder), texts("odd", 1000)[:1]
    wanted, _ = oracle(published(SHAPES["odd"]), tokens[0].tolist())
    assert_close(chunk(model, tokens, [64] * 15 + [40])[0][0, -100:], wanted[-100:])
    assert_close(steps(model, tokens)[0][0, -100:], wanted[-100:])


@pytest.mark.package
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_rwkv_package(folder: Path, name: str) -> None:
    """Logits and state after a prompt, then 300 greedy tokens and the state after them."""
    model, prompt = load(name, folder), texts(name, 50)[0]
    package = run_package(folder / f"{name}.pth", prompt.tolist(), 300)
    logits, state = chunk(model, prompt[None])
    near(logits[0], package["logits"])
    for layer, tensors in enumerate(state):
        near(tensors["S"][0].transpose(-1, -2), package[f"{layer}.S"])
        near(tensors["time_shift"][0], package[f"{layer}.time_shift"])
        near(tensors["channel_shift"][0], package[f"{layer}.channel_shift"])
    last, tokens = logits[:, -1], []
    for _ in range(300):
        tokens.append(int(last.argmax()))
        last, state = model.step(torch.tensor(tokens[-1:]), state, positions(1))
    assert tokens == package["tokens"].tolist()
    assert len(set(tokens)) > 20  # not one token again and again
    near(last[0], package["last"])
    near(state[0]["S"][0].transpose(-1, -2), package["last_S"])


def near(found: Tensor, wanted: np.ndarray) -> None:  # type: ignore[type-arg]
    assert_close(found, torch.from_numpy(wanted).double(), PACKAGE_TOLERANCE)


def model_from(weights: dict[str, Tensor]) -> Rwkv7:
    """A model with these weights by their published names."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_pth(Path(folder) / "model.pth", weights)
        network = model_of(*read_native(TorchFile(file), file.name))
    assert isinstance(network, Rwkv7)
    return network


def texts(name: str, length: int) -> Tensor:
    return random_texts(SHAPES[name].vocab_size, length)


def positions(num: int = 2) -> Tensor:
    return torch.zeros(num, dtype=torch.int64)


def assert_same(found: ModelState, wanted: ModelState, exact: bool = False) -> None:
    for layer, wanted_layer in zip(found, wanted, strict=True):
        assert layer.keys() == wanted_layer.keys()
        for key, tensor in wanted_layer.items():
            if exact:
                assert torch.equal(layer[key], tensor)
            else:
                assert_close(layer[key], tensor.double())
