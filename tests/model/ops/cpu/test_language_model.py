"""Whole models: logits and states equal their definition in float64, and torch's."""

from __future__ import annotations

import pytest
import torch

from model.architectures.network import model_of
from model.native.runtime import Runtime
from model.state import StateLayout
from tests.model.ops.cpu.models import (
    NAMES,
    Shape,
    defined,
    feed,
    make_model,
    random_tokens,
    relative_error,
    small_runtime,
    small_weights,
    state_error,
    states,
)
from tests.weights import pack_state, weights_of

LENGTHS = [1, 63, 64, 65, 200]
#: Of logits and states in float32; torch itself is as far from the definition.
TOLERANCE = dict.fromkeys(NAMES, 2e-6) | dict.fromkeys(
    ["delta", "normed", "performer", "rbf", "window_linear"], 5e-6
)

SHAPES = {
    "plain": Shape(),
    "odd": Shape(
        {
            "vocab_size": 300,
            "hidden_size": 45,
            "num_attention_heads": 3,
            "head_dim": 20,
            "intermediate_size": 73,
            "tie_word_embeddings": False,
        }
    ),
    "gpt2": Shape(
        {
            "hidden_size": 72,
            "num_attention_heads": 1,
            "head_dim": 16,
            "intermediate_size": 100,
            "norm": "layer",
            "mlp": "gelu",
            "attention_bias": True,
            "max_position_embeddings": 64,
        }
    ),
    "wide": Shape(
        {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 64,
            "intermediate_size": 72,
            "tie_word_embeddings": False,
            "norm": "layer",
        }
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_prompt_equals_definition_and_torch(name: str, shape: str) -> None:
    model = make_model(SHAPES[shape].config(name))
    runtime = Runtime(model.config, weights_of(model), "float32")
    tokens = random_tokens(model.config, max(LENGTHS))
    wanted, _ = defined(model, tokens)
    by_torch = model.parallel(torch.tensor([tokens]))[0]
    for length in LENGTHS:
        pool, draw = runtime.empty_pool(1), runtime.draw(temperature=0.0)
        ((drawn,),) = runtime.run(pool, [0], [0], [tokens[:length]], [draw])
        logits = torch.from_numpy(runtime.logits()[0])
        assert drawn == int(logits.argmax())
        assert relative_error(logits, wanted[length - 1]) <= TOLERANCE[name], length
        assert relative_error(logits, by_torch[length - 1]) <= 2 * TOLERANCE[name], length
        after = states(model.config, pool[0])
        assert state_error(after, defined(model, tokens[:length])[1]) <= TOLERANCE[name], length


@pytest.mark.parametrize("name", NAMES)
def test_state_continues_on_torch_and_back(name: str) -> None:
    config, weights = small_weights(name)
    model, runtime, layout = model_of(config, weights), small_runtime(name), StateLayout.of(config)
    tokens = random_tokens(config, 120)
    wanted, wanted_state = defined(model, tokens)
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens[:40]], [None])
    part, position = torch.tensor([tokens[40:80]]), torch.tensor([40])
    logits, state = model.chunk(part, states(config, pool[0]), position)
    assert relative_error(logits[0], wanted[40:80]) <= TOLERANCE[name]
    pack_state(layout, state, torch.from_numpy(pool))
    rest = torch.from_numpy(feed(runtime, pool, 0, tokens[80:], 80))
    assert relative_error(rest, wanted[80:]) <= TOLERANCE[name]
    assert state_error(states(config, pool[0]), wanted_state) <= TOLERANCE[name]


@pytest.mark.parametrize("position", [1_000_000, 2**31 + 5])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosformer", {}),
        ("cosine", {"rotary": "before"}),
        ("elu", {"rotary": "after"}),
        ("performer", {"rotary": "before", "rope_theta": 500.0}),
        ("retnet", {}),
        ("window_linear", {}),
    ],
)
def test_late_positions_equal_torch(name: str, options: dict[str, object], position: int) -> None:
    config = Shape({"max_position_embeddings": 30}, options).config(name)
    model = make_model(config)
    runtime, tokens = Runtime(config, weights_of(model), "float32"), random_tokens(config, 20)
    found = torch.from_numpy(feed(runtime, runtime.empty_pool(1), 0, tokens, position))
    wanted, _ = model.chunk(torch.tensor([tokens]), model.empty_state(1), torch.tensor([position]))
    assert relative_error(found, wanted[0]) <= TOLERANCE[name]


@pytest.mark.parametrize("name", ["elu", "gated"])
def test_long_stream_equals_torch(name: str) -> None:
    config, weights = small_weights(name)
    model, runtime = model_of(config, weights), small_runtime(name)
    tokens, pool = random_tokens(config, 10_000), small_runtime(name).empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    logits, state = model.chunk(
        torch.tensor([tokens]), model.empty_state(1), torch.zeros(1, dtype=torch.int64)
    )
    assert relative_error(torch.from_numpy(runtime.logits()[0]), logits[0, -1]) <= 4e-6
    assert state_error(states(config, pool[0]), state) <= 4e-6


def test_only_rows_with_a_draw_have_logits() -> None:
    runtime = small_runtime("elu")
    pool, draw = runtime.empty_pool(3), runtime.draw(temperature=0.0)
    drawn = runtime.run(pool, [0, 1, 2], [0, 0, 0], [[1, 2], [3], [4]], [None, draw, None])
    assert runtime.logits().shape == (1, 257)
    assert drawn == [[], [runtime.logits()[0].argmax()], []]
    assert runtime.run(pool, [], [], [], []) == []
    assert runtime.logits().shape == (0, 257)


def test_padded_ids_are_never_drawn() -> None:
    """A vocabulary may be padded beyond the tokenizer's."""
    config, weights = small_weights("elu")
    runtime = Runtime(config, weights, "float32", num_ids=17)
    pool = runtime.empty_pool(1)
    drawn = []
    for i in range(200):
        draw = runtime.draw(temperature=100.0, seed=i, presence_penalty=1.0)
        drawn += runtime.run(pool, [0], [i], [[(7 * i) % 257]], [draw], [[256, 17, 3]])[0]
    assert set(drawn) == set(range(17))
