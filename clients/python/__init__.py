"""The Python client: `Client` for plain code, `AsyncClient` for asyncio.

with Client("http://127.0.0.1:8000") as client:
    for event in client.generate("Once upon a time", max_tokens=100):
        print(event.text, end="", flush=True)
"""

from clients.python.asynchronous import AsyncClient, AsyncGeneration, AsyncSession
from clients.python.errors import (
    AuthenticationError,
    Cancelled,
    CapacityExhausted,
    ConnectionLost,
    EverstreamError,
    InternalServerError,
    InvalidRequest,
    NotFound,
    ProtocolError,
    ReaderTooSlow,
    SessionBusy,
    SessionNotFound,
)
from clients.python.events import Appended, Created, Deleted, Finished, Started, Token, Usage
from clients.python.protocol import Completion, Sampling, SessionInfo
from clients.python.synchronous import Client, Generation, Session

__all__ = [
    "Appended",
    "AsyncClient",
    "AsyncGeneration",
    "AsyncSession",
    "AuthenticationError",
    "Cancelled",
    "CapacityExhausted",
    "Client",
    "Completion",
    "ConnectionLost",
    "Created",
    "Deleted",
    "EverstreamError",
    "Finished",
    "Generation",
    "InternalServerError",
    "InvalidRequest",
    "NotFound",
    "ProtocolError",
    "ReaderTooSlow",
    "Sampling",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "SessionNotFound",
    "Started",
    "Token",
    "Usage",
]
