"""The command line as a user meets it, on a tiny checkpoint in a folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from model.bundled_models import DEFAULT_MODEL, DEFAULT_NAME, bundled_models
from model.checkpoint import load_checkpoint
from model.native.runtime import Runtime
from server.cli.main import app
from server.cli.serve import PURPOSES, invite
from server.config import ServerConfig
from tests.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_model(folder)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_generate_streams_text_and_sums_up(folder: Path) -> None:
    result = run("generate", "Once", "--model", folder, "--seed", 3, "--max-tokens", 20)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Once")
    assert re.search(r"\d+ tokens, \d+ tokens/s, [\d,]+ bytes of state, seed 3", result.stderr)
    again = run("generate", "Once", "--model", folder, "--seed", 3, "--max-tokens", 20)
    assert again.stdout == result.stdout


def test_generate_with_the_bundled_model_writes_words() -> None:
    result = run("generate", "Once upon a time", "--max-tokens", 60, "--seed", 1)
    assert result.exit_code == 0, result.output
    words = re.findall(r"[a-z]+", result.stdout)
    common = {"the", "and", "a", "to", "of", "was", "he", "she", "it", "in", "that", "his", "her"}
    assert len(common.intersection(words)) >= 3


def test_inspect_shows_state_and_cache(folder: Path) -> None:
    result = run("inspect", folder)
    assert result.exit_code == 0, result.output
    # 2 layers of S [2, 16, 16] and conv [3, 96] in float32; K and V in 16 bits
    assert f"{2 * (2 * 16 * 16 + 3 * 96) * 4 / 1024:.4g} KiB" in result.stdout
    assert f"{2 * 2 * 2 * 16 * 2 * 1_000_000 / 2**20:.4g} MiB" in result.stdout
    assert "1,000,000" in result.stdout


def test_inspect_shows_what_the_weights_take_in_memory() -> None:
    """Of the bundled model; the runtime holds scales, vectors in float32 and padding as well."""
    checkpoint = load_checkpoint(DEFAULT_MODEL)
    shown = re.search(r"(\d+) MB in bfloat16, (\d+) MB in int8", run("inspect").stdout)
    assert shown is not None
    for megabytes, dtype in zip(shown.groups(), ("bfloat16", "int8"), strict=True):
        held = Runtime(checkpoint.config, checkpoint.weights, dtype).num_bytes / 1e6
        assert int(megabytes) <= held < 1.25 * int(megabytes), dtype


def test_model_with_a_growing_cache_cannot_be_served(tmp_path: Path) -> None:
    write_model(tmp_path, attention="softmax")
    result = run("serve", "--port", "0", "--model", tmp_path)
    assert result.exit_code == 2
    assert "no constant state" in result.stderr


@pytest.mark.process
def test_serve_prints_a_line_that_works_and_ends_on_sigterm(folder: Path) -> None:
    command = [sys.executable, "-m", "server.cli.main", "serve", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--model", str(folder), "--api-key", "secret-key"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if "curl" in line)
        found = re.search(r"(http://\S+)/v1/completions", line)
        assert found, line
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(base_url=found[1], transport=transport, timeout=120) as client:
            assert client.get("/ready").status_code == 200
            body = {"prompt": "Once", "max_tokens": 5, "seed": 1}
            assert client.post("/v1/completions", json=body).status_code == 401
            key = {"Authorization": "Bearer secret-key"}
            answer = client.post("/v1/completions", json=body, headers=key)
            assert answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert "secret-key" not in errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("example.org", "http://example.org:8000"),
    ],
)
def test_greeting_names_an_address_that_can_be_opened(
    host: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(ServerConfig(host=host), 8000)
    printed = capsys.readouterr().out
    assert f"Open {url}/ or paste:" in printed
    assert all(name in printed for name in bundled_models() if name != DEFAULT_NAME)
    assert f"curl -N {url}/v1/completions" in printed
    invite(ServerConfig(host=host), 8000, chats=True)
    assert f"curl -N {url}/v1/chat/completions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("store", "kept"),
    [
        ("/var/lib/everstream", "in /var/lib/everstream (--store)"),
        ("memory", "in memory, and end with the server (--store)"),
        ("postgresql://me:secret@host/sessions", "in the database (--store)"),
    ],
)
def test_greeting_says_where_sessions_are_how_to_stop_and_where_to_read(
    store: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(ServerConfig(store=store), 8000)
    printed = capsys.readouterr().out
    assert f"Sessions are kept {kept}. Ctrl-C stops the server." in printed
    assert "docs/README.md" in printed
    assert "secret" not in printed


def test_greeting_says_what_each_bundled_model_is_for() -> None:
    assert PURPOSES.keys() >= bundled_models().keys()
