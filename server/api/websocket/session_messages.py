"""The answers to messages of a socket that are about a session and run nothing."""

from __future__ import annotations

from server.api.schemas import requests as schemas
from server.api.schemas.frame_models import DeletedFrame, ForkedFrame, RewoundFrame
from server.api.schemas.frames import created_frame, encode
from server.models.service import Service

Asked = schemas.Delete | schemas.Fork | schemas.Rewind


async def create(service: Service, message: schemas.Create, owner: str) -> bytes:
    """The answer to ``create``. Raises `RequestError`."""
    info = await service.sessions.create(owner, message.state)
    return created_frame(message.request_id, info, service.async_engine.epoch_name)


async def answer(service: Service, message: Asked, owner: str) -> bytes:
    """The answer to ``message``, whose session ``service`` has. Raises `RequestError`."""
    if isinstance(message, schemas.Delete):
        return await _delete(service, message, owner)
    if isinstance(message, schemas.Fork):
        return await _fork(service, message, owner)
    return await _rewind(service, message, owner)


async def _delete(service: Service, message: schemas.Delete, owner: str) -> bytes:
    await service.sessions.delete(message.session, owner)
    frame: DeletedFrame = {
        "type": "deleted",
        "request_id": message.request_id,
        "session": message.session,
    }
    return encode(frame)


async def _fork(service: Service, message: schemas.Fork, owner: str) -> bytes:
    forks = await service.sessions.fork(message.session, owner, message.n or 1, message.at)
    frame: ForkedFrame = {
        "type": "forked",
        "request_id": message.request_id,
        "session": message.session,
        "sessions": [fork.session for fork in forks],
        "epoch": service.async_engine.epoch_name(forks[0].epoch),
        "position": forks[0].position,
    }
    return encode(frame)


async def _rewind(service: Service, message: schemas.Rewind, owner: str) -> bytes:
    info = await service.sessions.rewind(message.session, owner, message.at)
    frame: RewoundFrame = {
        "type": "rewound",
        "request_id": message.request_id,
        "session": message.session,
        "epoch": service.async_engine.epoch_name(info.epoch),
        "seq": info.seq,
        "position": info.position,
    }
    return encode(frame)
