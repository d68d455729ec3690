"""Loading says how far it is with a large model, and warns of broken weights; else nothing."""

from __future__ import annotations

import dataclasses
import io
import logging
from typing import Any, Literal

import numpy as np
import pytest

from model.checkpoint import Checkpoint
from server.models.backend import FEW, NOT_FINITE, ZEROS, loading, open_backend
from tests.tiny import tiny_checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_at_each_quarter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everstream.loading")
    num, stream = 4 * FEW, io.StringIO()
    with loading(num, stream) as progress:
        for num_read in range(0, num + 1, num // 50):
            progress(num_read)
        progress(num + 1000)  # a tied embedding is read twice
    assert caplog.messages == [f"loading the weights: {n}%" for n in (25, 50, 75, 100)]
    assert stream.getvalue() == ""


def test_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with loading(2 * FEW, stream) as progress:
        progress(2 * FEW)
    assert "loading the weights" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert caplog.messages == []


def test_small_model_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "everstream.loading")
    stream = Terminal()
    with loading(FEW, stream) as progress:
        progress(FEW)
    assert stream.getvalue() == ""
    assert caplog.messages == []


BACKENDS = ("native", "torch")
Backend = Literal["native", "torch"]
NORM, UP = "blocks.1.mlp_norm.weight", "blocks.0.mlp.up.weight"


def with_weights(changed: dict[str, Any]) -> Checkpoint:
    checkpoint = tiny_checkpoint()
    weights = {name: np.array(checkpoint.weights[name]) for name in checkpoint.weights}
    for name, (place, value) in changed.items():
        weights[name][place] = value
    return dataclasses.replace(checkpoint, weights=weights)


def warnings(
    checkpoint: Checkpoint, backend: Backend, caplog: pytest.LogCaptureFixture
) -> list[str]:
    with caplog.at_level(logging.WARNING, "everstream"):
        open_backend(checkpoint, backend, "float32", 1)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({UP: ((3, 5), np.nan)}, f"{UP} {NOT_FINITE}: the model's file may be damaged"),
        ({UP: ((0, 0), np.inf)}, f"{UP} {NOT_FINITE}:"),
        ({UP: ((-1, -1), -np.inf)}, f"{UP} {NOT_FINITE}:"),
        ({NORM: (slice(None), 0.0)}, f"{NORM} {ZEROS}:"),
        ({UP: ((0, 0), np.nan), NORM: (slice(None), 0.0)}, "(2 such tensors)"),
    ],
    ids=["NaN", "infinity", "minus infinity", "zero norm", "two"],
)
def test_suspicious_tensor_is_named_once(
    backend: Backend, changed: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = warnings(with_weights(changed), backend, caplog)
    assert words in warning


@pytest.mark.parametrize("backend", BACKENDS)
def test_good_weights_are_not_warned_of(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """Nor are large ones, zeros elsewhere, and a norm that is zero in a part."""
    changed = {UP: ((0, 0), 1e30), NORM: (slice(4), 0.0), "blocks.0.mlp.down.weight": (..., 0.0)}
    assert warnings(with_weights(changed), backend, caplog) == []
