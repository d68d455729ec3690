"""The real server and the terminal on the native runtime, where there is no torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.requirements import needs_native

ROOT = Path(__file__).parents[2]

pytestmark = [
    needs_native,
    pytest.mark.process,
]

#: In the place of torch: leaves a trace, since an import may be tried and given up.
STAND_IN = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
raise ImportError("torch was imported")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "server.cli.main", *arguments]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a process in which torch cannot be imported."""
    (tmp_path / "torch.py").write_text(STAND_IN)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def test_tokens_come_without_torch(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(
            *("serve", "--port", "0", "--backend", "native", "--threads", "2"),
            *("--log-level", "debug"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        assert ", on the native runtime." in process.stdout.readline()
        lines = iter(process.stdout.readline, "")
        found = next(match for line in lines if (match := re.search(r"http://[\d.:]+", line)))
        body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, "temperature": 0.8}
        with httpx.Client(base_url=found[0], timeout=120) as client:
            first, again = (client.post("/v1/completions", json=body).json() for _ in range(2))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()
    assert first["usage"]["completion_tokens"] == 40
    assert first["choices"] == again["choices"]
    assert len(re.findall(r"everstream\.backend: the native runtime runs the model", errors)) == 1
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "Once", "--max-tokens", "8", "--seed", "1"),
        ("inspect",),
        ("eval", "everstream-stories", "--data", __file__, "--max-bytes", "99"),
    ],
)
def test_terminal_needs_no_torch(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(arguments, environment, tmp_path)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "imported").exists()


def test_torch_asked_for_and_missing_is_a_message(
    environment: dict[str, str], tmp_path: Path
) -> None:
    result = run(("generate", "Once", "--backend", "torch"), environment, tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("everstream: torch is not installed")


def run(
    arguments: tuple[str, ...], environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
