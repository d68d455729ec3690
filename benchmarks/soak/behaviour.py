"""What the soak's clients do: each function is one visit, from connecting to leaving."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from benchmarks.soak.mistakes import bad_body, bad_frame, oversized_frame
from benchmarks.soak.wire import (
    Refused,
    World,
    checked_refusal,
    checked_stream,
    expect,
    open_raw,
    raise_if_error,
)
from benchmarks.wire import post

PROMPTS = (
    "Once upon a time",
    "The fox looked at the moon and said nothing.",
    "In the middle of the night, when everyone was asleep, a small door opened in the wall",
    "Ünïcödé, naïve 東京 🙂 and <|endoftext|> as plain text",
)
LONG_TEXT = "The old man walked along the shore and told the waves a story. " * 400


def sampling(rng: Random, max_tokens: int = 60) -> dict[str, Any]:
    """Parameters of a generation, drawn from common values."""
    chosen: dict[str, Any] = {"max_tokens": rng.randint(1, max_tokens)}
    for name, values in (
        ("temperature", (0, 0.5, 1, 1.5)),
        ("top_k", (0, 1, 40)),
        ("top_p", (0.5, 0.95, 1)),
        ("min_p", (0, 0.05)),
        ("repetition_penalty", (1, 1.2)),
        ("stop", ("the", [".", "\n\n"], [])),
        ("ignore_eos", (True, False)),
        ("seed", (0, 7, 2**63 - 1)),
    ):
        if rng.random() < 0.3:
            chosen[name] = rng.choice(values)
    return chosen


def prompt(rng: Random) -> str:
    """A short text."""
    return rng.choice(PROMPTS)


def long_text(rng: Random) -> str:
    """Text of thousands of tokens."""
    return LONG_TEXT[: rng.randint(len(LONG_TEXT) // 4, len(LONG_TEXT))]


# Visits that read to the end


async def stream(world: World, rng: Random) -> None:
    """A few generations over one socket."""
    async with world.socket() as socket:
        for number in range(rng.randint(1, 3)):
            await socket.generate(f"s{number}", prompt=prompt(rng), **sampling(rng))


async def completion(world: World, rng: Random) -> None:
    """One answer in one body."""
    answer = await world.generate(prompt=prompt(rng), **sampling(rng))
    expect(answer["session"] is None, "an unkept session", answer)


async def sse(world: World, rng: Random) -> None:
    """Server-sent events, read to the end."""
    body = {"prompt": prompt(rng), "stream": True, **sampling(rng)}
    async with world.http.stream("POST", "/v1/completions", json=body) as answer:
        text = (await answer.aread()).decode()
    world.tally.statuses[answer.status_code] += 1
    if answer.status_code != 200:
        raise Refused(checked_refusal(answer.status_code, json.loads(text)))
    expect(text.endswith("data: [DONE]\n\n"), "end of SSE", text[-200:])


async def same_tokens(world: World, rng: Random) -> None:
    """The same request and seed give the tokens that they gave alone."""
    wanted = rng.choice(world.references)
    async with world.socket() as socket:
        got = await socket.generate("c", prompt=wanted.prompt, **wanted.sampling)
    expect(got.tokens == wanted.tokens, f"other tokens than {wanted.tokens}", got.tokens)
    expect(got.text == wanted.text, f"other text than {wanted.text!r}", got.text)


async def same_tokens_in_two_parts(world: World, rng: Random) -> None:
    """A session that is stopped and continued gives them as well."""
    wanted = rng.choice(world.references)
    count = rng.randint(1, len(wanted.tokens) - 1)
    rest = len(wanted.tokens) - count
    async with world.socket() as socket:
        first = await socket.generate(
            "a", prompt=wanted.prompt, keep=True, **{**wanted.sampling, "max_tokens": count}
        )
    expect(first.session is not None, "a kept session", first)
    async with world.socket() as socket:
        second = await socket.generate(
            "b", prompt="", session=first.session, **{**wanted.sampling, "max_tokens": rest}
        )
        await socket.send("delete", "d", session=first.session)
        await socket.answer("d")
    tokens = first.tokens + second.tokens
    expect(tokens == wanted.tokens, f"other tokens than {wanted.tokens}", tokens)


async def long_prompt(world: World, rng: Random) -> None:
    """Much to read, little to say."""
    answer = await world.generate(prompt=long_text(rng), max_tokens=5)
    expect(answer["usage"]["prompt_tokens"] > 1000, "prompt_tokens", answer)


async def kept_session(world: World, rng: Random) -> None:
    """A session from its creation to its deletion, whose length is known at every moment."""
    created = await world.call("POST", "/v1/sessions", json={})
    path = f"/v1/sessions/{created['session']}"
    position = 0
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            answer = await world.call("POST", f"{path}/append", json={"text": prompt(rng)})
        else:
            answer = await world.generate(
                prompt=prompt(rng), session=created["session"], **sampling(rng)
            )
        position += answer["usage"]["total_tokens"]
        expect(answer["position"] == position, f"position is not {position}", answer)
    info = await world.call("GET", path)
    expect(info["position"] == position and not info["busy"], "session", info)
    await world.call("DELETE", path)
    await world.call("GET", path, status=404)


async def abandoned_session(world: World, rng: Random) -> None:
    """Kept and never asked for again: it expires."""
    answer = await world.generate(prompt=prompt(rng), keep=True, **sampling(rng))
    expect(answer["session"] is not None, "a kept session", answer)


async def busy_session(world: World, rng: Random) -> None:
    """Two requests at once on one session, and its deletion while it runs."""
    async with world.socket() as socket:
        await socket.send("create", "n")
        session = (await socket.answer("n"))[-1]["session"]
        endless = {"max_tokens": 1_000_000, "ignore_eos": True}
        await socket.send("generate", "a", prompt=prompt(rng), session=session, **endless)
        await socket.tokens(rng.randint(1, 10))
        await socket.send("append", "b", session=session, text="more")
        while (frame := await socket.frame())["request_id"] != "b":
            expect(frame["type"] == "token", "no token", frame)
        expect(frame.get("error", {}).get("code") == "session_busy", "no session_busy", frame)
        await socket.send("delete", "d", session=session)
        frames = await socket.ends("a", "d")
    expect(frames["a"][-1].get("finish_reason") == "cancelled", "not cancelled", frames["a"][-1])


# Visits that cancel or disconnect


async def cancel(world: World, rng: Random) -> None:
    """At any moment: before the start, in the middle of a prompt, between tokens, too late."""
    long = rng.random() < 0.3
    text = long_text(rng) if long else prompt(rng)
    async with world.socket() as socket:
        await socket.send("generate", "x", prompt=text, max_tokens=200)
        seen = await socket.tokens(0 if long else rng.randint(0, 30))
        if not seen or seen[-1]["type"] == "token":
            await socket.send("cancel", "x")
            seen += await socket.answer("x")
        if seen[-1]["type"] == "finished":
            checked_stream(seen)


async def several_at_once(world: World, rng: Random) -> None:
    """Some are cancelled; sometimes the socket closes before the others have ended."""
    names = [f"m{number}" for number in range(rng.randint(2, 6))]
    async with world.socket() as socket:
        for name in names:
            await socket.send("generate", name, prompt=prompt(rng), **sampling(rng))
        for name in names:
            if rng.random() < 0.3:
                await socket.send("cancel", name)
        if rng.random() < 0.3:
            return
        for frames in (await socket.ends(*names)).values():
            try:
                raise_if_error(frames[-1])
                checked_stream(frames)
            except Refused as refusal:
                world.tally.refused[refusal.code] += 1


async def cut_socket(world: World, rng: Random) -> None:
    """Disconnects without a close frame, before the first token or after some."""
    async with world.socket(close=False) as socket:
        text = long_text(rng) if rng.random() < 0.3 else prompt(rng)
        await socket.send("generate", "x", prompt=text, keep=rng.random() < 0.2, max_tokens=500)
        if rng.random() < 0.6:
            await socket.tokens(rng.randint(1, 20))


async def cut_http(world: World, rng: Random) -> None:
    """Leaves a completion in the middle, streamed or not."""
    body = {"prompt": prompt(rng), "max_tokens": 300, "stream": rng.random() < 0.7}
    sent = post("/v1/completions", json.dumps(body).encode())
    async with open_raw(world.url, sent) as reader:
        if body["stream"]:
            status = (await reader.readexactly(len("HTTP/1.1 200"))).split()[1]
            world.tally.statuses[int(status)] += 1
            await reader.read(rng.randint(1, 4000))


async def cut_head_or_body(world: World, rng: Random) -> None:
    """Leaves before the request is whole."""
    whole = post("/v1/completions", b'{"prompt": "Once", "max_tokens": 5}')
    async with open_raw(world.url, whole[: rng.randint(0, len(whole) - 1)]):
        pass


Visit = Callable[[World, Random], Awaitable[None]]

#: Every visit and how often it is made, relative to the others.
VISITS: dict[Visit, int] = {
    stream: 6,
    completion: 3,
    sse: 3,
    same_tokens: 5,
    same_tokens_in_two_parts: 3,
    long_prompt: 2,
    kept_session: 4,
    abandoned_session: 1,
    busy_session: 2,
    cancel: 5,
    several_at_once: 4,
    cut_socket: 5,
    cut_http: 5,
    cut_head_or_body: 2,
    bad_body: 5,
    bad_frame: 3,
    oversized_frame: 1,
}
