"""A branch of a chat: messages, which the server writes by the model's template.

All of them are sent each time; the server's prefix cache has the earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import httpx

from clients.chat.branch import Piece, Turn
from clients.python import ConnectionLost
from clients.python.errors import error_of
from clients.python.protocol import Sampling

PATH = "/v1/chat/completions"
#: Each chunk then says how many tokens there are so far, also where the rest is cancelled.
USAGE = {"include_usage": True, "continuous_usage_stats": True}


class ChatAnswer:
    """A streamed chat completion. See `clients.chat.branch.Answer`."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self._http = http
        self._request = http.build_request("POST", PATH, json=body)
        self._response: httpx.Response | None = None
        self.num_tokens = self.position = 0

    def __enter__(self) -> Self:
        try:
            self._response = self._http.send(self._request, stream=True)
            if self._response.status_code >= 400:
                raise error_of(self._response.status_code, _json(self._response.read()))
        except httpx.HTTPError as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        if self._response is not None:
            self._response.close()

    def __iter__(self) -> Iterator[Piece]:
        assert self._response is not None
        try:
            for line in lines_of(self._response.iter_bytes()):
                if line.startswith(b"data: {"):
                    yield from self._read(json.loads(line.removeprefix(b"data: ")))
        except httpx.HTTPError as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error

    def _read(self, chunk: dict[str, Any]) -> Iterator[Piece]:
        if "error" in chunk:
            raise error_of(500, chunk)
        if (usage := chunk.get("usage")) is not None:
            self.num_tokens = usage["completion_tokens"]
            self.position = usage["total_tokens"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            piece = Piece(delta.get("content") or "", delta.get("reasoning_content") or "")
            if any(piece):
                yield piece


@dataclass
class ChatBranch:
    """The messages of a chat. See `clients.chat.branch.Branch`.

    ``system`` comes before them; ``effort`` is OpenAI's word for how much is thought.
    """

    http: httpx.Client
    model: str
    turns: list[Turn] = field(default_factory=list)
    system: str = ""
    effort: str | None = None

    @property
    def position(self) -> int:
        return self.turns[-1].ends if self.turns else 0

    def answer(self, prompt: str, sampling: Sampling) -> ChatAnswer:
        body: dict[str, Any] = {"model": self.model, "messages": self._messages(prompt)}
        if self.effort is not None:
            body["reasoning_effort"] = self.effort
        return ChatAnswer(self.http, {**body, **sampling, "stream": True, "stream_options": USAGE})

    def rewind(self, num_turns: int) -> None:
        del self.turns[num_turns:]

    def fork(self, num_turns: int | None = None) -> ChatBranch:
        return replace(self, turns=self.turns[:num_turns])

    reread = fork

    def delete(self) -> None:
        """Nothing is kept."""

    def _messages(self, prompt: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said = {"role": "assistant", "content": turn.answer}
            if turn.thought:
                said["reasoning_content"] = turn.thought
            messages += [{"role": "user", "content": turn.prompt}, said]
        return [*messages, {"role": "user", "content": prompt}]


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of server-sent events: other separators of Unicode stand within a text.

    An empty line may come twice.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = re.split(rb"\r\n|\r|\n", rest + piece)
        yield from lines


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
