"""A server whose states have their sums in bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.model.commands import everstream, refused
from tests.requirements import needs_native
from tests.server.served import Served, served
from tests.tiny import TEXT, write_model

SETTINGS = {"dtype": "float32", "state_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rounded") / "small", attention="delta")


async def details(server: Served) -> list[dict[str, Any]]:
    listed = (await server.http.get("/v1/models")).json()["data"]
    return [each["everstream"] for each in listed]


async def test_models_show_the_dtype_and_the_bytes_of_a_state(model: Path) -> None:
    async with served(str(model), state_dtype="bfloat16") as server:
        (narrow,) = await details(server)
    async with served(str(model)) as server:
        (wide,) = await details(server)
    halved, whole = ({t["name"]: t for t in each["state"]} for each in (narrow, wide))
    assert (halved["S"]["dtype"], whole["S"]["dtype"]) == ("bfloat16", "float32")
    assert 2 * halved["S"]["bytes"] == whole["S"]["bytes"]
    assert halved["conv"] == whole["conv"]
    saved = wide["state_bytes_per_session"] - narrow["state_bytes_per_session"]
    assert saved == halved["S"]["bytes"]


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "torch"])
async def test_kept_session_continues_after_a_restart_and_only_with_the_same_dtype(
    model: Path, tmp_path: Path, backend: str
) -> None:
    settings = {**SETTINGS, "store": str(tmp_path / "store"), "backend": backend}
    async with served(str(model), **settings) as server:
        whole = await server.text(TEXT, max_tokens=30)
        session = (await server.http.post("/v1/sessions", json={})).json()["session"]
        first = await server.text(TEXT, session=session, max_tokens=20)
    async with served(str(model), **{**settings, "state_dtype": "float32"}) as server:
        error = (await server.complete("", session=session))["error"]
        assert error["code"] == "snapshot_mismatch"
        assert "another state_dtype: bfloat16, and this server has float32" in error["message"]
        other = (await server.http.post("/v1/sessions", json={})).json()["session"]
        await server.text("Once", session=other)
    async with served(str(model), **settings) as server:
        assert first + await server.text("", session=session, max_tokens=10) == whole
        error = (await server.complete("", session=other))["error"]
        assert "another state_dtype: float32, and this server has bfloat16" in error["message"]


async def test_session_is_exported_forked_and_rewound(model: Path) -> None:
    settings = {**SETTINGS, "signing_key": "k" * 20}
    async with served(str(model), **settings) as server, served(str(model), **settings) as other:
        session = (await server.http.post("/v1/sessions", json={})).json()["session"]
        await server.text(TEXT, session=session, max_tokens=1)
        file = (await server.http.get(f"/v1/sessions/{session}/export")).content
        answer = await server.http.post(f"/v1/sessions/{session}/fork", json={"n": 1})
        (copy,) = answer.json()["sessions"]
        taken = (await other.http.post("/v1/sessions/import", content=file)).json()
        at = (await server.http.get(f"/v1/sessions/{session}")).json()["position"]
        texts = [
            await server.text("", session=session, max_tokens=40),
            await server.text("", session=copy, max_tokens=40),
            await other.text("", session=taken["session"], max_tokens=40),
        ]
        await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": at})
        texts.append(await server.text("", session=session, max_tokens=40))
        assert len(set(texts)) == 1
    async with served(str(model), **{**settings, "state_dtype": "float32"}) as wide:
        error = (await wide.http.post("/v1/sessions/import", content=file)).json()["error"]
        assert error["code"] == "snapshot_mismatch"


async def test_model_without_sums_is_served_next_to_one_that_has_some(
    model: Path, tmp_path: Path
) -> None:
    plain = write_model(tmp_path / "plain", attention="lfm2")
    async with served(f"a={plain}", f"b={model}", **SETTINGS) as server:
        first, second = await details(server)
        assert {tensor["dtype"] for tensor in first["state"]} == {"float32", "float16"}
        assert {tensor["dtype"] for tensor in second["state"]} == {"float32", "bfloat16"}


def test_models_without_sums_are_refused(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", attention="lfm2")
    flags = ("--state-dtype", "bfloat16", "--model")
    assert "a state of lfm2 has none" in refused("generate", *flags, plain, "Once")
    serve = ("serve", "--store", "memory", "--log-level", "error", *flags)
    assert "a state of lfm2 has none" in refused(*serve, plain)
    assert "none has any" in refused(*serve, f"a={plain}", "--model", f"b={plain}")
    assert "--state-dtype" in refused("serve", "--state-dtype", "int8", "--model", plain)


@needs_native
def test_commands_take_the_dtype(model: Path, tmp_path: Path) -> None:
    narrow = ("--state-dtype", "bfloat16")
    wide_bytes, narrow_bytes = (
        int(re.findall(r"state of a session\W+([\d,]+) bytes", table)[0].replace(",", ""))
        for table in (everstream("inspect", model), everstream("inspect", model, *narrow))
    )
    assert wide_bytes - narrow_bytes == 2 * 2 * 2 * 16 * 16
    long = ("generate", "--model", model, "--max-tokens", "60", "--seed", "1", "--dtype", "float32")
    assert everstream(*long, TEXT) != everstream(*long, *narrow, TEXT)
    state = ("state", "make", "--model", model, "--prompt", "Once", "--out", tmp_path / "s")
    everstream(*state, *narrow)
    assert re.search(r"state dtype\s+bfloat16", everstream("state", "inspect", tmp_path / "s"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    score = ("eval", model, "--data", text, "--mode", "stream")
    wide, rounded = (json.loads(everstream(*score, *more)) for more in ((), narrow))
    assert wide.keys() | {"state_dtype"} == rounded.keys()
    assert wide["perplexity"] != rounded["perplexity"]
    assert "--state-dtype bfloat16 needs the native" in refused(
        *score, *narrow, "--backend", "torch"
    )
