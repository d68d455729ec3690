"""Follows a growing file and prints the lines that are unlikely according to the model.

Every line is appended to one kept session, so that the model has read all earlier
lines, with constant memory on both sides. A small file stores the session and the
position in the log. A line that is sent twice, for example after a crash, has the
same idempotency key and is read once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from clients.api_key import ApiKey
from clients.examples.tail import Line, Place, Tail
from clients.python import (
    CapacityExhausted,
    Client,
    ConnectionLost,
    EverstreamError,
    KeyInUse,
    Session,
    SessionBusy,
    SessionMigrated,
    SessionNotFound,
    StoreFailed,
)

#: Errors after which the request is retried.
PASSING = (
    *(CapacityExhausted, ConnectionLost, KeyInUse),
    *(SessionBusy, SessionMigrated, StoreFailed),
)
RETRY_S = 1.0
#: Number of lines after which an old one hardly counts in the running mean.
MEMORY_LINES = 500

T = TypeVar("T")


@dataclass
class Usual:
    """Running mean and variance of bits per byte, with less weight on old lines."""

    num_lines: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    def add(self, bits: float) -> None:
        """Updates mean and variance with one line."""
        self.num_lines += 1
        share = max(1 / self.num_lines, 1 / MEMORY_LINES)
        distance = bits - self.mean
        self.mean += share * distance
        self.variance = (1 - share) * (self.variance + share * distance * distance)


@dataclass
class Memory:
    """What is stored between runs: the session, the place in the file, and the statistics."""

    session: str
    place: Place | None
    usual: Usual

    @classmethod
    def load(cls, path: Path) -> Memory | None:
        """Reads the file; None if there is none. Raises `ValueError` if it is invalid."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        try:
            place = saved["place"] and Place(**saved["place"])
            return cls(str(saved["session"]), place, Usual(**saved["usual"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} was not written by this program") from error

    def save(self, path: Path) -> None:
        """Replaces the file atomically, so that there is always a readable one."""
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(new, path)


class Follower:
    """Appends lines to the session of ``memory``, which is saved to ``file``.

    A line is reported if its bits per byte are more than ``threshold`` standard
    deviations above the mean; the first ``warm_up`` lines only update the mean.
    """

    def __init__(
        self, client: Client, memory: Memory, file: Path, threshold: float, warm_up: int
    ) -> None:
        self._session: Session = client.session(memory.session)
        self._memory, self._file = memory, file
        self._threshold, self._warm_up = threshold, warm_up

    def read_all(self, tail: Tail) -> None:
        """Prints the unusual ones of the lines that the file has now."""
        for line in tail.lines():
            if line.data.strip() and (message := self.read(line)) is not None:
                print(message, flush=True)

    def read(self, line: Line) -> str | None:
        """Appends a line to the session; returns the report of an unusual one, else None."""
        usual = self._memory.usual
        mean, deviation, limit = usual.mean, usual.deviation, math.inf
        if usual.num_lines >= self._warm_up:
            limit = mean + self._threshold * deviation
        bits = self._bits(line)
        usual.add(min(bits, limit))  # one odd line does not make the next one usual
        self._memory.place = line.end
        self._memory.save(self._file)
        if bits <= limit:
            return None
        text = "".join(c for c in line.data.decode(errors="replace") if c.isprintable())
        return f"{bits:.2f} bits/byte, usual {mean:.2f} +- {deviation:.2f}: {text}"

    def _bits(self, line: Line) -> float:
        """Bits of information per byte of the line, given all lines before it."""
        text = line.data.decode(errors="replace") + "\n"
        key = f"{self._session.id}:{line.begin.number}:{line.begin.offset}"
        appended = patiently(lambda: self._session.append(text, logprobs=True, idempotency_key=key))
        assert appended.logprobs is not None, appended
        return -sum(appended.logprobs) / math.log(2) / len(text.encode())


def patiently(ask: Callable[[], T]) -> T:
    """Calls ``ask`` until it succeeds: the server may be restarting."""
    waits = False
    while True:
        try:
            return ask()
        except PASSING as error:
            if not waits:
                typer.echo(f"follow: {error}; trying again", err=True)
            waits = True
            time.sleep(error.retry_after_s or RETRY_S)


def remembered(client: Client, file: Path) -> Memory:
    """Loads ``file``; creates a new session if the server does not have the stored one."""
    memory = Memory.load(file)
    if memory is not None:
        try:
            patiently(client.session(memory.session).info)
            return memory
        except SessionNotFound:
            typer.echo("follow: the session no longer exists; starting a new one", err=True)
    place = None if memory is None else memory.place
    memory = Memory(patiently(client.create_session).id, place, Usual())
    memory.save(file)
    return memory


def main(
    path: Annotated[Path, typer.Argument(help="File to follow.", dir_okay=False)],
    memory: Annotated[
        Path | None, typer.Option(help="File that stores the session; default: PATH.everstream.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Print lines this many standard deviations above the mean.")
    ] = 4.0,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Number of lines to read before any is printed.")
    ] = 50,
    interval: Annotated[
        float, typer.Option(min=0.01, help="Seconds between checks of the file.")
    ] = 0.5,
    once: Annotated[
        bool, typer.Option("--once", help="Stop at the current end of the file.")
    ] = False,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Print the lines of a growing file that the server's model finds unlikely."""
    file = memory or path.with_name(f"{path.name}.everstream")
    try:
        with Client(url, api_key, reconnect_s=0) as client:  # `patiently` retries, and reports it
            known = remembered(client, file)
            follower = Follower(client, known, file, threshold, warm_up)
            with closing(Tail(path, known.place)) as tail:
                follower.read_all(tail)
                if once:
                    return
                what = "more lines in" if path.exists() else "the file"
                typer.echo(f"follow: waiting for {what} {path}; Ctrl-C ends it", err=True)
                while True:
                    time.sleep(interval)
                    follower.read_all(tail)
    except (EverstreamError, ValueError) as error:
        typer.echo(f"follow: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        raise typer.Exit(130) from stop


if __name__ == "__main__":
    typer.run(main)
