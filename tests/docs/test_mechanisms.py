"""mechanisms.md has every mechanism, option and refusal, and its bytes of state are right."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable

import pytest

from model.attention import MECHANISMS, NOT_BUILT, REFUSED, spec_of
from model.config import ModelConfig
from model.state import ALIGNMENT, StateLayout
from model.weights import num_parameters
from tests.docs.pages import flowed, names, page, rows, section

TEXT = page("mechanisms.md")
FORMULAS = {name: row[2] for row in rows(section(TEXT, "Bytes of state")) for name in names(row[0])}
#: Each formula of the table as a function of H, K, `codewords` and `window`; features are K.
BYTES: dict[str, Callable[..., int]] = {
    "8 H K (K + 1)": lambda h, k, c, w: 8 * h * k * (k + 1),
    "8 H (K + 1) (K + 1)": lambda h, k, c, w: 8 * h * (k + 1) * (k + 1),
    "16 H K (K + 1)": lambda h, k, c, w: 16 * h * k * (k + 1),
    "8 H F (K + 1) + 4 H F": lambda h, k, c, w: (8 * (k + 1) + 4) * h * (c or k),
    "8 H F (K + 1) + 4 H F + 8 W H K": lambda h, k, c, w: (8 * (k + 1) + 4 + 8 * w) * h * k,
    "8 H C (K + 1) + 4 W H (K + 2)": lambda h, k, c, w: 8 * h * c * (k + 1) + 4 * w * h * (k + 2),
    "8 H K K": lambda h, k, c, w: 8 * h * k * k,
    "4 H K K": lambda h, k, c, w: 4 * h * k * k,
    "4 H K (K + 3 (C - 1))": lambda h, k, c, w: 4 * h * k * (k + 3 * 3),
}
CONSTANT = [name for name in MECHANISMS if spec_of(name).constant_state]


#: An option in a list: its name and default, mechanisms with another default, and all that have it.
SHARED = re.compile(r"- `(\w+)` \(default (\S+?)(?:; (.+?): (\S+))?\)(?:, of ([^:]+))?: ")


def shared_defaults() -> dict[tuple[str, str], str]:
    """The options that the page describes for several mechanisms: the default by both names."""
    defaults: dict[tuple[str, str], str] = {}
    having: set[str] = set()
    for heading in ("Shared options", "Convolution, norm and gate"):
        for item in re.split(r"\n(?=- )", section(TEXT, heading)):
            if found := SHARED.match(flowed(item)):
                option, default, others, other, of = found.groups()
                exceptions = set(names(others or ""))
                if of != "the same":
                    having = set(names(of or "")) & MECHANISMS.keys() | exceptions
                if not of or of.startswith("all but "):
                    having = MECHANISMS.keys() - set(names(of or ""))
                for name in having:
                    defaults[name, option] = other if name in exceptions else default
    return defaults


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_and_option_is_described_once(name: str) -> None:
    _, found, rest = section(TEXT, "Definitions").partition(f"**`{name}`**")
    assert found
    text = flowed(rest.partition("**`")[0])
    shared = {option: shown for (of, option), shown in shared_defaults().items() if of == name}
    options = spec_of(name).options
    assert shared.keys() <= options.keys()
    for option, known in options.items():
        shown = json.dumps(known.default)
        shown = f"`{shown}`" if isinstance(known.default, str) else shown
        assert (f"`{option}` (default {shown})" in text) != (shared.get(option) == shown), option


def test_every_refusal_is_described() -> None:
    assert REFUSED.keys() | NOT_BUILT.keys() <= set(names(section(TEXT, "What cannot be served")))


def test_every_mechanism_has_its_bytes() -> None:
    assert FORMULAS.keys() == MECHANISMS.keys()


@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (4, 64), (3, 10)])
def test_bytes_of_state_follow_the_formulas(name: str, heads: int, dim: int) -> None:
    options = {option: known.default for option, known in spec_of(name).options.items()}
    wanted = BYTES[FORMULAS[name]](heads, dim, options.get("codewords"), options.get("window"))
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


@pytest.mark.parametrize("name", ["elu", "vq"])
def test_examples_to_train_have_the_size_that_the_page_says(name: str) -> None:
    """Of their own options; `test_models` runs the commands."""
    text = section(TEXT, "Train a small model").replace("\\\n", " ")
    tokenizer, *commands = re.findall(r"^everstream (?:tokenizer|train) .*", text, re.MULTILINE)
    (words,) = (shlex.split(line) for line in commands if f" --attention {name} " in line)
    given = {word: words[at + 1] for at, word in enumerate(words) if word.startswith("--")}
    config = ModelConfig(
        vocab_size=int(tokenizer.rpartition(" ")[2]),
        hidden_size=int(given["--hidden-size"]),
        num_hidden_layers=int(given["--layers"]),
        num_attention_heads=int(given["--heads"]),
        intermediate_size=int(given["--intermediate-size"]),
        attention=name,
        attention_options=json.loads(given["--attention-options"]),
    )
    sizes = f"of {num_parameters(config):,} parameters, and {StateLayout.of(config).num_bytes:,} "
    assert f"{sizes}bytes of state" in flowed(text)
