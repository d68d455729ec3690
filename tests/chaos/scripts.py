"""What clients ask for, and what a server that nothing happens to answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.history import Event, event_of_frame
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import answer_of, ask, socket_of

PROMPTS = (
    "Once upon a time number {} met a fox. ",
    "Who lives in the hollow tree number {}? ",
    "Every morning {} fetched water from the well. ",
)


@dataclass(frozen=True)
class Turn:
    """One generation. ``body`` is what its ``generate`` says apart from the session and the key."""

    body: dict[str, Any]


@dataclass(frozen=True)
class Script:
    """The generations of one session, one after the other. ``index`` is its name."""

    index: int
    turns: tuple[Turn, ...]


def scripts_of(chance: random.Random, number: int, longest: int) -> list[Script]:
    """Scripts of one to three turns, of up to ``longest`` tokens each."""
    return [
        Script(index, tuple(_turn(chance, longest) for _ in range(chance.choice((1, 1, 2, 3)))))
        for index in range(number)
    ]


def _turn(chance: random.Random, longest: int) -> Turn:
    return Turn(
        {
            "prompt": chance.choice(PROMPTS).format(chance.randrange(10**6)),
            "max_tokens": chance.randint(longest // 4, longest),
            "seed": chance.randrange(2**32),
            "temperature": 0.9,
            "top_p": chance.choice((0.9, 0.95, 1.0)),
            "ignore_eos": True,
        }
    )


async def expected_events(
    scripts: Sequence[Script], model: Path, environment: dict[str, str]
) -> dict[int, list[Event]]:
    """The events of each script on a server without other clients, as numbered in its session."""
    expected: dict[int, list[Event]] = {}
    with ServerProcess("--model", model, "--store", "memory", environment=environment) as server:
        for script in scripts:
            expected[script.index] = await _events(server.stream_url, script)
    return expected


async def _events(url: str, script: Script) -> list[Event]:
    events: list[Event] = []
    async with socket_of(url) as socket:
        await ask(socket, type="create", request_id="c")
        session = (await answer_of(socket, "created"))["session"]
        for turn in script.turns:
            await ask(socket, type="generate", request_id="g", session=session, **turn.body)
            while True:
                frame = await answer_of(socket, "started", "token", "finished")
                assert frame["type"] != "error", frame
                if (event := event_of_frame(frame)) is not None:
                    events.append(event)
                if frame["type"] == "finished":
                    break
    return events
