"""The HTTP part of the protocol, without I/O: builds requests and parses answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from .errors import ProtocolError, error_of
from .events import from_fields
from .message import encode
from .results import (
    Completion,
    ListedSession,
    Score,
    SessionInfo,
    SessionPage,
    SessionText,
    TextPart,
)

SESSIONS_PATH = "/v1/sessions"
JSON_TYPE = "application/json"
SESSION_TYPE = "application/vnd.everstream.session"

T = TypeVar("T")

#: Text, or its token ids.
Text = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One HTTP request and the function that parses its answer."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    body_type: str = JSON_TYPE

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that describe the body."""
        return {} if self.body is None else {"content-type": self.body_type}

    def result(self, status: int, content: bytes, headers: Mapping[str, str]) -> T:
        """Returns the parsed answer, or raises the error that the answer reports."""
        if status >= 400:
            raise error_of(status, _json_of(content), headers.get("retry-after"))
        try:
            return self.read(content)
        except (LookupError, TypeError, AttributeError) as error:
            raise ProtocolError(f"no answer of this protocol: {content[:80]!r}") from error


def complete(prompt: Text, **fields: object) -> Call[Completion]:
    """Generates a whole completion."""
    return Call("POST", "/v1/completions", _completion, encode({"prompt": prompt, **fields}))


def models() -> Call[list[dict[str, Any]]]:
    """Lists the models that are served."""
    return Call("GET", "/v1/models", _models)


def score(
    prompt: Text, continuations: Sequence[Text], model: str | None, top: int | None
) -> Call[list[Score]]:
    """Scores how likely each of ``continuations`` is after ``prompt``."""
    body = encode({"prompt": prompt, "continuations": continuations, "model": model, "top": top})
    return Call("POST", "/v1/score", _scores, body)


def embed(texts: Text | Sequence[Text], model: str | None) -> Call[list[tuple[float, ...]]]:
    """Returns a vector for each text."""
    return Call("POST", "/v1/embeddings", _vectors, encode({"input": texts, "model": model}))


def tokenize(text: str, model: str | None) -> Call[list[int]]:
    """Returns the token ids of a text, without the start token."""
    fields = {"prompt": text, "model": model, "add_special_tokens": False, "allow_special": False}
    return Call("POST", "/tokenize", _token_ids, encode(fields))


def detokenize(tokens: Sequence[int], model: str | None) -> Call[str]:
    """Returns the text of token ids."""
    return Call("POST", "/detokenize", _text, encode({"tokens": tokens, "model": model}))


def session_info(session: str) -> Call[SessionInfo]:
    """Describes a session as it is now."""
    return Call("GET", _path(session), _session_info)


def cancel_session(session: str) -> Call[SessionInfo]:
    """Ends the running request of a session."""
    return Call("POST", f"{_path(session)}/cancel", _session_info)


def session_text(session: str, start: int | None) -> Call[SessionText]:
    """Returns one page of a session's text, from token ``start`` on."""
    query = "" if start is None else f"?{urlencode({'start': start})}"
    return Call("GET", f"{_path(session)}/text{query}", _session_text)


def export_session(session: str) -> Call[bytes]:
    """Returns a session as a signed file."""
    return Call("GET", f"{_path(session)}/export", bytes)


def import_session(data: bytes) -> Call[str]:
    """Creates a session from such a file and returns its id."""
    return Call("POST", f"{SESSIONS_PATH}/import", _session_id, data, SESSION_TYPE)


def sessions(after: str | None, limit: int) -> Call[SessionPage]:
    """Lists at most ``limit`` of the caller's sessions, in the order of their ids."""
    query = {"limit": limit} if after is None else {"limit": limit, "after": after}
    return Call("GET", f"{SESSIONS_PATH}?{urlencode(query)}", _page)


def _path(session: str) -> str:
    return f"{SESSIONS_PATH}/{quote(session, safe='')}"


def _json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _completion(content: bytes) -> Completion:
    body = _json_of(content)
    return from_fields(Completion, {**body, **body["choices"][0]})


def _models(content: bytes) -> list[dict[str, Any]]:
    found = _json_of(content)["data"]
    if not isinstance(found, list):
        raise TypeError(found)
    return found


def _scores(content: bytes) -> list[Score]:
    return [from_fields(Score, one) for one in _json_of(content)["data"]]


def _vectors(content: bytes) -> list[tuple[float, ...]]:
    return [tuple(one["embedding"]) for one in _json_of(content)["data"]]


def _token_ids(content: bytes) -> list[int]:
    return list(_json_of(content)["tokens"])


def _text(content: bytes) -> str:
    return str(_json_of(content)["prompt"])


def _session_info(content: bytes) -> SessionInfo:
    return from_fields(SessionInfo, _json_of(content))


def _session_text(content: bytes) -> SessionText:
    body = _json_of(content)
    parts = [from_fields(TextPart, part) for part in body["parts"]]
    return from_fields(SessionText, {**body, "parts": parts})


def _session_id(content: bytes) -> str:
    return str(_json_of(content)["session"])


def _page(content: bytes) -> SessionPage:
    body = _json_of(content)
    found = [from_fields(ListedSession, one) for one in body["data"]]
    return SessionPage(found, found[-1].session if body["has_more"] and found else None)
