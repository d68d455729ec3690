"""A third family takes nothing but its own files: config, torch, native runtime, engine, export.

`toy` has those files. Its two lines in the tables of families are added here, for a test at a time.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from model.architectures import ARCHITECTURES, Architecture, config_from_dict
from model.architectures.network import model_of
from model.checkpoint import Checkpoint
from model.export import WRITERS, writer_of
from model.native import runtime as native
from model.native.runtime import NativeError, Runtime
from model.state import StateLayout
from model.weights import check_weights
from model.weights.gguf_file import GgufFile
from server.engine.engine import Engine, EngineConfig
from server.engine.runner import CpuStatePool, NativeRunner, Runner
from server.engine.session import Saved
from server.engine.torch_runner import TorchRunner
from tests.exclusive import exclusive, folder_of_run
from tests.model.ops.cpu.models import (
    feed,
    random_tokens,
    relative_error,
    small_model,
    state_error,
    states,
)
from tests.model.ops.cpu.toy.build import LEVEL, build_module
from tests.model.ops.cpu.toy.toy import Toy, ToyConfig
from tests.server.engine.ledger import Ledger
from tests.tiny import finished, request, solo, state_of, tiny_tokenizer, tokens_of
from tests.weights import weights_of

#: A compilation takes minutes where others want the cores.
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(1200)]

HERE = "tests.model.ops.cpu.toy.toy"
#: Of logits and states in float32, as for the other families.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension module with this family in it; workers of one run share the build."""
    folder = folder_of_run("toy", tmp_path_factory)
    with exclusive(folder):
        return build_module(folder)


@pytest.fixture
def family(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's lines in the tables."""
    row = Architecture("toy", (HERE, "ToyConfig"), (HERE, "Toy"), native=(HERE, "native_options"))
    monkeypatch.setitem(ARCHITECTURES, "toy", row)
    monkeypatch.setitem(WRITERS, "toy", {"gguf": (HERE, "write_gguf")})
    monkeypatch.setattr(native, "_module", module)


@pytest.fixture
def checkpoint(family: None) -> Checkpoint:
    tokenizer = tiny_tokenizer()
    model = Toy(ToyConfig(tokenizer.vocab_size))
    model.init_weights(torch.Generator().manual_seed(1))
    return Checkpoint(model.config, weights_of(model), tokenizer, "toy")


def runtime_of(checkpoint: Checkpoint, dtype: str = "float32", threads: int = 1) -> Runtime:
    return Runtime(checkpoint.config, checkpoint.weights, dtype, threads)


def test_config_has_a_json_form_and_lists_the_weights(checkpoint: Checkpoint) -> None:
    assert config_from_dict(checkpoint.config.to_dict()) == checkpoint.config
    check_weights(checkpoint.config, checkpoint.weights)
    assert StateLayout.of(checkpoint.config).num_bytes >= 2 * 4 * 37 * 3


def test_native_equals_torch(checkpoint: Checkpoint) -> None:
    runtime, model = runtime_of(checkpoint), model_of(checkpoint.config, checkpoint.weights)
    tokens, pool = random_tokens(checkpoint.config, 60), runtime.empty_pool(1)
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    empty, start = model.empty_state(1), torch.zeros(1, dtype=torch.int64)
    logits, state = model.chunk(torch.tensor([tokens]), empty, start)
    assert relative_error(found, logits[0]) <= TOLERANCE
    assert state_error(states(checkpoint.config, pool[0]), state) <= TOLERANCE


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_batch_cut_and_threads_do_not_change_bits(
    checkpoint: Checkpoint, dtype: str, threads: int
) -> None:
    runtime, alone = runtime_of(checkpoint, dtype, threads), runtime_of(checkpoint, dtype)
    texts = [random_tokens(checkpoint.config, length, length) for length in (1, 7, 30, 31, 64)]
    pool, draw = runtime.empty_pool(5), runtime.draw(temperature=0.0)
    heads, tails = [text[: len(text) // 3] for text in texts], [t[len(t) // 3 :] for t in texts]
    some = [slot for slot, head in enumerate(heads) if head]
    runtime.run(pool, some, [0] * len(some), [heads[slot] for slot in some], [None] * len(some))
    runtime.run(pool, list(range(5)), list(map(len, heads)), tails, [draw] * 5)
    for slot, text in enumerate(texts):
        one = alone.empty_pool(1)
        alone.run(one, [0], [0], [text], [draw])
        assert pool[slot].tobytes() == one.tobytes()
        assert runtime.logits()[slot].tobytes() == alone.logits()[0].tobytes()


def test_dtype_that_its_table_lacks_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(NativeError, match="no kernels for 'toy' models of this dtype"):
        runtime_of(checkpoint, "bfloat16")


def test_missing_or_misshapen_weight_is_named(checkpoint: Checkpoint) -> None:
    config, weights = checkpoint.config, dict(checkpoint.weights)
    for key, weight in weights.items():
        with pytest.raises(NativeError, match=f"weight '{key}' is missing"):
            Runtime(config, {k: v for k, v in weights.items() if k != key}, "float32")
        with pytest.raises(NativeError, match=f"weight '{key}' has another shape"):
            Runtime(config, {**weights, key: weight[:-1]}, "float32")


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_restored_session_continues_as_if_never_interrupted(
    checkpoint: Checkpoint, backend: str
) -> None:
    options = {"max_tokens": 12, "seed": 4, "repetition_penalty": 1.2}
    first, second = engine_of(checkpoint, backend), engine_of(checkpoint, backend)
    session = finished(solo(first, request(keep=True, **options))).session  # type: ignore[arg-type]
    ledger = Ledger()
    ledger.take(first.take_records())
    assert any(isinstance(entry, Saved) for entry in ledger.entries[session])
    second.kept.restore(ledger.past(session), 0.0)
    more = request("more", (5, 6), session, **options)  # type: ignore[arg-type]
    assert tokens_of(solo(second, more)) == tokens_of(solo(first, more))
    assert state_of(first, session) == state_of(second, session)


def engine_of(checkpoint: Checkpoint, backend: str) -> Engine:
    pool = CpuStatePool(StateLayout.of(checkpoint.config), 4)
    runner: Runner = NativeRunner(runtime_of(checkpoint), pool)
    if backend == "torch":
        runner = TorchRunner(checkpoint.model, pool, checkpoint.config.vocab_size, (16,))
    config = EngineConfig(
        new_id=lambda: "session", max_waiting=4, session_ttl_s=60.0, save_interval=5
    )
    return Engine(checkpoint.config, checkpoint.tokenizer, pool, runner, config)


def test_exported_file_has_the_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    writer_of(checkpoint, "gguf")(path, checkpoint, "float32")
    file = GgufFile(path)
    assert file.metadata["general.architecture"] == "toy"
    assert set(file) == set(checkpoint.config.weight_shapes())
    for name in file:
        assert np.array_equal(file[name], checkpoint.weights[name]), name


@pytest.mark.parametrize("name", ["delta", "elu", "rwkv7"])
def test_other_families_keep_their_bits(
    name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = small_model(name)
    tokens, found = random_tokens(config, 40), []
    for built in (native._module, module):
        monkeypatch.setattr(native, "_module", built)
        runtime = Runtime(config, weights, "float32", level=LEVEL)
        pool = runtime.empty_pool(1)
        runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
        found.append(runtime.logits().tobytes() + pool.tobytes())
    assert found[0] == found[1]
