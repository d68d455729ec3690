"""OpenAI's ``chat.completion``, whole or in chunks, from the events of its request."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from server.api.completion import DONE, around_list, ended, sse, total_usage
from server.api.errors import error_object
from server.api.openai.chat.schemas import ChatUsage, CompletionDetails
from server.api.openai.chat.tools import Arguments, CallBegins, CallReader, Piece, Text
from server.api.openai.logprobs import JsonList, TokenNames, finite
from server.api.schemas.responses import PromptUsage
from server.api.translate import usage_object, whole_usage
from server.engine.types import Event, Finished, Request, Scored, Started, TokenEvent, Usage
from server.errors import RequestError

Json = dict[str, Any]

#: Pieces of text that are kept before they are joined.
MAX_PIECES = 512


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer has beside the text. ``logprobs`` need ``names``."""

    usage: bool = False
    usage_so_far: bool = False
    may_call: bool = False
    logprobs: bool = False
    names: TokenNames | None = None


class ChoiceWriter:
    """One answer while it comes. What is streamed is not kept: see `keep`."""

    def __init__(self, index: int, may_call: bool) -> None:
        self.index = index
        self.has_begun = False
        self.last: Event | None = None
        self.end: Finished | None = None
        self.logprobs = JsonList()
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._reader = CallReader() if may_call else None

    def read(self, event: TokenEvent) -> list[Json]:
        """The deltas that a token comes to."""
        thought = [{"reasoning_content": event.thought}] if event.thought else []
        return thought + self._push(event.text)

    def _push(self, text: str) -> list[Json]:
        if self._reader is None:
            pieces: list[Piece] = [Text(text)] if text else []
        else:
            pieces = self._reader.push(text)
        return [_delta(piece) for piece in pieces]

    def finish(self, end: Finished) -> list[Json]:
        """The last deltas."""
        self.end = end
        deltas = [{"reasoning_content": end.thought}] if end.thought else []
        deltas += self._push(end.text)
        held = [] if self._reader is None else self._reader.end(end.grammar_ended)
        return deltas + [_delta(piece) for piece in held]

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why it ended; calls that were cut short are none."""
        if self.end is None:
            return None
        called = self._reader is not None and self._reader.is_complete
        return (
            "tool_calls" if called and self.end.finish_reason == "stop" else self.end.finish_reason
        )

    def message(self) -> Json:
        """All that was kept."""
        content = "".join(self._content)
        said = content if content or not (self._calls or self._thoughts) else None
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [_joined(call) for call in self._calls]
        return message

    def keep(self, deltas: list[Json]) -> None:
        """Adds what `read` has returned to the message."""
        for delta in deltas:
            if "reasoning_content" in delta:
                self._thoughts.append(delta["reasoning_content"])
            if "content" in delta:
                self._content.append(delta["content"])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    self._calls.append({"id": call["id"], "name": function["name"], "texts": []})
                self._calls[call["index"]]["texts"].append(function["arguments"])
        for pieces in (self._content, self._thoughts):
            if len(pieces) >= MAX_PIECES:
                pieces[:] = ["".join(pieces)]


class ChatWriter:
    """Writes the answer to ``request``. ``created_s`` is a Unix time, ``digest`` the model's."""

    def __init__(
        self, request: Request, model: str, digest: str, created_s: int, wanted: Wanted
    ) -> None:
        assert request.sampling is not None
        self._wanted = wanted
        self._thinks = request.sampling.turn is not None
        self._num_prompt, self._num_generated = len(request.tokens), 0
        self._choices = {
            id: ChoiceWriter(index, wanted.may_call) for index, id in enumerate(request.ids)
        }
        self._head: Json = {
            "id": request.request_id,
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": f"fp_{digest[:12]}",
            "seed": request.sampling.seed,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._is_plain = not (wanted.may_call or wanted.logprobs or wanted.usage_so_far)
        self._around = {id: self._cut(choice) for id, choice in self._choices.items()}

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        choice = self._choices[event.request_id]
        if isinstance(event, TokenEvent):
            choice.keep(choice.read(event))
            if self._wanted.logprobs:
                choice.logprobs.add(self._logprobs(event))
        elif not isinstance(event, Started | Scored):
            choice.last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer, in parts; raises the `RequestError` that a choice ended by."""
        for choice in self._choices.values():
            assert choice.last is not None
            choice.keep(choice.finish(ended([choice.last])))
        usage = self._usage()
        before, after = around_list({**self._head, "choices": [], "usage": usage}, "choices")
        yield before
        for choice in self._choices.values():
            logprobs = {"content": choice.logprobs.json(), "refusal": None}
            written = {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": logprobs if self._wanted.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            yield (b"," if choice.index else b"") + orjson.dumps(written)
        yield after

    def parts(self, event: Event) -> None:
        """No event makes a large chunk."""

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        choice = self._choices[event.request_id]
        if isinstance(event, TokenEvent):
            if self._is_plain and choice.has_begun and event.thought is None:
                before, after = self._around[event.request_id]
                return b"%b%b%b" % (before, orjson.dumps(event.text), after)
            self._num_generated += 1
            return self._begun(choice) + self._token(choice, event)
        if isinstance(event, Started | Scored):
            return b""
        try:
            deltas = choice.finish(ended([event]))
        except RequestError as error:
            return sse({"error": error_object(error)})
        parts = [self._chunk(choice, delta) for delta in deltas]
        last = self._chunk(choice, {}, finish_reason=choice.finish_reason)
        return self._begun(choice) + b"".join(parts) + last

    def end(self) -> bytes:
        """What comes after the last event of all choices."""
        ends = self._ends()
        if not self._wanted.usage or len(ends) < len(self._choices):
            return DONE
        return sse({**self._chunk_head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> PromptUsage | ChatUsage:
        """That of all choices."""
        total = total_usage(self._ends())
        if not self._thinks:
            return whole_usage(total)
        details: CompletionDetails = {"reasoning_tokens": total.reasoning_tokens}
        usage: ChatUsage = {**whole_usage(total), "completion_tokens_details": details}
        return usage

    def _ends(self) -> list[Finished]:
        return [choice.end for choice in self._choices.values() if choice.end is not None]

    def _begun(self, choice: ChoiceWriter) -> bytes:
        """The first chunk of a choice says whose words follow."""
        if choice.has_begun:
            return b""
        choice.has_begun = True
        content = None if self._wanted.may_call else ""
        return self._chunk(choice, {"role": "assistant", "content": content, "refusal": None})

    def _token(self, choice: ChoiceWriter, event: TokenEvent) -> bytes:
        """At least one chunk, so that a client sees each token; the first has its logprobs."""
        is_silent = self._wanted.may_call or event.thought is not None
        deltas = choice.read(event) or [{} if is_silent else {"content": ""}]
        logprobs = [self._shown(self._logprobs(event)), *(None for _ in deltas[1:])]
        return b"".join(
            self._chunk(choice, delta, shown) for delta, shown in zip(deltas, logprobs, strict=True)
        )

    def _chunk(
        self,
        choice: ChoiceWriter,
        delta: Json,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        shown = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: Json = {**self._chunk_head, "choices": [shown]}
        if self._wanted.usage_so_far:
            chunk["usage"] = usage_object(Usage(self._num_prompt, self._num_generated))
        elif self._wanted.usage:
            chunk["usage"] = None
        return sse(chunk)

    def _cut(self, choice: ChoiceWriter) -> tuple[bytes, bytes]:
        """A token's chunk around its text: the rest is the same for all."""
        before, _, after = self._chunk(choice, {"content": "TEXT"}).rpartition(b'"TEXT"')
        return before, after

    def _logprobs(self, event: TokenEvent) -> list[Json]:
        """Those of a token; one of the thinking, or a special one, is no part of the content."""
        names = self._wanted.names
        if not self._wanted.logprobs or names is None or not names.data(event.token_id):
            return []
        if event.thought is not None and not event.text:
            return []
        tops = [_entry(names, id, logprob) for id, logprob in event.top]
        return [{**_entry(names, event.token_id, event.logprob), "top_logprobs": tops}]

    def _shown(self, logprobs: list[Json]) -> Json | None:
        return {"content": logprobs, "refusal": None} if self._wanted.logprobs else None


def _entry(names: TokenNames, id: int, logprob: float | None) -> Json:
    data = names.data(id)
    return {"token": names[id], "logprob": finite(logprob), "bytes": list(data) if data else None}


def _delta(piece: Piece) -> Json:
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, CallBegins):
        call = {"index": piece.index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": piece.name, "arguments": ""}}]}
    assert isinstance(piece, Arguments), piece
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _joined(call: Json) -> Json:
    function = {"name": call["name"], "arguments": "".join(call["texts"])}
    return {"id": call["id"], "type": "function", "function": function}
