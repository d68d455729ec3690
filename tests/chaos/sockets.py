"""A reader over `/v1/stream`. A connection that it leaves may be kept, to see what still comes."""

from __future__ import annotations

import asyncio
import json
import socket as sockets
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from tests.chaos.clients import ANSWER_S, CONNECT_S, RECEIVE_BYTES, SILENCE_S, Outcome, Place, World
from tests.chaos.record import Attachment
from tests.chaos.replicas import Replica
from tests.reliability.history import event_of_frame
from tests.reliability.streams import Frame, ask

REQUEST_ID = "r"


class SocketReader:
    """``gap_s`` is the time that it takes over each event. Await `close` in the end."""

    def __init__(self, world: World, gap_s: float, wanders: bool = True) -> None:
        self._world, self._gap_s, self._wanders = world, gap_s, wanders
        self._ghosts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for ghost in self._ghosts:
            ghost.cancel()
        await asyncio.gather(*self._ghosts, return_exceptions=True)

    async def read(self, place: Place, replica: Replica, take_over: bool) -> Outcome:
        socket: ClientConnection | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await _connected(replica)
            reading = _Reading(self._world, place, replica.incarnation, take_over)
            leaves_after = self._patience(place)
            outcome = await reading.run(socket, self._gap_s, leaves_after)
            if outcome in ("silent", "left") and reading.attachment is not None:
                self._haunt(socket, reading.attachment)
                socket = None
            return outcome
        except (ConnectionClosed, InvalidHandshake, InvalidMessage, OSError, EOFError):
            return "broken"  # a timeout of the connection is an OSError as well
        finally:
            if socket is not None:
                socket.transport.abort()
                await socket.wait_closed()

    def _patience(self, place: Place) -> int | None:
        """After how many events it moves on, as a balancer or a phone would make it."""
        if not self._wanders or place.chance.random() < 0.6:
            return None
        return place.chance.randint(1, 400)

    def _haunt(self, socket: ClientConnection, attachment: Attachment) -> None:
        ghost = asyncio.create_task(self._listen(socket, attachment))
        self._ghosts.add(ghost)
        ghost.add_done_callback(self._ghosts.discard)

    async def _listen(self, socket: ClientConnection, attachment: Attachment) -> None:
        """Everything that still comes on a connection that its client has given up."""
        try:
            async for message in socket:
                event = event_of_frame(json.loads(message))
                if event is not None:
                    self._world.recording.saw(attachment, event)
        except ConnectionClosed:
            pass
        finally:
            socket.transport.abort()


async def _connected(replica: Replica) -> ClientConnection:
    host, _, port = replica.url.rpartition(":")
    raw = sockets.socket()
    raw.setblocking(False)
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, RECEIVE_BYTES)
    try:
        await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
        return await connect(
            f"ws://{replica.url}/v1/stream",
            sock=raw,
            compression=None,
            ping_interval=None,
            open_timeout=None,
        )
    except BaseException:
        raw.close()
        raise


class _Reading:
    """One connection, from its question on."""

    def __init__(self, world: World, place: Place, replica: str, take_over: bool) -> None:
        self.attachment: Attachment | None = None
        self._world, self._place, self._replica = world, place, replica
        self._take_over = take_over

    async def run(
        self, socket: ClientConnection, gap_s: float, leaves_after: int | None
    ) -> Outcome:
        place = self._place
        num_tokens, asked_s = 0, self._world.clock()
        await ask(socket, **self._question())
        while True:
            try:
                async with asyncio.timeout(ANSWER_S if self.attachment is None else SILENCE_S):
                    frame: Frame = json.loads(await socket.recv())
            except TimeoutError:
                return "silent"
            outcome = self._take(frame, asked_s)
            if outcome is not None:
                return outcome
            if frame["type"] == "token":
                num_tokens += 1
                if num_tokens == leaves_after:
                    self._world.waits.struck(
                        "move", place.client, self.attachment, self._world.clock()
                    )
                    return "left"
                if gap_s:
                    await asyncio.sleep(gap_s)

    def _question(self) -> dict[str, Any]:
        place = self._place
        if not place.is_begun:
            where = {"keep": True} if place.session is None else {"session": place.session}
            return {
                "type": "generate",
                "request_id": REQUEST_ID,
                "idempotency_key": place.key,
                **where,
                **place.body,
            }
        question = {
            "type": "resume",
            "request_id": REQUEST_ID,
            "session": place.session,
            "epoch": place.epoch,
            "last_seq": place.last_seq,
        }
        return {**question, "take_over": True} if self._take_over else question

    def _take(self, frame: Frame, asked_s: float) -> Outcome | None:
        """What a frame says; an outcome where it is the last one that matters."""
        world, place, kind = self._world, self._place, frame["type"]
        if kind in ("started", "resumed"):
            world.check_place(place, frame)
            log_end = int(frame["last_seq"] if kind == "resumed" else frame["seq"])
            self.attachment = world.attached(
                place, self._replica, frame["session"], frame["epoch"], log_end, asked_s
            )
            if kind == "resumed" and not frame["busy"] and log_end <= place.last_seq:
                world.wrong(place, "lost end", f"nothing runs after event {log_end}: {frame}")
        elif kind in ("token", "finished"):
            event = event_of_frame(frame)
            assert event is not None
            if self.attachment is None:
                world.wrong(place, "no answer", f"{event} came before an answer")
                return "broken"
            world.saw(place, self.attachment, event)
            if kind == "finished":
                return "finished"
        elif kind == "migrate":
            return world.migrated(place, self.attachment)
        elif kind == "reset":
            return world.reset(place, frame)
        else:
            return world.refused(place, frame.get("error", {"code": kind}), self._replica)
        return None
