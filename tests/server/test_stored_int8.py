"""A folder of int8 weights is a checkpoint like any other: every command takes it as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from model.checkpoint import load_checkpoint
from model.quantization.quantize import save_quantized
from server.cli.main import app
from tests.server.served import served
from tests.tiny import TEXT, tiny_checkpoint

MECHANISMS = ("delta", "elu", "vq")


def stored(folder: Path, attention: str) -> str:
    save_quantized(folder, tiny_checkpoint(attention), "int8")
    return str(folder)


def output(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("attention", MECHANISMS)
def test_commands_take_it(attention: str, tmp_path: Path) -> None:
    folder, text = stored(tmp_path / "int8", attention), tmp_path / "text.txt"
    text.write_text(TEXT)
    assert "int8, " in output("inspect", folder)
    bits = [
        json.loads(output("eval", folder, "--data", str(text), "--backend", backend))
        for backend in ("native", "torch")
    ]
    assert bits[0]["bits_per_byte"] == pytest.approx(bits[1]["bits_per_byte"], rel=1e-4)
    output("export", folder, str(tmp_path / "wide"), "--dtype", "float32")
    whole, wide = load_checkpoint(folder).weights, load_checkpoint(tmp_path / "wide").weights
    assert all(np.array_equal(whole[name], wide[name]) for name in whole)
    generate = ("generate", "Once", "--model", folder, "--max-tokens", "5", "--seed", "1")
    for backend in ("native", "torch"):
        assert output(*generate, "--backend", backend).startswith("Once")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("attention", MECHANISMS)
async def test_session_continues_after_a_restart(
    attention: str, backend: str, tmp_path: Path
) -> None:
    folder, store = stored(tmp_path / "int8", attention), str(tmp_path / "store")
    async with served(folder, store=store, backend=backend) as server:
        session = (await server.http.post("/v1/sessions", json={})).json()["session"]
        first = await server.text("Once", session=session)
        whole = await server.text("Once", max_tokens=40)
    async with served(folder, store=store, backend=backend) as server:
        assert (server.models.default.model.dtype == "int8") == (backend == "native")
        assert first + await server.text("", session=session) == whole
