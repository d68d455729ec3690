"""38: no code comes out of data: not from a checkpoint, and not from a client.

Ruff reads the source for what could run it (`banned-api`). Here a file that
would run code stands where a model is loaded, and leaves a mark if it does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model.checkpoint import CheckpointError, load_checkpoint
from model.config import ConfigError
from model.tokenizer import TokenizerError
from server.cli.main import app
from tests.fakes import FakeEngine
from tests.reliability.servers import ServerProcess
from tests.server.harness import receive_until, running, send
from tests.tiny import write_model

REFUSED = (CheckpointError, ConfigError, TokenizerError)


class Trap:
    """Python and pickles that write ``mark`` when they are run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    @property
    def python(self) -> str:
        return f"open({str(self.mark)!r}, 'w').close()\n"

    @property
    def pickle(self) -> bytes:
        """Protocol 0: calls ``builtins.exec`` on the source when it is loaded."""
        return f"cbuiltins\nexec\n(V{self.python.strip()}\ntR.".encode()

    def sprung(self) -> bool:
        return self.mark.exists()


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path / "mark")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    return write_model(folder)


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}), encoding="utf-8")


def put_code_into(folder: Path, trap: Trap) -> None:
    """All the files that another loader might run, apart from those of the checkpoint."""
    for name in ("modeling_tiny", "configuration_tiny", "__init__", "setup", "conftest"):
        (folder / f"{name}.py").write_text(trap.python, encoding="utf-8")
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "model.pkl",
        "training_args.bin",
        "scaler.joblib",
    ):
        (folder / name).write_bytes(trap.pickle)
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(trap.mark) + "') }}"
    settings = {"chat_template": template, "auto_map": {"AutoTokenizer": "setup.Tokenizer"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def test_trap_detects_execution(trap: Trap, tmp_path: Path) -> None:
    """Else the others would show nothing. In a process of its own, by Python's own loader."""
    path = tmp_path / "weights"
    path.write_bytes(trap.pickle)
    subprocess.run([sys.executable, "-m", "pickle", path], check=True, capture_output=True)
    assert trap.sprung()


def only_a_pickle(folder: Path, trap: Trap) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(trap.pickle)


def pickle_as_safetensors(folder: Path, trap: Trap) -> None:
    (folder / "model.safetensors").write_bytes(trap.pickle)


def pickle_as_tokenizer(folder: Path, trap: Trap) -> None:
    (folder / "tokenizer.json").write_bytes(trap.pickle)


def pickle_as_config(folder: Path, trap: Trap) -> None:
    (folder / "config.json").write_bytes(trap.pickle)


def index_of_pickles(folder: Path, trap: Trap) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(trap.pickle)
    index = {"weight_map": {"norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def index_to_elsewhere(folder: Path, trap: Trap) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def code_for_the_config(folder: Path, trap: Trap) -> None:
    put_code_into(folder, trap)
    edit(folder / "config.json", auto_map={"AutoModel": "modeling_tiny.Tiny"})


def code_for_a_foreign_model(folder: Path, trap: Trap) -> None:
    put_code_into(folder, trap)
    values = {"model_type": "tiny", "auto_map": {"AutoModel": "modeling_tiny.Tiny"}}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


def code_as_attention(folder: Path, trap: Trap) -> None:
    put_code_into(folder, trap)
    edit(folder / "config.json", attention="modeling_tiny")


Spoil = Callable[[Path, Trap], None]
SPOILED: tuple[Spoil, ...] = (
    only_a_pickle,
    pickle_as_safetensors,
    pickle_as_tokenizer,
    pickle_as_config,
    index_of_pickles,
    index_to_elsewhere,
    code_for_the_config,
    code_for_a_foreign_model,
    code_as_attention,
)


@pytest.mark.parametrize("spoil", SPOILED)
def test_checkpoint_that_needs_code_is_refused_and_none_runs(
    folder: Path, trap: Trap, spoil: Spoil
) -> None:
    spoil(folder, trap)
    with pytest.raises(REFUSED):
        load_checkpoint(folder)
    assert not trap.sprung()


@pytest.mark.parametrize("spoil", [only_a_pickle, code_for_the_config])
@pytest.mark.parametrize(
    "command", [("serve", "--port", "0", "--store", "memory", "--model"), ("inspect",)]
)
def test_command_refuses_such_a_checkpoint_with_a_reason(
    folder: Path, trap: Trap, spoil: Spoil, command: tuple[str, ...]
) -> None:
    spoil(folder, trap)
    result = CliRunner().invoke(app, [*command, str(folder)])
    assert result.exit_code == 2
    assert "model.safetensors" in result.stderr or "auto_map" in result.stderr
    assert not trap.sprung()


def test_code_next_to_a_complete_checkpoint_does_not_run(
    folder: Path, trap: Trap, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    put_code_into(folder, trap)
    with ServerProcess("--store", "memory", "--model", folder) as server:
        assert server.get("/v1/models")[0] == 200
    assert load_checkpoint(folder).digest == load_checkpoint(plain).digest
    assert not trap.sprung()


# A client's data

TEXTS = (
    "{{ 7 * 7 }}",
    "{% for x in [1] %}{{ x }}{% endfor %}",
    "{0.__class__}",
    "{prompt}",
    "%s %(prompt)s %n",
    "${7*7}",
    "$(touch /tmp/x)",
    "__import__('os').system('true')",
    "!!python/object/apply:os.system ['true']",
    "<|endoftext|>",
    "\\u0041\\n",
    "cbuiltins\nexec\n(V1\ntR.",
)


class Listener(FakeEngine):
    """Remembers what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[tuple[int, ...]] = []

    def submit(self, request, now, start=None):  # type: ignore[no-untyped-def]
        self.fed.append(request.tokens)
        super().submit(request, now, start)


@pytest.mark.parametrize("text", TEXTS)
async def test_prompt_reaches_the_model_as_it_is(text: str) -> None:
    engine = Listener()
    async with running(engine) as server:
        body = {"prompt": text, "max_tokens": 1}
        assert (await server.generate(**body)).status_code == 200
        name = "".join(char if char.isprintable() else "?" for char in text[:64])
        async with server.socket() as socket:
            await send(socket, type="generate", request_id=name, **body)
            await receive_until(socket, "finished")
    assert [bytes(tokens) for tokens in engine.fed] == [text.encode()] * 2


async def test_model_s_name_of_a_client_loads_nothing(trap: Trap) -> None:
    trap.mark.with_name("code.py").write_text(trap.python, encoding="utf-8")
    names = (str(trap.mark.parent), "../code", "code", "https://evil.example/model", "a/b")
    async with running() as server:
        for name in names:
            answer = await server.generate(prompt="hi", model=name)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
    assert not trap.sprung()
