"""The Python client: `Client` for plain code, `AsyncClient` for asyncio.

with Client("http://127.0.0.1:8000") as client:
    for event in client.generate("Once upon a time", max_tokens=100):
        print(event.text, end="", flush=True)
"""

from clients.python.asynchronous import AsyncClient, AsyncGeneration, AsyncSession
from clients.python.calls import Completion, ListedSession, SessionInfo
from clients.python.errors import (
    AuthenticationError,
    Cancelled,
    CapacityExhausted,
    ConnectionLost,
    EverstreamError,
    HistoryGone,
    InternalServerError,
    InvalidRequest,
    KeyInUse,
    NotFound,
    ProtocolError,
    ReaderTooSlow,
    SessionAttached,
    SessionBusy,
    SessionMigrated,
    SessionNotFound,
    SessionReset,
    SnapshotMismatch,
    StoreFailed,
    StoreFull,
)
from clients.python.events import (
    Appended,
    Created,
    Deleted,
    Detached,
    Finished,
    Forked,
    Migrate,
    Reset,
    Resumed,
    Rewound,
    Started,
    Token,
    Usage,
)
from clients.python.protocol import Sampling
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
    "Detached",
    "EverstreamError",
    "Finished",
    "Forked",
    "Generation",
    "HistoryGone",
    "InternalServerError",
    "InvalidRequest",
    "KeyInUse",
    "ListedSession",
    "Migrate",
    "NotFound",
    "ProtocolError",
    "ReaderTooSlow",
    "Reset",
    "Resumed",
    "Rewound",
    "Sampling",
    "Session",
    "SessionAttached",
    "SessionBusy",
    "SessionInfo",
    "SessionMigrated",
    "SessionNotFound",
    "SessionReset",
    "SnapshotMismatch",
    "Started",
    "StoreFailed",
    "StoreFull",
    "Token",
    "Usage",
]
