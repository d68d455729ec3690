"""Named states on the wire: a prompt is read once, for all sessions that begin with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection

from model.checkpoint import load_checkpoint
from server.cli.state import read_prompt, write_state
from server.models.backend import open_backend
from server.models.registry import ModelBroken
from server.models.storage import identity_of
from tests.rwkv7 import SHAPES, published, write_pth
from tests.server.cli.test_state import time_states
from tests.server.harness import receive, receive_until, send
from tests.server.served import ENDLESS, Served, served
from tests.tiny import tiny_tokenizer, write_model

SYSTEM = "Every morning she fetched water from the well. "
OTHER = "Who lives in the hollow tree? asked the fox there. "
ASKED = "Once upon a time there was a little girl. " * 4
ADMIN = "/v1/admin/states"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models ``a`` and ``b`` of one shape, ``r`` of another architecture, and states of theirs."""
    folder = tmp_path_factory.mktemp("states")
    write_model(folder / "a")
    write_model(folder / "b", seed=1)
    write_model(folder / "r", attention="rwkv7")
    for name, model, prompt in (
        ("system", "a", SYSTEM),
        ("other", "a", OTHER),
        ("of_b", "b", SYSTEM),
        ("of_r", "r", SYSTEM),
    ):
        checkpoint = load_checkpoint(folder / model)
        backend = open_backend(checkpoint, threads=1)
        state = read_prompt(backend, prompt)
        write_state(folder / name, state, identity_of(checkpoint, backend))
    write_pth(folder / "tuned.pth", time_states())
    return folder


@asynccontextmanager
async def serving(folder: Path, *states: str, **settings: Any) -> AsyncIterator[Served]:
    given = {"store": "memory", "state": states, **settings}
    async with served(str(folder / "a"), **given) as server:
        yield server


async def put(server: Served, name: str, file: Path | bytes, **query: str) -> httpx.Response:
    content = file if isinstance(file, bytes) else await asyncio.to_thread(file.read_bytes)
    return await server.http.post(ADMIN, content=content, params={"name": name, **query})


async def listed(server: Served) -> list[tuple[str, str, bool]]:
    data = (await server.http.get(ADMIN)).json()["data"]
    return [(entry["model"], entry["name"], entry["fixed"]) for entry in data]


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def create(server: Served, **body: Any) -> dict[str, Any]:
    answer = await server.http.post("/v1/sessions", json=body)
    assert answer.status_code == 200, answer.text
    created: dict[str, Any] = answer.json()
    return created


async def generated(socket: ClientConnection, **work: Any) -> str:
    await send(socket, type="generate", request_id="g", **work)
    frames = await receive_until(socket, "finished")
    return "".join(frame.get("text", "") for frame in frames)


async def reading(server: Served, *texts: str) -> str:
    """A session that has read ``texts`` itself."""
    session: str = (await create(server))["session"]
    for text in texts:
        answer = await server.http.post(f"/v1/sessions/{session}/append", json={"text": text})
        assert answer.status_code == 200, answer.text
    return session


# Begun with


async def test_every_way_to_begin_has_the_text_of_a_session_that_read_the_prompt(
    folder: Path,
) -> None:
    async with serving(folder, f"system={folder / 'system'}") as server:
        wanted = await server.text(ASKED, session=await reading(server, SYSTEM))
        whole = await server.complete(ASKED, state="system")
        assert whole["choices"][0]["text"] == wanted
        plain = await server.complete(ASKED)
        assert whole["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] - 1
        created = await create(server, state="system")
        assert created["position"] > 0
        assert await server.text(ASKED, session=created["session"]) == wanted
        async with server.socket() as socket:
            work = {"prompt": ASKED, "max_tokens": 20, "seed": 3, "ignore_eos": True}
            assert await generated(socket, state="system", **work) == wanted
            await send(socket, type="create", request_id="c", state="system")
            session = (await receive(socket))["session"]
            assert await generated(socket, session=session, **work) == wanted
        session = await reading(server, SYSTEM)
        assert await server.text("", state="system") == await server.text("", session=session)


@pytest.mark.process
async def test_chat_comes_after_the_state(folder: Path) -> None:
    """With the text of a session that has read the state's text, then the rendered messages."""
    async with serving(folder, f"system={folder / 'system'}") as server:
        messages = [{"role": "user", "content": "Who lives there?"}]
        body = {"messages": messages, "max_tokens": 12, "seed": 3, "ignore_eos": True}
        answer = await server.http.post("/v1/chat/completions", json=body | {"state": "system"})
        assert answer.status_code == 200, answer.text
        rendered = (await server.http.post("/tokenize", json={"messages": messages})).json()
        session = await reading(server, SYSTEM)
        wanted = await server.text(rendered["tokens"], session=session, max_tokens=12)
        assert answer.json()["choices"][0]["message"]["content"] == wanted
        assert answer.json()["usage"]["prompt_tokens"] == len(rendered["tokens"])


@pytest.mark.process
async def test_response_and_those_after_it_come_after_the_state(folder: Path) -> None:
    """Also where a later one tells the model something else, and all is read anew."""
    more: dict[str, Any] = {"seed": 3, "ignore_eos": True}
    async with serving(folder, f"system={folder / 'system'}") as server:

        async def chat(*messages: tuple[str, str]) -> str:
            said = [{"role": role, "content": content} for role, content in messages]
            # Kept, as a response is: where it may go on, half a character at its end waits.
            body = {"messages": said, "max_tokens": 12, "state": "system", "keep": True, **more}
            answer = (await server.http.post("/v1/chat/completions", json=body)).json()
            return str(answer["choices"][0]["message"]["content"])

        async def respond(text: str, **body: Any) -> tuple[str, str]:
            body = {"input": text, "max_output_tokens": 12, **more, **body}
            answer = (await server.http.post("/v1/responses", json=body)).json()
            return answer["id"], answer["output"][0]["content"][0]["text"]

        first, said = await respond("Who?", state="system")
        assert said == await chat(("user", "Who?"))
        past = (("user", "Who?"), ("assistant", said), ("user", "Where?"))
        _, anew = await respond("Where?", previous_response_id=first, instructions="Be brief.")
        assert anew == await chat(("system", "Be brief."), *past)
        second, _ = await respond("Where?", previous_response_id=first)
        session = (await server.http.get(f"/v1/responses/{second}")).json()["session"]
        part = (await server.http.get(f"/v1/sessions/{session}")).json()
        assert part["position"] > (await create(server, state="system"))["position"]
        body = {"input": "a", "state": "system", "previous_response_id": first}
        answer = await server.http.post("/v1/responses", json=body)
        assert refusal(answer) == (400, "invalid_value", "state")
        answer = await server.http.post("/v1/responses", json={"input": "a", "state": "nowhere"})
        assert refusal(answer) == (404, "state_not_found", "state")


async def test_same_text_after_two_states_is_two_texts(folder: Path) -> None:
    """And the prefix cache of one is never that of the other."""
    states = [f"{name}={folder / name}" for name in ("system", "other")]
    async with serving(folder, *states, prefix_cache=0) as cold:
        wanted = [await cold.text(ASKED, state=name) for name in ("system", "other")]
        wanted.append(await cold.text(ASKED))
    assert len(set(wanted)) == 3
    async with serving(folder, *states) as server:
        for num_hits in (0, 3):
            found = [await server.text(ASKED, state=name) for name in ("system", "other")]
            assert [*found, await server.text(ASKED)] == wanted
            stats = await server.version("a").async_engine.stats()
            assert stats.prefix_hits_total == num_hits


async def test_tuned_state_is_served(folder: Path) -> None:
    tuned, made = folder / "tuned.pth", folder / "of_r"
    models = (f"r={folder / 'r'}", f"a={folder / 'a'}")
    states = (f"tuned={tuned}", f"r/made={made}", f"a/made={folder / 'system'}")
    async with served(*models, store="memory", state=states, prefix_cache=0) as server:
        assert await listed(server) == [
            ("r", "made", True),
            ("r", "tuned", True),
            ("a", "made", True),
        ]
        answers = [
            await server.complete(ASKED, **more)
            for more in ({}, {"state": "tuned"}, {"state": "made"})
        ]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 3
        assert [
            a["usage"]["prompt_tokens"] - answers[0]["usage"]["prompt_tokens"] for a in answers
        ] == [*(0, -1, -1)]
        created = await create(server, state="tuned")
        assert created["position"] == 0
        session = created["session"]
        first = await server.text(ASKED, session=session)
        # The kept session withholds a character that is not whole.
        assert answers[1]["choices"][0]["text"].startswith(first)
        await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": 0})
        assert await server.text(ASKED, session=session) == first
        answer = await server.http.post("/v1/completions", json={"state": "tuned", "prompt": ""})
        assert refusal(answer) == (400, "invalid_value", "prompt")


async def test_merged_and_transposed_tuned_states_give_the_text_of_the_file(tmp_path: Path) -> None:
    weights, states = published(SHAPES["square"]), time_states(heads=2, dim=64)
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    write_pth(tmp_path / "plain.pth", weights)
    write_pth(tmp_path / "merged.pth", weights | states)
    write_pth(tmp_path / "state.pth", states)
    other = {key: tensor.transpose(1, 2).contiguous() for key, tensor in states.items()}
    write_pth(tmp_path / "other.pth", other)
    models = (f"plain={tmp_path / 'plain.pth'}", f"merged={tmp_path / 'merged.pth'}")
    given = (
        f"plain/file={tmp_path / 'state.pth'}",
        f"plain/turned=transposed:{tmp_path / 'other.pth'}",
        f"plain/wrong={tmp_path / 'other.pth'}",
    )
    async with served(*models, store="memory", state=given, dtype="float32") as server:
        assert ("merged", "tuned", True) in await listed(server)
        texts = {
            (model, state): await server.text(ASKED, model=model, state=state)
            for model, state in (
                *(("plain", "file"), ("plain", "turned"), ("plain", "wrong")),
                ("merged", "tuned"),
            )
        }
        wanted = texts["plain", "file"]
        assert texts["plain", "turned"] == texts["merged", "tuned"] == wanted
        assert texts["plain", "wrong"] != wanted
        without = [await server.text(ASKED, model=model) for model in ("plain", "merged")]
        assert without[0] == without[1] != wanted
    given = (f"merged/tuned=transposed:{tmp_path / 'state.pth'}",)
    async with served(*models, store="memory", state=given, dtype="float32") as server:
        assert await server.text(ASKED, model="merged", state="tuned") != wanted


async def test_rewind_fork_and_export_have_the_state(folder: Path) -> None:
    async with serving(folder, f"system={folder / 'system'}") as server:
        created = await create(server, state="system")
        session, start = created["session"], created["position"]
        first = await server.text(ASKED, session=session)
        forked = await server.http.post(f"/v1/sessions/{session}/fork", json={"at": start})
        (fork,) = forked.json()["sessions"]
        exported = await server.http.get(f"/v1/sessions/{fork}/export")
        await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": start})
        imported = await server.http.post("/v1/sessions/import", content=exported.content)
        for one in (session, fork, imported.json()["session"]):
            assert await server.text(ASKED, session=one) == first


# Refused


@pytest.mark.process
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/sessions", {}),
    ],
)
async def test_unknown_state_is_named(folder: Path, path: str, body: dict[str, Any]) -> None:
    async with serving(folder) as server:
        answer = await server.http.post(path, json=body | {"state": "nowhere"})
        assert refusal(answer) == (404, "state_not_found", "state")
        answer = await server.http.post(path, json=body | {"state": "../a"})
        assert refusal(answer)[::2] == (400, "state")
        async with server.socket() as socket:
            await send(socket, type="create", request_id="c", state="nowhere")
            error = (await receive(socket))["error"]
            assert (error["code"], error["param"]) == ("state_not_found", "state")


async def test_session_that_has_begun_takes_no_state(folder: Path) -> None:
    async with serving(folder, f"system={folder / 'system'}") as server:
        session = await reading(server, OTHER)
        body = {"prompt": "a", "session": session, "state": "system"}
        answer = await server.http.post("/v1/completions", json=body)
        assert refusal(answer) == (400, "invalid_value", "state")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("of_b", "of_b: the state belongs to another model: "),
        ("of_r", "of_r: the state belongs to another model: "),
        ("tuned.pth", "tuned states of gated models are not known"),
        ("nowhere", "No such file"),
        ("a/config.json", "config.json"),
    ],
)
async def test_state_of_another_model_stops_the_start(folder: Path, state: str, words: str) -> None:
    with pytest.raises(ModelBroken, match="--state x: ") as refused:
        async with serving(folder, f"x={folder / state}"):
            pass
    assert words in refused.value.message
    if state == "of_b":
        for model in "ab":
            assert load_checkpoint(folder / model).digest in refused.value.message


# Given and taken back by the operator


async def test_operator_gives_lists_exports_and_deletes(folder: Path) -> None:
    async with serving(folder, f"fixed={folder / 'other'}") as server:
        wanted = await server.text(ASKED, session=await reading(server, SYSTEM))
        answer = await put(server, "new", folder / "system")
        assert answer.status_code == 200, answer.text
        kept = answer.json()
        assert (kept["name"], kept["model"]) == ("new", "a")
        assert await listed(server) == [("a", "fixed", True), ("a", "new", False)]
        assert await server.text(ASKED, state="new") == wanted
        exported = await server.http.get(f"{ADMIN}/new")
        assert exported.content == (folder / "system").read_bytes()
        assert (await put(server, "new", folder / "other")).json()["digest"] != kept["digest"]
        assert await server.text(ASKED, state="new") != wanted
        assert (await server.http.delete(f"{ADMIN}/new")).json() == {"name": "new", "deleted": True}
        assert await listed(server) == [("a", "fixed", True)]
        for answer in (
            await server.http.get(f"{ADMIN}/new"),
            await server.http.delete(f"{ADMIN}/new"),
        ):
            assert refusal(answer) == (404, "state_not_found", "state")


async def test_export_of_a_session_becomes_a_state(folder: Path) -> None:
    async with serving(folder) as server:
        session = await reading(server, SYSTEM)
        exported = (await server.http.get(f"/v1/sessions/{session}/export")).content
        assert (await put(server, "made", exported)).status_code == 200
        wanted = await server.text(ASKED, session=session)
        assert await server.text(ASKED, state="made") == wanted


async def test_tuned_file_is_taken_and_exported_as_ours(folder: Path) -> None:
    async with served(f"a={folder / 'a'}", f"r={folder / 'r'}", store="memory") as server:
        answer = await put(server, "tuned", folder / "tuned.pth", model="r")
        assert (answer.status_code, answer.json()["tokens"]) == (200, 0)
        text = await server.text(ASKED, model="r", state="tuned")
        exported = await server.http.get(f"{ADMIN}/tuned", params={"model": "r"})
        await put(server, "again", exported.content, model="r")
        assert await server.text(ASKED, model="r", state="again") == text
        refused = await put(server, "tuned", folder / "tuned.pth", model="a")
        assert refusal(refused) == (400, "import_refused", "file")


async def test_bad_files_and_names_are_refused(folder: Path) -> None:
    async with serving(folder, f"fixed={folder / 'other'}", max_states=1) as server:
        system = folder / "system"
        broken = system.read_bytes()[:-1] + b"\xff"
        for name, file, wanted in (
            ("x", broken, (400, "import_refused", "file")),
            ("x", b"nothing", (400, "import_refused", "file")),
            ("x", folder / "of_b", (409, "snapshot_mismatch", "state")),
            ("../x", system, (400, "invalid_value", "name")),
            ("fixed", system, (409, "state_fixed", "name")),
        ):
            assert refusal(await put(server, name, file)) == wanted
        deleted = await server.http.delete(f"{ADMIN}/fixed")
        assert refusal(deleted) == (409, "state_fixed", "name")
        huge = await put(server, "x", bytes(8 << 20))
        assert refusal(huge)[:2] == (413, "body_too_large")
        assert await listed(server) == [("a", "fixed", True)]
        for _ in range(2):
            assert (await put(server, "x", system)).status_code == 200
        assert refusal(await put(server, "y", system)) == (409, "too_many_states", "name")


@pytest.mark.process
async def test_response_that_is_read_again_needs_the_state_under_its_name(folder: Path) -> None:
    """As docs/reference/protocol.md says; one that continues from its session does not."""
    more: dict[str, Any] = {"max_output_tokens": 4, "seed": 3, "ignore_eos": True}
    async with serving(folder) as server:

        async def respond(**body: Any) -> httpx.Response:
            return await server.http.post("/v1/responses", json={"input": "a", **more, **body})

        await put(server, "system", folder / "system")
        first = (await respond(state="system")).json()["id"]
        await server.http.delete(f"{ADMIN}/system")
        assert (await respond(previous_response_id=first)).status_code == 200
        again = await respond(previous_response_id=first, instructions="Be brief.")
        assert refusal(again) == (404, "state_not_found", "state")


async def test_deleted_state_harms_no_session(folder: Path) -> None:
    async with serving(folder) as server:
        await put(server, "system", folder / "system")
        wanted = await server.text(ASKED, state="system")
        idle = await create(server, state="system")
        async with server.socket() as socket:
            work = {"state": "system", "keep": True, "prompt": "a", **ENDLESS}
            await send(socket, type="generate", request_id="g", **work)
            session = (await receive_until(socket, "token"))[0]["session"]
            await server.http.delete(f"{ADMIN}/system")
            assert (await receive(socket))["type"] == "token"
            await send(socket, type="cancel", request_id="g")
            await receive_until(socket, "finished")
        assert await server.text(ASKED, session=idle["session"]) == wanted
        at = idle["position"]
        rewound = await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": at})
        assert rewound.status_code == 200, rewound.text
        assert await server.text(ASKED, session=session) == wanted
        answer = await server.http.post("/v1/completions", json={"prompt": "a", "state": "system"})
        assert refusal(answer) == (404, "state_not_found", "state")


async def test_work_done_once_is_answered_again_without_its_state(folder: Path) -> None:
    async with serving(folder) as server:
        await put(server, "system", folder / "system")
        body: dict[str, Any] = {"prompt": ASKED, "state": "system", "keep": True, "max_tokens": 8}
        keyed = body | {"idempotency_key": "once"}
        first = (await server.http.post("/v1/completions", json=keyed)).json()
        await server.http.delete(f"{ADMIN}/system")
        again = await server.http.post("/v1/completions", json=keyed)
        assert again.status_code == 200, again.text
        for field in ("choices", "session"):
            assert again.json()[field] == first[field]
        async with server.socket() as socket:
            assert await generated(socket, **keyed) == first["choices"][0]["text"]
        for prompt in (ASKED, ""):
            new = body | {"prompt": prompt, "idempotency_key": "another"}
            answer = await server.http.post("/v1/completions", json=new)
            assert refusal(answer) == (404, "state_not_found", "state")


async def test_next_server_with_the_store_has_what_was_given(folder: Path, tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "store")}
    async with serving(folder, **store) as server:
        await put(server, "kept", folder / "system")
        wanted = await server.text(ASKED, state="kept")
        session = (await create(server, state="kept"))["session"]
    async with serving(folder, **store) as server:
        assert await listed(server) == [("a", "kept", False)]
        assert await server.text(ASKED, state="kept") == wanted
        assert await server.text(ASKED, session=session) == wanted
