"""docs/mechanisms.md has every mechanism, option and refusal, and its bytes of state are right."""

from __future__ import annotations

import json

import pytest

from model.attention import MECHANISMS, REFUSED, mechanism
from model.config import ModelConfig
from model.state import ALIGNMENT, StateLayout
from tests.docs.pages import names, page, rows, section

TEXT = page("mechanisms.md")
FORMULAS = {name: row[2] for row in rows(section(TEXT, "Bytes of state")) for name in names(row[0])}
CONSTANT = [name for name in MECHANISMS if mechanism(name).constant_state]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_and_option_is_described(name: str) -> None:
    _, found, rest = section(TEXT, "Definitions").partition(f"**`{name}`**")
    assert found
    text = rest.partition("**`")[0]
    for option, default in mechanism(name).options.items():
        shown = f"`{json.dumps(default)}`" if isinstance(default, str) else json.dumps(default)
        assert f"`{option}` (default {shown})" in text


def test_every_refusal_is_described() -> None:
    assert REFUSED.keys() <= set(names(section(TEXT, "What cannot be served")))


def test_every_mechanism_has_its_bytes() -> None:
    assert FORMULAS.keys() == MECHANISMS.keys()


@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (4, 64), (3, 10)])
def test_bytes_of_state_follow_the_formulas(name: str, heads: int, dim: int) -> None:
    options = {
        key: mechanism(name).options.get(key) for key in ("codewords", "window", "conv_size")
    }
    features = options["codewords"] if name == "soft_vq" else dim
    symbols = {
        "H": heads,
        "K": dim,
        "F": features,
        "W": options["window"],
        "C": options["codewords"] or options["conv_size"],
    }
    expression = FORMULAS[name].replace(" (", " * (")
    for left in "HKFWC0123456789)":  # "8 H K" is a product
        for right in "HKFWC":
            expression = expression.replace(f"{left} {right}", f"{left} * {right}")
    wanted = eval(expression, {"__builtins__": {}}, symbols)  # our own page
    config = ModelConfig(
        vocab_size=10,
        num_attention_heads=heads,
        head_dim=dim,
        num_hidden_layers=1,
        attention=name,
    )
    layout = StateLayout.of(config)
    assert sum(field.spec.num_bytes for field in layout.fields) == wanted
    assert 0 <= layout.num_bytes - wanted < ALIGNMENT * len(layout.fields)
