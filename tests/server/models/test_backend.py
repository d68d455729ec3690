from __future__ import annotations

import dataclasses
import itertools
import logging
from pathlib import Path

import pytest
import torch

from model.attention import MECHANISMS, spec_of
from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ModelConfig
from model.lm import LanguageModel
from model.native.options import WITHOUT_KERNELS
from model.quantization.quantize import save_int4
from server.engine.engine import Engine, EngineConfig
from server.models.backend import BackendError, Name, open_backend
from tests.requirements import needs_native
from tests.tiny import request, solo, tiny_checkpoint, tokens_of
from tests.weights import weights_of

SERVED = [name for name in MECHANISMS if spec_of(name).constant_state]
NUMBERS = itertools.count()
CONFIG = EngineConfig(new_id=lambda: f"session-{next(NUMBERS)}")


def native_engine(attention: str, dtype: str, threads: int) -> Engine:
    return open_backend(tiny_checkpoint(attention), "native", dtype, threads).engine(8, CONFIG)


def uncovered() -> Checkpoint:
    """A model that only torch runs: its state grows."""
    return tiny_checkpoint("softmax")


@needs_native
def test_auto_selects_the_native_runtime_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "everstream"):
        backend = open_backend(tiny_checkpoint(), threads=2)
    assert (backend.name, backend.dtype) == ("native", "bfloat16")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the native runtime runs the model: ")
    assert line.endswith("bfloat16 weights, 2 threads")


@needs_native
def test_auto_serves_an_int4_folder_as_it_is(tmp_path: Path) -> None:
    save_int4(tmp_path, tiny_checkpoint())
    backend = open_backend(load_checkpoint(tmp_path))
    assert (backend.name, backend.dtype, backend.held) == ("native", "int4", "int4")


def test_auto_selects_torch_for_unsupported_models_and_logs_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert open_backend(uncovered()).name == "torch"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("torch runs the model, many times slower than the native runtime: ")


@pytest.mark.parametrize(("place", "values"), WITHOUT_KERNELS.items())
def test_options_without_kernels_are_served_by_torch(
    place: tuple[str, str], values: tuple[str | int, ...]
) -> None:
    (attention, option), value = place, values[0]
    tiny = tiny_checkpoint(attention)
    assert isinstance(tiny.config, ModelConfig)
    config = dataclasses.replace(tiny.config, attention_options={option: value})
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    backend = open_backend(Checkpoint(config, weights_of(model), tiny.tokenizer, digest="tiny"))
    assert backend.name == "torch"
    engine = backend.engine(1, CONFIG)
    assert len(tokens_of(solo(engine, request(tokens=range(1, 100), max_tokens=5)))) == 5


def test_native_asked_for_and_missing_is_an_error() -> None:
    with pytest.raises(BackendError, match="--backend native: "):
        open_backend(uncovered(), "native")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["auto", "torch"])
def test_integers_without_the_native_runtime_are_an_error(name: Name, dtype: str) -> None:
    with pytest.raises(BackendError, match=f"--dtype {dtype} needs the native runtime: "):
        open_backend(uncovered(), name, dtype)


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_native)])
def test_ids_beyond_the_tokenizer_are_never_sampled(name: Name) -> None:
    """A vocabulary that is padded in the model, most of it with ids that stand for nothing."""
    known = tiny_checkpoint().tokenizer
    config = dataclasses.replace(tiny_checkpoint().config, vocab_size=known.vocab_size + 2000)
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    checkpoint = Checkpoint(config, weights_of(model), known, digest="padded")
    engine = open_backend(checkpoint, name, "float32").engine(1, CONFIG)
    tokens = tokens_of(solo(engine, request(max_tokens=50, temperature=2.0)))
    assert len(tokens) == 50
    assert max(tokens) < known.vocab_size


@needs_native
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        *((name, "bfloat16") for name in SERVED),
        ("gated", "float32"),
        ("gated", "int8"),
        ("gated", "int4"),
    ],
)
def test_native_tokens_do_not_depend_on_threads_or_company(attention: str, dtype: str) -> None:
    mine = request("me", range(1, 150), max_tokens=30, seed=7)
    alone = tokens_of(solo(native_engine(attention, dtype, threads=1), mine))
    among = native_engine(attention, dtype, threads=2)
    for i in range(5):
        among.submit(request(f"other-{i}", range(i, 120), max_tokens=40, seed=i), 0.0)
        among.step(0.0)
    assert tokens_of(solo(among, mine)) == alone


@needs_native
@pytest.mark.parametrize("attention", SERVED)
def test_native_state_does_not_depend_on_how_a_text_is_cut(attention: str) -> None:
    engine = native_engine(attention, "bfloat16", threads=1)
    text, blocks = range(1, 250), []
    for cuts in ((249,), (64, 65, 200, 249), (100, 101, 102, 249)):
        session = engine.kept.create("me", 0.0).session
        for start, end in itertools.pairwise((0, *cuts)):
            solo(engine, request(tokens=text[start:end], session=session, generate=False))
        blocks.append(engine._pool.blocks[engine._sessions.find(session, "me").slot].tobytes())
    assert len(set(blocks)) == 1


@needs_native
def test_native_and_torch_agree_greedily() -> None:
    found = [
        tokens_of(solo(engine, request(tokens=range(1, 100), max_tokens=20, temperature=0.0)))
        for name in ("torch", "native")
        for engine in [open_backend(tiny_checkpoint(), name, "float32").engine(1, CONFIG)]
    ]
    assert found[0] == found[1]
