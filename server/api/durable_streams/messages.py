"""What the items of a session's log are as messages of a stream, in each of its formats.

A message depends on its item alone, so that it is the same whenever and wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from server.api.frames import EpochName, FrameWriter
from server.engine.types import Finished
from server.sessions.log_stream import FedItem, Item, RewoundItem, ends_turn

Format = Literal["events", "text", "ai-sdk", "ag-ui"]


@dataclass(frozen=True, slots=True)
class Messages:
    """Writes the messages of one session in one format."""

    session: str
    format: Format
    epoch_name: EpochName

    @property
    def content_type(self) -> str:
        return "text/plain; charset=utf-8" if self.format == "text" else "application/json"

    @property
    def shows_input(self) -> bool:
        """See `server.sessions.log_stream.ItemWriter`."""
        return self.format in ("events", "text")

    def of(self, item: Item) -> list[bytes]:
        """Those of ``item``; most have one, and some have none."""
        return _WRITERS[self.format](self, item)

    def body(self, messages: Sequence[bytes]) -> bytes:
        """As the body of an answer."""
        return b"".join(messages) if self.format == "text" else b"[%b]" % b",".join(messages)


def _events(messages: Messages, item: Item) -> list[bytes]:
    """The frames of `/v1/stream`, and what each request began with."""
    if isinstance(item, FedItem):
        return _json(
            {
                "type": "input",
                "request_id": item.request_id,
                "seq": item.seq,
                "position": item.position,
                "tokens": item.num_tokens,
                "text": item.text,
            }
        )
    if isinstance(item, RewoundItem):
        return _json(
            {
                "type": "rewound",
                "session": messages.session,
                "epoch": messages.epoch_name(item.epoch),
                "seq": item.seq,
                "position": item.position,
            }
        )
    frame = FrameWriter(item.request_id, None, messages.epoch_name).frame(item)
    return [] if frame is None else [frame]


def _text(messages: Messages, item: Item) -> list[bytes]:
    """What the session reads and generates."""
    return [] if isinstance(item, RewoundItem) or not item.text else [item.text.encode()]


def _ai_sdk(messages: Messages, item: Item) -> list[bytes]:
    """What is generated, as the Vercel AI SDK's ``UIMessageChunk``."""
    if isinstance(item, RewoundItem):
        return []
    id, found = item.request_id, list[dict[str, Any]]()
    if isinstance(item, FedItem):
        begin = {"type": "start", "messageId": id}, {"type": "text-start", "id": id}
        return _json(*begin) if item.generates else []
    if item.text:
        found.append({"type": "text-delta", "id": id, "delta": item.text})
    if isinstance(item, Finished) and ends_turn(item):
        found.append({"type": "text-end", "id": id})
        failed = {"type": "error", "errorText": item.error}
        found.append({"type": "finish"} if item.error is None else failed)
    return _json(*found)


def _ag_ui(messages: Messages, item: Item) -> list[bytes]:
    """What is generated, as events of AG-UI, which TanStack AI reads."""
    if isinstance(item, RewoundItem):
        return []
    id, found = item.request_id, list[dict[str, Any]]()
    run = {"threadId": messages.session, "runId": id}
    if isinstance(item, FedItem):
        message = {"type": "TEXT_MESSAGE_START", "messageId": id, "role": "assistant"}
        return _json({"type": "RUN_STARTED", **run}, message) if item.generates else []
    if item.text:
        found.append({"type": "TEXT_MESSAGE_CONTENT", "messageId": id, "delta": item.text})
    if isinstance(item, Finished) and ends_turn(item):
        found.append({"type": "TEXT_MESSAGE_END", "messageId": id})
        failed = {"type": "RUN_ERROR", "message": item.error}
        found.append({"type": "RUN_FINISHED", **run} if item.error is None else failed)
    return _json(*found)


def _json(*messages: dict[str, Any]) -> list[bytes]:
    return [orjson.dumps(message) for message in messages]


_WRITERS: Mapping[Format, Callable[[Messages, Item], list[bytes]]] = {
    "events": _events,
    "text": _text,
    "ai-sdk": _ai_sdk,
    "ag-ui": _ag_ui,
}
