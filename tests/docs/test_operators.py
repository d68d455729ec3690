"""The commands of docs/operate and of named-states.md, in their order, as they stand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.blocks import Block, blocks_of
from tests.docs.pages import DOCS
from tests.docs.serving import EVERSTREAM, serving
from tests.hub_server import Repository, hub_server
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.rwkv7 import SHAPES, published, write_pth
from tests.tiny import write_model

pytestmark = pytest.mark.process

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
    return folder


# Stores in folders


def test_folder_is_backed_up_checked_and_restored(tmp_path: Path) -> None:
    store, backups = tmp_path / "store", tmp_path / "backups"
    backups.mkdir()

    def here(page: str, first: str) -> str:
        text = block(page, first).text.replace("/var/lib/everstream", str(store))
        return text.replace("/srv/backups", str(backups))

    keys, key = ("--api-key", "es-key-of-a-tenant"), {"api-key": "es-key-of-a-tenant"}
    with ServerProcess("--store", store, *keys) as server:
        body = {"prompt": "Once", "max_tokens": 5, "keep": True}
        url = f"{server.url}/v1/completions"
        made = httpx.post(url, json=body, headers=key, timeout=STUCK_S).json()
        shell(here("operate/backup.md", "everstream store backup"), tmp_path)
        shell(here("operate/upgrade.md", "everstream store backup"), tmp_path)
    assert "whole" in shell(here("operate/backup.md", "everstream store check"), tmp_path)
    shell(here("operate/upgrade.md", "everstream store new-id"), tmp_path)
    *lines, serve = here("operate/backup.md", "cp -a").splitlines()
    shell("\n".join(lines), tmp_path)
    with ServerProcess(*shlex.split(serve)[2:], *keys) as server:
        url = f"{server.url}/v1/sessions/{made['session']}"
        restored = httpx.get(url, headers=key, timeout=STUCK_S)
    assert (restored.status_code, restored.json()["position"]) == (200, made["position"])
    with ServerProcess(*shlex.split(serve)[2:]) as server:  # without the keys
        assert server.get(f"/v1/sessions/{made['session']}")[0] == 404


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


def test_named_state_is_made_served_and_replaced(tmp_path: Path) -> None:
    *make, serve = block("use/named-states.md", "everstream state make").text.splitlines()
    assert "a clever fox." in shell("\n".join(make), tmp_path)
    flags = [
        word.replace("=assistant.state", f"={tmp_path / 'assistant.state'}")
        for word in shlex.split(serve)[2:]
    ]
    with ServerProcess(*flags) as server:
        (answer,) = asked(block("use/named-states.md", "curl http").text, server, tmp_path)
    assert json.loads(answer)["choices"][0]["text"]
    with ServerProcess("--admin-key", ADMIN_KEY) as server:
        asked(block("use/named-states.md", "curl -X POST").text, server, tmp_path)
        left = json.loads(server_get(server, "/v1/admin/states"))
    assert left["data"] == []


def test_state_of_the_terminal_page_is_made(tmp_path: Path) -> None:
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
    for line in block("operate/serve-models.md", "everstream pull OWNER/NAME  ").text.splitlines():
        if line.startswith("everstream serve"):
            words = [*serve_words(line), "--store", "memory"]
            with serving(words, tmp_path, hub):
                continue
        printed = shell(line, tmp_path, **hub)
        if line.startswith("everstream models "):
            assert "OWNER/NAME" in printed


def test_model_of_the_hub_is_served_on_a_machine_without_internet(
    hub: dict[str, str], tmp_path: Path
) -> None:
    """Another home in the place of another machine, and a hub that does not answer."""
    page = "operate/serve-models.md"
    default = "unset HF_HOME HF_HUB_CACHE XDG_CACHE_HOME\n"
    online, offline = ({"HOME": str(tmp_path / name)} for name in ("online", "offline"))
    offline["HF_ENDPOINT"] = "http://127.0.0.1:9"
    pack = block(page, "everstream pull OWNER/NAME --file small").text
    shell(default + pack, tmp_path, **hub | online)
    *unpack, serve = block(page, "mkdir").text.splitlines()
    shell(default + "\n".join(unpack), tmp_path, **hub | offline)
    variable, _, serve = serve.partition(" ")
    assert variable == "HF_HUB_OFFLINE=1"
    environment = {**hub, **offline, "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    with serving([*serve_words(serve), "--store", "memory"], tmp_path, environment):
        pass
