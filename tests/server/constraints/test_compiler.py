"""Formats are tried in a process that can be killed, and what is slow there delays no other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.api.schemas.requests import ResponseFormat
from server.constraints.compiler import MAX_WAITING, FormatCompiler, TrialLimits
from server.errors import InvalidRequest, QueueFull
from server.workers.process import ROOT
from tests.server.constraints.drawing import of_schema, tokenizer
from tests.stopping import stop
from tests.waiting import started_task, started_tasks

pytestmark = pytest.mark.process

FORMAT: TypeAdapter[ResponseFormat] = TypeAdapter(ResponseFormat)
CHOICE = {"type": "choice", "choices": ["yes", "no"]}
#: No format takes so long by the clock, however busy the machine is.
STUCK_S = 120.0
#: To build it takes more time than there is, and more memory.
SLOW = of_schema({"type": "integer", "multipleOf": 100_000_007})


def format(value: dict[str, Any]) -> ResponseFormat:
    if value["type"] == "json_schema":
        value = {**value, "json_schema": {"name": "n", **value["json_schema"]}}
    return FORMAT.validate_json(json.dumps(value))


@pytest.fixture
async def constraints() -> AsyncIterator[FormatCompiler]:
    made = FormatCompiler(tokenizer(), TrialLimits(max_cpu_s=1, timeout_s=STUCK_S))
    yield made
    await made.close()


def pid_of(made: FormatCompiler) -> int | None:
    """Of the process that formats are tried in, while there is one."""
    return made._child._worker.pid


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descriptors_of(pid: int | None) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]


def limits_of(pid: int | None) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return {line[:26].strip(): line[26:].split()[0] for line in lines}


async def test_no_process_before_the_first_format_and_none_after_close() -> None:
    made = FormatCompiler(tokenizer(), TrialLimits(timeout_s=STUCK_S))
    assert pid_of(made) is None
    assert await made.grammar(None) is None
    assert await made.grammar(format({"type": "text"})) is None
    assert pid_of(made) is None
    assert await made.grammar(format(CHOICE))
    pid = pid_of(made)
    assert pid is not None
    assert exists(pid)
    await made.close()
    assert not exists(pid)


async def test_process_stays_and_verdicts_are_remembered(constraints: FormatCompiler) -> None:
    first = await constraints.grammar(format(CHOICE))
    pid = pid_of(constraints)
    assert pid is not None
    other = await constraints.grammar(format({"type": "regex", "regex": "a+"}))
    assert pid_of(constraints) == pid
    assert first != other
    os.kill(pid, signal.SIGKILL)
    assert await constraints.grammar(format(CHOICE)) == first
    assert pid_of(constraints) == pid  # no request has come since


async def test_grammar_makes_matchers_anywhere(constraints: FormatCompiler) -> None:
    grammar = await constraints.grammar(format(CHOICE))
    assert grammar is not None
    elsewhere = FormatCompiler(tokenizer())
    for made in (constraints, elsewhere):
        place = made.matcher(grammar)
        for token in tokenizer().encode("yes"):
            place.accept(token)
        assert place.is_over()
        assert not made.matcher(grammar).is_over()


def test_text_that_is_no_grammar_of_ours_is_refused() -> None:
    made = FormatCompiler(tokenizer())
    for text in ("", "{}", '{"costs": 3}', "start: x"):
        with pytest.raises(InvalidRequest):
            made.matcher(text)


@pytest.mark.parametrize("value", [{"type": "regex", "regex": "("}, of_schema({"not": {}})])
async def test_refused_format_names_the_field_and_is_remembered(
    constraints: FormatCompiler, value: dict[str, Any]
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^response_format: ") as error:
            await constraints.grammar(format(value))
        assert error.value.param == "response_format"


async def test_slow_format_is_killed_and_the_next_one_is_served(
    constraints: FormatCompiler,
) -> None:
    await constraints.grammar(format(CHOICE))
    pid = pid_of(constraints)
    assert pid is not None
    slow = asyncio.create_task(constraints.grammar(format(SLOW)))
    after = asyncio.create_task(constraints.grammar(format({"type": "regex", "regex": "b+"})))
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await slow
    assert await after
    assert not exists(pid)
    assert pid_of(constraints) not in (None, pid)


async def test_child_that_does_not_answer_is_killed() -> None:
    made = FormatCompiler(tokenizer(), TrialLimits(timeout_s=STUCK_S))
    await made.grammar(format(CHOICE))
    pid = pid_of(made)
    assert pid is not None
    stop(pid)
    made._child._timeout_s = 0.1
    with pytest.raises(InvalidRequest, match="too long"):
        await made.grammar(format({"type": "regex", "regex": "a+"}))
    assert not exists(pid)
    made._child._timeout_s = STUCK_S
    # It was not the format's fault, and is not remembered.
    assert await made.grammar(format({"type": "regex", "regex": "a+"}))
    await made.close()


async def test_stop_does_not_wait_for_a_slow_format() -> None:
    made = FormatCompiler(tokenizer(), TrialLimits(max_cpu_s=600, timeout_s=600))
    await made.grammar(format(CHOICE))
    formats = [format(SLOW), format({"type": "regex", "regex": "a"})]
    asked = await started_tasks(made.grammar(one) for one in formats)
    await made.close()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(answer) for answer in answers] == [InvalidRequest] * 2
    assert pid_of(made) is None


HOSTILE: dict[str, dict[str, Any]] = {
    "a million items": of_schema({"type": "array", "minItems": 10**6}),
    "nested counts": of_schema(
        {"type": "array", "minItems": 300, "items": {"type": "array", "minItems": 300}}
    ),
    "endless reference": of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "references that double": of_schema(
        {"$ref": "#/$defs/a0"}
        | {
            "$defs": {
                **{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(20)},
                "a20": {"type": "object", "properties": {"x": {"type": "string"}}},
            }
        }
    ),
    "alternatives that multiply": of_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(8)]}
                for i in range(8)
            ]
        }
    ),
    "patterns that explode": of_schema(
        {"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}b"} for n in range(10, 30)]}
    ),
    "repetitions of repetitions": {"type": "regex", "regex": "(((a{1,99}){1,99}){1,99}){1,99}b"},
    "ambiguous repetition": {"type": "regex", "regex": "(.{1,500}){1,500}x"},
    "deep regular expression": {"type": "regex", "regex": "(" * 2000 + "a" + ")" * 2000},
    "deep grammar": {"type": "grammar", "grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "endless grammar": {"type": "grammar", "grammar": 'start: "a" start'},
    "very ambiguous grammar": {
        "type": "grammar",
        "grammar": 'start: s\ns: s s s s | s s s | s s | "a" | ',
    },
    "terminals that double": {
        "type": "grammar",
        "grammar": "start: A0\n"
        + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40))
        + '\nA40: "x"',
    },
    "many choices": {"type": "regex", "regex": "|".join(f"{i:03}.*{i:03}" for i in range(400))},
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_format_is_served_or_refused_and_nothing_else(
    constraints: FormatCompiler, value: dict[str, Any]
) -> None:
    (answer,) = await asyncio.gather(constraints.grammar(format(value)), return_exceptions=True)
    if isinstance(answer, str):
        constraints.matcher(answer).allowed(10)
    else:
        assert isinstance(answer, InvalidRequest)
        assert answer.param == "response_format"
        assert len(answer.message) < 400
    assert await constraints.grammar(format(CHOICE))


async def test_loop_is_free_while_a_slow_format_is_tried(constraints: FormatCompiler) -> None:
    await constraints.grammar(format(CHOICE))
    pid = pid_of(constraints)
    assert pid is not None
    stop(pid)  # so that it is not done sooner
    slow = asyncio.create_task(constraints.grammar(format(SLOW)))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not slow.done()
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(InvalidRequest):
        await slow


async def test_cancelled_caller_leaves_no_answer_behind(constraints: FormatCompiler) -> None:
    await constraints.grammar(format(CHOICE))
    asked = await started_task(constraints.grammar(format(SLOW)))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    grammar = await constraints.grammar(format({"type": "regex", "regex": "c"}))
    assert grammar is not None
    place = constraints.matcher(grammar)
    place.accept(*tokenizer().encode("c"))
    assert place.is_over()


async def test_child_has_no_socket_of_the_server(constraints: FormatCompiler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.set_inheritable(True)
        await constraints.grammar(format(CHOICE))
        links = descriptors_of(pid_of(constraints))
        ours = os.readlink(f"/proc/self/fd/{listening.fileno()}")
    assert ours not in links
    assert len(links) == 3


async def test_child_has_its_own_resource_limits(constraints: FormatCompiler) -> None:
    await constraints.grammar(format(CHOICE))
    bounds = limits_of(pid_of(constraints))
    assert int(bounds["Max address space"]) <= 1 << 30
    assert int(bounds["Max cpu time"]) < 60
    assert bounds["Max core file size"] == "0"


SERVER = """
import asyncio, os, signal
from tests.server.constraints.test_compiler import (
    CHOICE, STUCK_S, FormatCompiler, TrialLimits, format, pid_of, tokenizer
)

async def main():
    made = FormatCompiler(tokenizer(), TrialLimits(timeout_s=STUCK_S))
    await made.grammar(format(CHOICE))
    print(pid_of(made), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_child_ends_with_a_server_that_was_killed() -> None:
    """Its input ends then, and that is its end."""
    # The child has the pipe of the errors too: what waits for its end waits for the child's.
    ended = subprocess.run(
        [sys.executable, "-c", SERVER], cwd=ROOT, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert int(ended.stdout) > 0


async def test_formats_of_one_tenant_do_not_block_those_of_another(
    constraints: FormatCompiler,
) -> None:
    many = [format({"type": "regex", "regex": f"c{{{n}}}"}) for n in range(1, 2 * MAX_WAITING)]
    asked = await started_tasks(constraints.grammar(one, "a") for one in many)
    assert await constraints.grammar(format({"type": "regex", "regex": "d+"}), "b")
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in found] == [str] * MAX_WAITING + [QueueFull] * (MAX_WAITING - 1)
