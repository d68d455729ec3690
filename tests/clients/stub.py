"""A server that says what a test tells it to, for what the real one never does."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

Message = dict[str, Any]


class Stub:
    """``messages`` are those that clients sent, as they arrived."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.messages: queue.Queue[Message] = queue.Queue()

    def next_message(self, kind: str) -> Message:
        """The next message of this type; others are dropped."""
        while (message := self.messages.get(timeout=60))["type"] != kind:
            pass
        return message


@contextmanager
def answering(answer: Callable[[ServerConnection, Message], None]) -> Iterator[Stub]:
    """Serves on a free port and calls ``answer`` for every message."""
    stubs: list[Stub] = []

    def handle(connection: ServerConnection) -> None:
        try:
            for frame in connection:
                message = json.loads(frame)
                stubs[0].messages.put(message)
                answer(connection, message)
        except ConnectionClosed:
            pass

    with serve(handle, "127.0.0.1", 0) as server:
        stubs.append(Stub(f"http://127.0.0.1:{server.socket.getsockname()[1]}"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield stubs[0]
        finally:
            server.shutdown()
            thread.join()


def started(message: Message) -> str:
    return json.dumps(
        {
            "type": "started",
            "seq": 0,
            "request_id": message["request_id"],
            "session": "sess_1",
            "epoch": "store-0",
            "position": 0,
            "seed": 1,
        }
    )


def token(message: Message, seq: int, text: str = "") -> str:
    return json.dumps(
        {
            "type": "token",
            "request_id": message["request_id"],
            "seq": seq,
            "position": seq,
            "token_id": 0,
            "text": text,
        }
    )


def created(message: Message) -> str:
    return json.dumps(
        {
            "type": "created",
            "request_id": message["request_id"],
            "session": "sess_1",
            "epoch": "store-0",
            "position": 0,
            "state_bytes": 4,
        }
    )


def finished(message: Message, reason: str, **more: object) -> str:
    usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
    return json.dumps(
        {
            "type": "finished",
            "request_id": message["request_id"],
            "session": None,
            "seq": 1,
            "position": 1,
            "text": "",
            "finish_reason": reason,
            "usage": usage,
            **more,
        }
    )
