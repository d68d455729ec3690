"""The mechanism of add-a-mechanism.md keeps the contract and is served, as the page says."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch

from model.attention import MECHANISMS, specs
from model.attention.base import Attention, mechanism
from model.attention.specs import Spec
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.lm import LanguageModel
from model.weights import check_weights
from server.engine.engine import EngineConfig
from server.models.backend import open_backend
from tests.docs.pages import page
from tests.model.attention import test_contract as contract
from tests.model.attention.oracles import ORACLES, Oracle
from tests.model.attention.projections import with_parts
from tests.tiny import request, solo, tiny_tokenizer, tokens_of
from tests.weights import weights_of

TEXT = page("add-a-mechanism.md")
ORACLE_IMPORTS = """
from __future__ import annotations
import torch
from torch import Tensor
from model.attention.base import Attention, State
from tests.model.attention.projections import heads, qkv
"""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Does what the page says, for the length of a test."""
    name, row = registry_line(code_after("In `model/attention/__init__.py`"))
    module = load(tmp_path / "squared_relu.py", code_after("`model/attention/squared_relu.py`:"))
    oracles = load(
        tmp_path / "oracles.py",
        ORACLE_IMPORTS + code_after("`tests/model/attention/oracles.py`:"),
    )
    monkeypatch.setitem(sys.modules, row[1], module)
    monkeypatch.setitem(MECHANISMS, name, row)
    monkeypatch.setitem(ORACLES, name, with_parts(cast(Oracle, vars(oracles)[name])))


@pytest.fixture
def layer() -> Attention:
    config = ModelConfig(
        vocab_size=257, hidden_size=24, num_attention_heads=2, head_dim=8, attention="squared_relu"
    )
    layer = mechanism("squared_relu")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return layer


@pytest.mark.parametrize("length", contract.LENGTHS)
@pytest.mark.parametrize(
    "form",
    [
        contract.test_parallel_equals_definition,
        contract.test_one_chunk_equals_definition,
        contract.test_steps_equal_definition,
    ],
)
def test_three_forms_equal_the_oracle(
    layer: Attention, form: Callable[[Attention, int], None], length: int
) -> None:
    form(layer, length)


@pytest.mark.parametrize("form", ["parallel", "chunks", "steps"])
def test_gradients_equal_the_oracle(layer: Attention, form: str) -> None:
    contract.test_gradients_equal_definition(layer, form)


@pytest.mark.parametrize(
    "check",
    [
        contract.test_chunks_and_steps_mix,
        contract.test_rows_do_not_mix,
        contract.test_future_never_changes_the_past,
        contract.test_arguments_are_not_changed,
        contract.test_state_has_the_promised_shape_and_type,
        contract.test_zeros_are_the_empty_state,
    ],
)
def test_the_rest_of_the_contract_holds(
    layer: Attention, check: Callable[[Attention], None]
) -> None:
    check(layer)


@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_the_oracle(layer: Attention, seed: int) -> None:
    contract.test_any_chunking_equals_definition(layer, seed)


def test_query_without_a_feature_reads_zero(layer: Attention) -> None:
    x = torch.ones(1, 5, 24)
    with torch.no_grad():
        layer.get_parameter("qkv.weight")[:16] = -1.0  # of q
    assert torch.equal(layer.parallel(x), torch.zeros(1, 5, 24))


def test_mechanism_is_served() -> None:
    tokenizer = tiny_tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=48,
        attention="squared_relu",
    )
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    weights = weights_of(model)
    check_weights(config, weights)
    backend = open_backend(Checkpoint(config, weights, tokenizer, digest="squared_relu"))
    assert backend.name == "torch"
    engine = backend.engine(2, EngineConfig(new_id=lambda: "session"))
    assert engine.stats().state_bytes_per_session == 2 * 2 * (16 * 16 + 16) * 8
    assert len(tokens_of(solo(engine, request(max_tokens=5)))) == 5


def registry_line(source: str) -> tuple[str, tuple[Spec, str, str]]:
    """The name and the row of a line of `MECHANISMS`; the spec is named, not written out."""
    table = ast.parse("{" + source + "}", mode="eval").body
    assert isinstance(table, ast.Dict)
    (name,), (row,) = table.keys, table.values
    assert isinstance(row, ast.Tuple)
    spec, *words = row.elts
    assert isinstance(spec, ast.Attribute)
    assert ast.unparse(spec.value) == "specs"
    module, class_name = map(ast.literal_eval, words)
    assert name is not None
    return ast.literal_eval(name), (getattr(specs, spec.attr), module, class_name)


def code_after(words: str) -> str:
    """The first Python block after ``words`` in the page."""
    _, found, rest = TEXT.partition(words)
    assert found, words
    block = re.search(r"^```python\n(.*?)^```", rest, re.MULTILINE | re.DOTALL)
    assert block is not None, words
    return block[1]


def load(path: Path, source: str) -> ModuleType:
    """``source`` as a module, written to ``path``."""
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
