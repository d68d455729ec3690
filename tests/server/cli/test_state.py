"""``everstream state``: a prompt is read once, and a file that fits nothing is one line."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import load_checkpoint, save_checkpoint
from model.state import StateLayout
from server.engine.engine import EngineConfig
from server.models.backend import open_backend
from server.models.build import read_state
from server.models.storage import identity_of
from tests.rwkv7 import write_pth
from tests.server.cli.test_commands import run, the_line
from tests.tiny import request, solo, tiny_checkpoint, tokens_of

TEXT = "Once upon a time there was a little girl who lived in a wood."
TORCH = ("--backend", "torch", "--dtype", "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folders: two models of one shape, and one of another architecture."""
    folder = tmp_path_factory.mktemp("models")
    for name, checkpoint in (
        ("one", tiny_checkpoint()),
        ("two", tiny_checkpoint(seed=1)),
        ("rwkv7", tiny_checkpoint("rwkv7")),
    ):
        save_checkpoint(folder / name, checkpoint.model, checkpoint.tokenizer)
    return folder


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Another test of this process may have set logging up; a process of its own has not."""
    caplog.set_level(logging.WARNING, "everstream")


def make(models: Path, name: str, out: Path, *more: object) -> Path:
    result = run("state", "make", "--model", models / name, "--out", out, *TORCH, *more)
    assert result.exit_code == 0, result.output
    assert str(out) in result.stdout
    return out


def time_states(heads: int = 2, dim: int = 16, layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"blocks.{layer}.att.time_state": torch.randn(heads, dim, dim, generator=generator)
        for layer in range(layers)
    }


@pytest.mark.parametrize("name", ["one", "rwkv7"])
def test_state_of_a_prompt_has_the_bits_of_a_session(
    models: Path, tmp_path: Path, name: str
) -> None:
    file = make(models, name, tmp_path / "state", "--prompt", TEXT)
    checkpoint = load_checkpoint(models / name)
    backend = open_backend(checkpoint, "torch", "float32")
    state = read_state(file, identity_of(checkpoint, backend), checkpoint.config)
    engine = backend.engine(2, EngineConfig(new_id=iter("ab").__next__, max_asleep=2))
    session = engine.kept.create("me", 0.0).session
    tokens = checkpoint.tokenizer.encode(TEXT)
    solo(engine, request("read", tokens, session, generate=False))
    value = engine.kept.value(session, "me")
    assert value.state is not None
    assert state.value.state is not None
    assert bytes(value.state.data) == bytes(state.value.state.data)
    wanted = tokens_of(solo(engine, request("r", (), session)))
    opened = engine.kept.adopt(state.value, "me", 0.0).session
    assert tokens_of(solo(engine, request("r", (), opened))) == wanted


def test_file_mode_follows_the_umask(models: Path, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    file = make(models, "one", tmp_path / "state", "--prompt", TEXT)
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"other", "state"}


def test_missing_folder_is_refused_before_the_prompt_is_read(tmp_path: Path) -> None:
    words = ("--out", tmp_path / "none" / "state", "--prompt-file", tmp_path / "nowhere")
    line = the_line(run("state", "make", *words))
    assert f"{tmp_path / 'none'} is not a folder" in line
    assert not (tmp_path / "none").exists()


def test_prompt_may_come_from_a_file(models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    first = make(models, "one", tmp_path / "first", "--prompt", TEXT)
    second = make(models, "one", tmp_path / "second", "--prompt-file", tmp_path / "prompt.txt")
    assert first.read_bytes() == second.read_bytes()


def test_tuned_state_is_what_a_prompt_comes_after(models: Path, tmp_path: Path) -> None:
    tuned = write_pth(tmp_path / "tuned.pth", time_states())
    alone = make(models, "rwkv7", tmp_path / "alone", "--tuned", tuned)
    other = {key: tensor.transpose(1, 2).contiguous() for key, tensor in time_states().items()}
    turned = f"transposed:{write_pth(tmp_path / 'other.pth', other)}"
    turned_file = make(models, "rwkv7", tmp_path / "turned", "--tuned", turned)
    assert turned_file.read_bytes() == alone.read_bytes()
    words = ("state", "make", "--model", models / "rwkv7", "--out", tmp_path / "no")
    message = "only a tuned one is transposed"
    assert message in the_line(run(*words, "--tuned", f"transposed:{alone}"))
    after = make(models, "rwkv7", tmp_path / "after", "--tuned", tuned, "--prompt", TEXT)
    plain = make(models, "rwkv7", tmp_path / "plain", "--prompt", TEXT)
    checkpoint = load_checkpoint(models / "rwkv7")
    backend = open_backend(checkpoint, "torch", "float32")
    identity = identity_of(checkpoint, backend)
    states = [read_state(f, identity, checkpoint.config) for f in (alone, after, plain, tuned)]
    assert states[0].digest == states[3].digest
    assert [state.num_tokens for state in states] == [
        0,
        states[2].num_tokens - 1,  # no start token
        1 + len(checkpoint.tokenizer.encode(TEXT)),
        0,
    ]
    blocks = [state.value.state for state in states]
    assert blocks[1] is not None
    assert blocks[2] is not None
    assert bytes(blocks[1].data) != bytes(blocks[2].data)
    wanted = time_states()["blocks.1.att.time_state"].numpy().transpose(0, 2, 1)
    assert blocks[0] is not None
    layers = StateLayout.of(checkpoint.config).views(np.frombuffer(blocks[0].data, np.uint8)[None])
    assert np.array_equal(layers[1]["S"][0], wanted)


def test_inspect_describes_a_state(models: Path, tmp_path: Path) -> None:
    file = make(models, "one", tmp_path / "state", "--prompt", TEXT)
    lines = run("state", "inspect", file).stdout
    checkpoint = load_checkpoint(models / "one")
    for words in (checkpoint.digest, checkpoint.tokenizer.digest, "float32", repr(TEXT)):
        assert words in lines
    tuned = write_pth(tmp_path / "tuned.pth", time_states())
    lines = run("state", "inspect", tuned).stdout
    assert "2, float32" in lines
    assert "blocks.0.att.time_state" in lines


def test_damaged_file_is_one_line(models: Path, tmp_path: Path) -> None:
    file = make(models, "one", tmp_path / "state", "--prompt", TEXT)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert "checksum is wrong" in the_line(run("state", "inspect", file))


def test_wrong_shape_is_one_line(models: Path, tmp_path: Path) -> None:
    tuned = write_pth(tmp_path / "tuned.pth", time_states(layers=3))
    words = ("state", "make", "--model", models / "rwkv7", "--out", tmp_path / "s", *TORCH)
    assert "3 layers, and the model has 2" in the_line(run(*words, "--tuned", tuned))
    words = ("state", "make", "--model", models / "one", "--out", tmp_path / "s", *TORCH)
    assert "gated models are not known" in the_line(run(*words, "--tuned", tuned))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "--prompt, --prompt-file or --tuned"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a", "--prompt-file", "b"), "not both"),
        (("--prompt-file", "NOWHERE"), "No such file"),
    ],
)
def test_mistake_is_one_line(
    models: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    words = ("state", "make", "--model", models / "one", "--out", tmp_path / "s", *TORCH)
    assert message in the_line(run(*words, *more))
