"""Errors that a client's request can cause, each with a stable code.

The engine raises them; ``server.api.errors`` maps each code to a status in one table.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be done. ``param`` names the field at fault, if one is.

    A kind of error that has the same ``message`` each time has both in its class.
    """

    code = "engine_error"
    message = ""
    param: str | None = None

    def __init__(self, message: str | None = None, param: str | None = None) -> None:
        super().__init__(self.message if message is None else message)
        if message is not None:
            self.message, self.param = message, param


class InvalidRequest(RequestError):
    """A value out of range."""

    code = "invalid_value"


class ContextExceeded(RequestError):
    """A text longer than the bounded past of the model."""

    code = "context_length_exceeded"


class SessionNotFound(RequestError):
    """No such session, or not this owner's: the two look alike on purpose."""

    code = "session_not_found"
    message = "no such session"
    param = "session"


class SessionBusy(RequestError):
    """The session already runs a request; one at a time keeps its tokens in order."""

    code = "session_busy"
    message = "the session is running another request"
    param = "session"


class SessionAttached(RequestError):
    """Somebody reads what the session runs; one reader at a time."""

    code = "session_attached"
    message = "the session's events have another reader"
    param = "session"


class CapacityExhausted(RequestError):
    """There is no room for the state of one more session."""

    code = "capacity_exhausted"


class QueueFull(RequestError):
    """More requests wait than the operator allows."""

    code = "queue_full"


class OutOfMemory(RequestError):
    """There was no memory for the batch that this request was in."""

    code = "out_of_memory"
    message = "the server is out of memory; try again later"


class InternalFailure(RequestError):
    """This request failed in the engine; others continue."""

    code = "internal_error"


class ModelNotFound(RequestError):
    """A name that is not the served model's."""

    code = "model_not_found"
    message = "model: this server does not serve it; see /v1/models"
    param = "model"


def invalid(param: str, message: str) -> InvalidRequest:
    """A bad value of ``param``, named in the message as well."""
    return InvalidRequest(f"{param}: {message}", param)
