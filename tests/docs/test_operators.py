"""The commands of docs/operate and of named-states.md, in their order, as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.blocks import Block, blocks_of
from tests.docs.pages import DOCS
from tests.docs.serving import serving
from tests.hub_server import Repository, hub_server
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.rwkv7 import SHAPES, published, write_pth
from tests.tiny import write_model

pytestmark = pytest.mark.process

EVERSTREAM = [sys.executable, "-m", "server.cli.main"]
ADMIN_KEY = "es-key-of-the-operator-of-a-test"
ADDRESS = re.compile(r"http://127\.0\.0\.1:800[01]")


def block(page: str, first: str) -> Block:
    """The only one of a page whose first line begins so."""
    (found,) = (each for each in blocks_of(DOCS / page) if each.first.startswith(first))
    return found


def shell(text: str, folder: Path, **environment: str) -> str:
    """Runs lines of a page in ``folder``; what they print on both outputs."""
    program = f'everstream() {{ {shlex.join(EVERSTREAM)} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-ec", program + text],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def serve_words(line: str, port: int = 0) -> list[str]:
    """Of the page's `everstream serve`."""
    assert line.startswith("everstream serve "), line
    return [*EVERSTREAM, *shlex.split(line, comments=True)[1:], "--port", str(port)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `runs` has models, as in the pages."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("small", "large", "new"):
        write_model(folder / "runs" / name)
    (folder / "system.txt").write_text("You are a fox.", encoding="utf-8")
    return folder


# Stores in folders


def test_folder_is_backed_up_checked_and_restored(tmp_path: Path) -> None:
    store, backups = tmp_path / "store", tmp_path / "backups"
    backups.mkdir()

    def here(page: str, first: str) -> str:
        text = block(page, first).text.replace("/var/lib/everstream", str(store))
        return text.replace("/srv/backups", str(backups))

    with ServerProcess("--store", store) as server:
        body = {"prompt": "Once", "max_tokens": 5, "keep": True}
        made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=STUCK_S).json()
        shell(here("operate/backup.md", "everstream store backup"), tmp_path)
        shell(here("operate/upgrade.md", "everstream store backup"), tmp_path)
    assert "whole" in shell(here("operate/backup.md", "everstream store check"), tmp_path)
    shell(here("operate/upgrade.md", "everstream store new-id"), tmp_path)
    *lines, serve = here("operate/backup.md", "cp -a").splitlines()
    shell("\n".join(lines), tmp_path)
    with ServerProcess(*shlex.split(serve)[2:]) as server:
        status, text = server.get(f"/v1/sessions/{made['session']}")
    assert status == 200
    assert json.loads(text)["position"] == made["position"]


# Keys


def test_keys_of_the_page_are_accepted(tmp_path: Path) -> None:
    text = block("operate/tenants.md", "$ install").text
    *lines, serve = re.findall(r"(?m)^\$ (.*)$", text)
    _, operator = re.findall(r"(?m)^es-\S+$", shell("\n".join(lines), tmp_path))
    assert (tmp_path / "keys.toml").stat().st_mode & 0o777 == 0o600
    flags = shlex.split(serve.replace("keys.toml", str(tmp_path / "keys.toml")))[2:]
    with ServerProcess(*flags) as server:
        url = f"{server.url}/metrics"
        answers = [httpx.get(url, headers={"api-key": key}).status_code for key in (operator, "no")]
    assert answers == [200, 401]


# Models and named states


def test_models_are_loaded_and_unloaded_while_the_server_runs(models: Path) -> None:
    page = "operate/serve-models.md"
    serve = block(page, "everstream serve --model small").text
    flags = [
        str(models / word) if word == "runs" else word.replace("=runs", f"={models}/runs")
        for word in shlex.split(serve)[2:]
    ]
    with ServerProcess(*flags, "--admin-key", ADMIN_KEY) as server:
        answers = asked(block(page, "curl -X POST").text, server, models)
        named = json.loads(server_get(server, "/v1/models"))["data"]
    loaded, reloaded, deleted = map(json.loads, answers)
    assert (loaded["id"], reloaded["model"]["id"], deleted["id"]) == ("new", "small", "new")
    assert [model["id"] for model in named] == ["small", "large"]


def test_named_state_is_made_served_and_replaced(models: Path, tmp_path: Path) -> None:
    for name in ("runs", "system.txt"):
        (tmp_path / name).symlink_to(models / name)
    *make, serve = block("use/named-states.md", "everstream state make").text.splitlines()
    assert "You are a fox." in shell("\n".join(make), tmp_path)
    with serving(serve_words(serve), tmp_path, dict(os.environ)):
        pass
    flags = ("--model", models / "runs" / "small", "--admin-key", ADMIN_KEY)
    with ServerProcess(*flags) as server:
        asked(block("use/named-states.md", "curl -X POST").text, server, tmp_path)
        left = json.loads(server_get(server, "/v1/admin/states"))
    assert left["data"] == []


def test_state_of_the_terminal_page_is_made(models: Path, tmp_path: Path) -> None:
    shutil.copy(models / "system.txt", tmp_path)
    made = shell(block("use/terminal.md", "everstream state make").text, tmp_path)
    assert "You are a fox." in made


def test_sessions_are_moved_by_the_command_of_the_page(models: Path, tmp_path: Path) -> None:
    flags = ("--model", models / "runs" / "small", "--admin-key", ADMIN_KEY, "--store", tmp_path)
    with ServerProcess(*flags) as server:
        (answer,) = asked(block("operate/deploy.md", "curl -X POST").text, server, tmp_path)
    assert json.loads(answer) == {"moved": 0}


def asked(text: str, server: ServerProcess, folder: Path) -> list[str]:
    """What the server answers to each line of a block of curl commands."""
    text = ADDRESS.sub(server.url, text).replace("ADMIN_KEY", ADMIN_KEY)
    assert text.count(server.url) == text.count("curl ")
    silent = text.replace("curl ", "curl --silent --show-error --fail ")
    return [shell(line, folder) for line in silent.splitlines()]


def server_get(server: ServerProcess, path: str) -> str:
    answer = httpx.get(f"{server.url}{path}", headers={"api-key": ADMIN_KEY}, timeout=STUCK_S)
    assert answer.status_code == 200, answer.text
    return answer.text


# The hub


@pytest.fixture
def hub(models: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Its environment: one repository has everything that the page names."""
    pth = write_pth(tmp_path / "small.pth", published(SHAPES["square"]))
    native = {file.name: file.read_bytes() for file in (models / "runs" / "small").iterdir()}
    inner = {f"FOLDER/{name}": content for name, content in native.items()}
    with hub_server() as server:
        files = {**native, "small.pth": pth.read_bytes(), **inner}
        server.repositories["OWNER/NAME"] = Repository(files)
        yield {**os.environ, **server.environment(tmp_path / "home")}


def test_models_of_the_hub_are_pulled_served_and_removed(
    hub: dict[str, str], tmp_path: Path
) -> None:
    for line in block("operate/serve-models.md", "everstream pull").text.splitlines():
        if line.startswith("everstream serve"):
            words = [*serve_words(line), "--store", "memory"]
            with serving(words, tmp_path, hub):
                continue
        printed = shell(line, tmp_path, **hub)
        if line.startswith("everstream models "):
            assert "OWNER/NAME" in printed
