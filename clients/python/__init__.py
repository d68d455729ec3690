"""The Python client: `Client` for synchronous code, `AsyncClient` for asyncio.

with Client("http://127.0.0.1:8000") as client:
    for event in client.generate("Once upon a time", max_tokens=100):
        print(event.text, end="", flush=True)
"""

from .asynchronous import AsyncClient, AsyncSession
from .backoff import Backoff
from .errors import (
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
    SessionBroken,
    SessionBusy,
    SessionMigrated,
    SessionNotFound,
    SessionReset,
    SnapshotMismatch,
    StoreFailed,
    StoreFull,
)
from .events import (
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
    TopLogprob,
    Usage,
)
from .generation import AsyncGeneration, Generation
from .protocol import Sampling
from .results import Completion, ListedSession, Score, SessionInfo, SessionText, TextPart
from .synchronous import Client, Session

__all__ = [
    "Appended",
    "AsyncClient",
    "AsyncGeneration",
    "AsyncSession",
    "AuthenticationError",
    "Backoff",
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
    "Score",
    "Session",
    "SessionAttached",
    "SessionBroken",
    "SessionBusy",
    "SessionInfo",
    "SessionMigrated",
    "SessionNotFound",
    "SessionReset",
    "SessionText",
    "SnapshotMismatch",
    "Started",
    "StoreFailed",
    "StoreFull",
    "TextPart",
    "Token",
    "TopLogprob",
    "Usage",
]
