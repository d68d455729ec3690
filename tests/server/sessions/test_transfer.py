"""Sessions leave as signed files and come back, here or on another server of the model."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from server.sessions.sessions import Signing
from server.store.states import export_session, import_session
from tests.fakes import STATE_BYTES
from tests.server.api.talk import create, info, kept, left, post, story
from tests.server.harness import Running, running
from tests.server.one_model import SIGNING

TYPE = "application/vnd.everstream.session"


async def export(server: Running, session: str) -> bytes:
    answer = await server.http.get(f"/v1/sessions/{session}/export")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TYPE
    return answer.content


async def take(server: Running, data: bytes) -> httpx.Response:
    return await server.http.post("/v1/sessions/import", content=data)


def made_by(data: bytes, signing: Signing) -> bytes:
    """The session of ``data`` as a server with ``signing`` would export it."""
    value = import_session(data, SIGNING.identity, SIGNING.key)
    return export_session(value, signing.identity, signing.key)


def refused(answer: httpx.Response, status: int, code: str) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error["code"]) == (status, code)


async def test_imported_session_continues_where_the_exported_one_was(server: Running) -> None:
    session = await kept(server, 5)
    data = await export(server, session)
    answer = (await take(server, data)).json()
    assert answer["session"] != session
    assert answer["position"] == 7
    assert answer["epoch"] == server.async_engine.epoch_name(0)
    for one in (answer["session"], session):
        more = await server.generate(session=one, max_tokens=8, seed=0)
        assert more.json()["choices"][0]["text"] == story(7, 8)


async def test_file_is_good_on_another_server_of_the_same_key(server: Running) -> None:
    data = await export(server, await kept(server, 5))
    async with running() as other:
        session = (await take(other, data)).json()["session"]
        more = await other.generate(session=session, max_tokens=8, seed=0)
        assert more.json()["choices"][0]["text"] == story(7, 8)


async def test_empty_session_can_be_exported(server: Running) -> None:
    answer = await take(server, await export(server, await create(server)))
    assert answer.json()["position"] == 0


async def test_running_session_is_exported_as_it_is_and_runs_on(server: Running) -> None:
    session = await left(server)
    answer = (await take(server, await export(server, session))).json()
    found = await info(server, answer["session"])
    assert not found["busy"]
    assert (await info(server, session))["busy"]
    more = await server.generate(session=answer["session"], max_tokens=8, seed=0)
    assert more.json()["choices"][0]["text"] == story(answer["position"], 8)
    await post(server, session, "cancel")


async def test_file_signed_with_another_key_is_refused(server: Running) -> None:
    data = made_by(await export(server, await kept(server)), replace(SIGNING, key=b"x" * 32))
    assert refused(await take(server, data), 400, "import_refused")
    async with running(trust_unsigned_state=True) as trusting:
        assert (await take(trusting, data)).status_code == 200


async def test_file_of_another_model_is_refused(server: Running) -> None:
    identity = replace(SIGNING.identity, model="1" * 64)
    data = made_by(await export(server, await kept(server)), replace(SIGNING, identity=identity))
    assert refused(await take(server, data), 409, "snapshot_mismatch")


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 7, 8, 0.3, 0.5, 0.99, -1])
async def test_part_of_a_file_is_refused(server: Running, part: float) -> None:
    data = await export(server, await kept(server))
    size = int(len(data) * part) if isinstance(part, float) else part
    assert refused(await take(server, data[:size]), 400, "import_refused")
    assert (await server.stats()).num_sessions == 1


async def test_every_altered_byte_is_refused(server: Running) -> None:
    data = await export(server, await kept(server))
    for place in range(0, len(data), max(1, len(data) // 40)):
        altered = bytes([*data[:place], data[place] ^ 1, *data[place + 1 :]])
        answer = await take(server, altered)
        assert answer.status_code in (400, 409), place
    assert (await server.stats()).num_sessions == 1


@pytest.mark.parametrize("data", [b"", b"{}", b"nonsense", b"\xff" * 1000, b"\x00" * 1000])
async def test_what_is_no_file_of_ours_is_refused(server: Running, data: bytes) -> None:
    assert refused(await take(server, data), 400, "import_refused")


async def test_export_of_what_is_not_there_is_a_404(server: Running) -> None:
    answer = await server.http.get("/v1/sessions/sess_none/export")
    assert refused(answer, 404, "session_not_found")


async def test_import_belongs_to_its_sender() -> None:
    async with running(api_keys=("one", "two")) as server:
        server.http.headers["authorization"] = "Bearer one"
        data = await export(server, await kept(server))
        server.http.headers["authorization"] = "Bearer two"
        session = (await take(server, data)).json()["session"]
        assert (await info(server, session))["position"] == 7
        server.http.headers["authorization"] = "Bearer one"
        answer = await server.http.get(f"/v1/sessions/{session}")
        assert refused(answer, 404, "session_not_found")


async def test_file_may_be_larger_than_other_bodies() -> None:
    """By the bytes of a state; what it holds is looked at then."""
    data = b"x" * (1024 + STATE_BYTES)
    async with running(max_body_bytes=1024) as small:
        answer = await small.http.post("/v1/sessions/import", content=data)
        assert answer.json()["error"]["code"] == "import_refused"
        answer = await small.http.post("/v1/sessions/import", content=data + b"x")
        assert answer.status_code == 413
