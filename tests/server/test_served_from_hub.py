"""``everstream serve --model OWNER/NAME``: what is not on disk is downloaded before it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from model.checkpoint import load_checkpoint
from tests.hub_server import hub_server
from tests.rwkv7 import SHAPES, published, write_pth
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.process


@contextmanager
def served(environment: Mapping[str, str], model: str, log: Path) -> Iterator[httpx.Client]:
    """A real server; what it prints is read until it tells its address."""
    words = ["serve", "--port", "0", "--threads", "1", "--store", "memory", "--dtype", "float32"]
    words += ["--model", model]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "server.cli.main", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(
                r"(http://\S+)/v1/(?:chat/)?completions", "".join(_until_url(process.stdout))
            )
            assert found is not None
            with httpx.Client(base_url=found[1], timeout=120) as client:
                yield client
        finally:
            process.kill()


def _until_url(lines: Any) -> Iterator[str]:
    for line in lines:
        yield line
        if "completions" in line:
            return


def text_of(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "Once", "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True}).json()
    assert "choices" in answer, answer
    return str(answer["choices"][0]["text"])


def expected_text(file: Path) -> str:
    checkpoint = load_checkpoint(file)
    tokens = [checkpoint.config.bos_token_id, *checkpoint.tokenizer.encode("Once")]
    prompt = len(tokens)
    for _ in range(12):
        logits = checkpoint.model.parallel(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits[: checkpoint.tokenizer.vocab_size].argmax()))
    return checkpoint.tokenizer.decode(tokens[prompt:])


def test_name_is_pulled_and_served(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    tiny_tokenizer().save(files / "tokenizer.json")
    write_pth(files / "small.pth", published(SHAPES["square"]))
    with hub_server() as hub:
        hub.add("owner/small", files)
        environment, log = hub.environment(tmp_path / "cache"), tmp_path / "log"
        with served(environment, "owner/small:small.pth", log) as client:
            assert text_of(client, "small.pth") == expected_text(files / "small.pth")
        assert dict(hub.gets()).keys() == {"small.pth", "tokenizer.json"}
        lines = log.read_text()
        assert "everstream.hub: owner/small: downloading small.pth" in lines
        assert hub.storage_url not in lines  # the real one has signatures in its URLs
