"""The answers to messages of a socket that are about a session and run nothing."""

from __future__ import annotations

from server.api.frames import created_frame, encode, forked
from server.api.schemas import requests as schemas
from server.api.schemas.frame_models import DeletedFrame, ForkedFrame, RewoundFrame
from server.models.service import Service

Asked = schemas.Delete | schemas.Fork | schemas.Rewind


async def create(service: Service, message: schemas.Create, owner: str) -> bytes:
    """The answer to ``create``. Raises `RequestError`."""
    info = await service.sessions.create(owner, message.state)
    return created_frame(message.request_id, info, service.async_engine.epoch_name)


async def answer(service: Service, message: Asked, owner: str) -> bytes:
    """The answer to ``message``, whose session ``service`` has. Raises `RequestError`."""
    sessions, epoch_name = service.sessions, service.async_engine.epoch_name
    id, session = message.request_id, message.session
    if isinstance(message, schemas.Delete):
        await sessions.delete(session, owner)
        deleted: DeletedFrame = {"type": "deleted", "request_id": id, "session": session}
        return encode(deleted)
    if isinstance(message, schemas.Fork):
        forks = await sessions.fork(session, owner, message.n or 1, message.at)
        frame: ForkedFrame = {
            "type": "forked",
            "request_id": id,
            **forked(session, forks, epoch_name),
        }
        return encode(frame)
    info = await sessions.rewind(session, owner, message.at)
    rewound: RewoundFrame = {
        "type": "rewound",
        "request_id": id,
        "session": session,
        "epoch": epoch_name(info.epoch),
        "seq": info.seq,
        "position": info.position,
    }
    return encode(rewound)
