"""Traces three requests through the server: a streamed completion, a resume and a take-over.

    python -m docs.walks [--store postgresql://...] [--all]

Each walk is a real request over a real socket. A profile function in every thread of this process
notes each call from one function of the server to another one: a hop. A hop that occurs again is
not counted again, so the numbers do not depend on the number of tokens. Functions inside of others,
such as lambdas, count as part of these. The path of a request are the hops that lead to a place
where it changes its thread or task, is parsed or encoded, or reaches the kernel, the tokenizer or
the store. They are printed, or with ``--all`` every hop, and how often each file is entered from
another one. The take-over needs an empty PostgreSQL
database, which two servers in this process share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from server.api.app import create_app
from server.cluster.shared import Cluster
from server.config import ModelSource, ServerConfig
from server.http.server import Server, bind
from server.models.build import build_models

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / folder}/" for folder in ("server", "model"))
NUM_TOKENS = 8
#: A path ends at the kernel, the tokenizer and the store: it does not follow what they call.
ENDS = ("model/native/runtime.py", "model/tokenizer.py", "server/store/")
#: Where a request leaves a thread or a task for another one, becomes data, or leaves as bytes.
HAND_OVERS = {
    "BaseEventLoop.create_task",
    "BaseEventLoop.call_soon_threadsafe",
    "Condition.notify",
    "_SelectorSocketTransport.write",
}
THREADS = {"engine": "engine thread", "store": "store thread", "presence": "presence thread"}
HAND_OVERS_IN_C = {"set_result", "loads", "dumps"}


@dataclass(frozen=True, slots=True)
class Place:
    """A function: its file below the root, and its qualified name."""

    file: str
    function: str

    @property
    def is_end(self) -> bool:
        return self.file.startswith(ENDS)

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


Hop = tuple[Place, Place]


@dataclass
class Walk:
    """The hops of one request, in the order of their first occurrence, each with its thread.

    ``path`` are those by which the request itself travels, ``all`` also those that check, parse,
    encode or count something on the way and return.
    """

    path: dict[Hop, str] = field(default_factory=dict)
    all: dict[Hop, str] = field(default_factory=dict)

    def summary(self) -> str:
        return f"{_count(self.path)}; with every call on the way {_count(self.all)}"

    def calls(self) -> str:
        """Every hop, and the files by the number of hops that enter them from another file."""
        hops = [f"{caller} -> {callee}" for caller, callee in self.all]
        entries = Counter(callee.file for caller, callee in self.all if caller.file != callee.file)
        return "\n".join((*hops, *(f"{num} {file}" for file, num in entries.most_common())))

    def listing(self) -> str:
        """The path: a line for each hop, under the name of its thread."""
        lines: list[str] = []
        thread, last = "", None
        for number, ((one, other), runs_in) in enumerate(self.path.items(), 1):
            if runs_in != thread:
                thread, last = runs_in, None
                lines += ["", f"*{thread}*", ""]
            origin = "" if one == last else f" (from `{one.function}`)"
            lines.append(f"{number}. `{other}`{origin}")
            last = other
        return "\n".join(lines).strip()


def _count(hops: Iterable[Hop]) -> str:
    hops = list(hops)
    return f"{len(hops)} hops over {len({place.file for hop in hops for place in hop})} files"


class Tracer:
    """Notes calls in all threads that start after `install`, while a `walk` is open."""

    def __init__(self) -> None:
        self._walk: Walk | None = None
        self._places: dict[CodeType, Place | None] = {}

    def install(self) -> None:
        threading.setprofile(self._note)

    def uninstall(self) -> None:
        threading.setprofile(None)

    @contextlib.contextmanager
    def walk(self) -> Iterator[Walk]:
        walk = self._walk = Walk()
        try:
            yield walk
        finally:
            self._walk = None

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        walk = self._walk
        if walk is None or event not in ("call", "c_call"):
            return
        if event == "c_call":
            is_hand_over, place = argument.__name__ in HAND_OVERS_IN_C, None
        else:
            place = self._place(frame.f_code)
            is_hand_over = frame.f_code.co_qualname in HAND_OVERS or bool(place and place.is_end)
        if place is None and not is_hand_over:
            return
        hops = self._hops(frame)
        thread = THREADS.get(threading.current_thread().name, "event loop")
        if place is not None and hops:
            walk.all.setdefault(hops[-1], thread)
        if is_hand_over:
            for hop in hops:
                if not hop[0].is_end:
                    walk.path.setdefault(hop, thread)

    def _hops(self, frame: FrameType) -> list[Hop]:
        """The hops that led here, the outermost first. Frames of libraries are passed over."""
        places: list[Place] = []
        above: FrameType | None = frame
        while above is not None:
            place = self._place(above.f_code)
            if place is not None and (not places or places[-1] != place):
                places.append(place)
            above = above.f_back
        return list(pairwise(reversed(places)))

    def _place(self, code: CodeType) -> Place | None:
        if code not in self._places:
            self._places[code] = _place(code)
        return self._places[code]


def _place(code: CodeType) -> Place | None:
    if not code.co_filename.startswith(OURS):
        return None
    name = code.co_qualname.partition(".<")[0]
    return Place(str(Path(code.co_filename).relative_to(ROOT)), name)


class _Server(Server):
    """In a thread that is not the main one, where no signal arrives."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def serving(config: ServerConfig) -> Iterator[int]:
    """A server in a thread of its own; gives its port."""
    shared = Cluster(config) if config.is_shared else None
    models, _ = build_models(config, shared=shared)
    server = _Server(create_app(models, config, "0"), config)
    loop = asyncio.new_event_loop()
    with bind("127.0.0.1", 0) as listener, contextlib.closing(loop):
        run = server.serve(sockets=[listener])
        thread = threading.Thread(target=loop.run_until_complete, args=(run,), name="event loop")
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join()


class Client:
    """One connection to a server, which has answered on it before a walk begins."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._response: http.client.HTTPResponse | None = None
        self.ask("GET", "/ready")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.load(self._send(method, path, body))
        return answer

    def events(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The data of server-sent events, as they come."""
        for line in self._send(method, path, body):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self._connection.request(method, path, payload, headers)
        response = self._response = self._connection.getresponse()
        assert response.status == 200, response.read()
        return response


def completion(tracer: Tracer, model: ModelSource, folder: Path) -> Walk:
    """A streamed completion without a session, from its first byte to its last."""
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "seed": 1}
    body |= {"ignore_eos": True, "stream": True}
    with serving(_config(model, folder / "completion")) as port, connected(port) as client:
        list(client.events("POST", "/v1/completions", body))  # what is made once
        with tracer.walk() as walk:
            list(client.events("POST", "/v1/completions", body))
    return walk


def resume(tracer: Tracer, model: ModelSource, folder: Path) -> Walk:
    """A kept session that ran when its server stopped, read from a cursor at the next one."""
    config = _config(model, folder / "resume")
    with serving(config) as port, connected(port) as client:
        session = _begin(client)
    with serving(config) as port, connected(port) as client:
        with tracer.walk() as walk:
            _read_on(client, f"/v1/sessions/{session}/events?starting_after=2")
        _end(port, session)
    return walk


def take_over(tracer: Tracer, model: ModelSource, folder: Path, store: str) -> Walk:
    """A session that a client reads at one replica, taken over by a client of another one."""
    config = _config(model, folder).model_copy(update={"store": store})
    with serving(config) as first, serving(config) as second:
        with connected(first) as reader, connected(second) as client:
            session = _begin(reader)
            with tracer.walk() as walk:
                _read_on(client, f"/v1/sessions/{session}/events?starting_after=2&take_over=true")
        _end(second, session)
    return walk


def _config(model: ModelSource, store: Path) -> ServerConfig:
    return ServerConfig(
        model=(model,),
        store=str(store),
        threads=1,
        max_sessions=8,
        drain_timeout_s=0.0,
        speculation="off",  # how many tokens are drafted depends on times
    )


def connected(port: int) -> contextlib.closing[Client]:
    """A client, closed at the end."""
    return contextlib.closing(Client(port))


def _begin(client: Client) -> str:
    """A kept session in the midst of a generation that the client reads."""
    session: str = client.ask("POST", "/v1/sessions")["session"]
    body = {"session": session, "prompt": "Once", "max_tokens": 1_000_000, "ignore_eos": True}
    next(client.events("POST", "/v1/completions", body | {"seed": 1, "stream": True}))
    return session


def _read_on(client: Client, path: str) -> None:
    """Reads the events that were missed, and then some live ones."""
    stream = client.events("GET", path)
    resumed = next(stream)
    assert any(event["seq"] == resumed["last_seq"] + NUM_TOKENS for event in stream)


def _end(port: int, session: str) -> None:
    with connected(port) as client:
        client.ask("POST", f"/v1/sessions/{session}/cancel")


def main() -> None:
    """Prints each walk."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", help="an empty PostgreSQL database, for the take-over")
    parser.add_argument("--all", action="store_true", help="print every hop")
    arguments = parser.parse_args()
    logging.disable()
    for name, walk in walks(ModelSource("everstream-stories", None), arguments.store).items():
        print(f"{name}: {walk.summary()}")
        print(walk.calls() if arguments.all else walk.listing())


def walks(model: ModelSource, store: str | None) -> dict[str, Walk]:
    """The three walks, or two without a shared store."""
    tracer = Tracer()
    tracer.install()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = {
                "completion": completion(tracer, model, Path(folder)),
                "resume": resume(tracer, model, Path(folder)),
            }
            if store is not None:
                found["take-over"] = take_over(tracer, model, Path(folder), store)
            return found
    finally:
        tracer.uninstall()


if __name__ == "__main__":
    main()
