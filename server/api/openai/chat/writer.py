"""OpenAI's ``chat.completion``, whole or in chunks, from the events of its request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from model.chat.call_forms import CallForm
from server.api.answers import drafted, ended, sse, total_usage
from server.api.chat.calls import Arguments, CallBegins, Text
from server.api.chat.reader import AnswerPiece, AnswerReader, Thought, WholeAnswer, WholeCall
from server.api.errors import error_object
from server.api.events import EpochName
from server.api.openai.choices import (
    AnswerWriter,
    Json,
    JsonList,
    TokenNames,
    WrittenChoice,
    finite,
    written_list,
)
from server.api.schemas.requests import StreamOptions
from server.api.schemas.responses import CompletionDetails
from server.engine.types import Event, Finished, Request, Scored, Started, TokenEvent, Usage
from server.errors import RequestError
from server.models.service import ModelInfo


class WrittenChatChoice(WrittenChoice):
    """One answer while it comes. What is streamed is not kept: see `keep`."""

    def __init__(self, index: int, calls: CallForm | None) -> None:
        self.index = index
        self.has_begun = False
        self.logprobs = JsonList()
        self.token_ids: list[int] = []
        #: What a chunk to come has of tokens that made none.
        self.unshown: Json = {}
        self.reader = AnswerReader(calls)
        self._answer = WholeAnswer(self.reader)

    def read(self, event: TokenEvent) -> list[AnswerPiece]:
        """What a token adds."""
        return self.reader.read(event)

    def finish(self, end: Finished) -> list[AnswerPiece]:
        """What the end adds."""
        self.last = end
        return self.reader.finish(end)

    def delta(self, piece: AnswerPiece) -> Json:
        """OpenAI's ``delta`` of a piece; one with a call's name is asked for once."""
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text}
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, CallBegins):
            id = f"call_{self.reader.new_call_id(piece.index)}"
            call = {"index": piece.index, "id": id, "type": "function"}
            return {"tool_calls": [{**call, "function": {"name": piece.name, "arguments": ""}}]}
        assert isinstance(piece, Arguments), piece
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why it ended; a call that was cut short does not count."""
        assert isinstance(self.last, Finished), self.index
        reason = self.last.finish_reason
        return "tool_calls" if self.reader.has_called and reason == "stop" else reason

    def message(self) -> Json:
        """All that was kept."""
        content, thoughts = self._answer.text, self._answer.thoughts
        calls = self._answer.calls
        said = content if content or not (calls or thoughts) else None
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return message

    def keep(self, pieces: list[AnswerPiece]) -> None:
        """Adds what `read` has returned to the message."""
        self._answer.add(pieces)


class ChatWriter(AnswerWriter[WrittenChatChoice]):
    """Writes the answer to ``request`` of ``model``. ``created_s`` is a Unix time.

    It may be calls in the form ``calls``. It has log-probabilities where there are ``names``. A
    token without text makes no chunk, and of several the last one has its SSE id. With
    ``token_ids`` those of the prompt and of the choices are shown.
    """

    def __init__(
        self,
        request: Request,
        model: ModelInfo,
        created_s: int,
        options: StreamOptions | None = None,
        calls: CallForm | None = None,
        names: TokenNames | None = None,
        epoch_name: EpochName = "-{}".format,
        token_ids: bool = False,
    ) -> None:
        assert request.sampling is not None
        head: Json = {
            "id": request.request_id,
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model.name,
            "system_fingerprint": f"fp_{model.digest[:12]}",
            "seed": request.sampling.seed,
        }
        choices = {id: WrittenChatChoice(index, calls) for index, id in enumerate(request.ids)}
        is_kept = request.keep or request.session is not None
        super().__init__(head, choices, options, epoch_name, is_kept)
        self._may_call, self._names = calls is not None, names
        self._prompt_ids = request.tokens if token_ids else None
        self._thinks = request.sampling.turn is not None
        self._is_predicted = bool(request.prediction)
        self._so_far = Usage(len(request.tokens), 0)
        self._is_plain = not (calls or names is not None or token_ids or self._shows_so_far)

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        choice = self._choices[event.request_id]
        if isinstance(event, TokenEvent):
            choice.keep(choice.read(event))
            if self._prompt_ids is not None:
                choice.token_ids.append(event.token_id)
            if self._names is not None:
                choice.logprobs.add(self._logprobs(event))
        elif isinstance(event, Started):
            self._start(choice, event)
        elif not isinstance(event, Scored):
            choice.last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer, in parts; raises the `RequestError` that a choice ended by."""
        for choice in self._choices.values():
            assert choice.last is not None, choice.index
            choice.keep(choice.finish(ended(choice.last)))
        summary = {**self._summary(), "object": "chat.completion"}
        if self._prompt_ids is not None:
            summary["prompt_token_ids"] = [*self._prompt_ids]
        return written_list(summary, "choices", map(self._written, self._choices.values()))

    def _written(self, choice: WrittenChatChoice) -> bytes:
        logprobs = {"content": choice.logprobs.json(), "refusal": None}
        ids = {} if self._prompt_ids is None else {"token_ids": choice.token_ids}
        return orjson.dumps(
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": logprobs if self._names is not None else None,
                "finish_reason": choice.finish_reason,
                **ids,
            }
        )

    def _summary(self) -> Json:
        summary = super()._summary()
        usage, details = total_usage(self._ends), CompletionDetails()
        if self._thinks:
            details["reasoning_tokens"] = usage.reasoning_tokens
        if self._is_predicted or usage.accepted_tokens or usage.rejected_tokens:
            details |= drafted(usage)
        if details:
            summary["usage"]["completion_tokens_details"] = details
        if self._is_kept:
            end = self._ends[0]
            summary |= {"session": end.session, "position": end.position}
        return summary

    def _start(self, choice: WrittenChatChoice, event: Started) -> None:
        if self._is_kept:
            choice.reader.start(event)
            self._id = f"{self._epoch_name(event.epoch)}:".encode()

    def token(self, event: TokenEvent) -> bytes:
        """The server-sent events for one token."""
        choice = self._choices[event.request_id]
        if self._is_plain and choice.has_begun and event.thought is None:
            if not event.text:
                return b""
            if not choice.around:
                chunk = self._chunk(_choice(choice, {"content": "TEXT"}))
                before, _, after = chunk.rpartition(b'"TEXT"')
                choice.around = before, after
            before, after = choice.around
            id = b"id: %b%d\n" % (self._id, event.seq) if self._id else b""
            return b"%b%b%b%b" % (id, before, orjson.dumps(event.text), after)
        so_far = self._so_far
        self._so_far = Usage(so_far.prompt_tokens, so_far.completion_tokens + 1)
        return self._begun(choice) + self._detailed(choice, event)

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine; none makes large ones."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        choice = self._choices[event.request_id]
        if isinstance(event, Scored):
            return b""
        if isinstance(event, Started):
            self._start(choice, event)
            place = {"session": event.session, "position": event.position}
            return self._begun(choice, **place) if self._is_kept else b""
        try:
            end = ended(event)
            pieces = choice.finish(end)
        except RequestError as error:
            return sse({"error": error_object(error)})
        parts = [self._chunk(_choice(choice, choice.delta(piece))) for piece in pieces]
        more = {"session": end.session, "position": end.position} if self._is_kept else {}
        written = _choice(choice, {}, choice.finish_reason) | choice.unshown
        last = self._chunk(written, self._sse_id(end.seq), **more)
        return self._begun(choice) + b"".join(parts) + last

    def _begun(self, choice: WrittenChatChoice, **more: Any) -> bytes:
        """The first chunk of a choice says whose words follow."""
        if choice.has_begun:
            return b""
        choice.has_begun = True
        content = None if self._may_call else ""
        delta = {"role": "assistant", "content": content, "refusal": None}
        if self._prompt_ids is not None:
            more["prompt_token_ids"] = [*self._prompt_ids]
        return self._chunk(_choice(choice, delta), **more)

    def _detailed(self, choice: WrittenChatChoice, event: TokenEvent) -> bytes:
        """A chunk for each delta; the first has the logprobs of the tokens since the one before."""
        unshown = choice.unshown
        if self._prompt_ids is not None:
            unshown.setdefault("token_ids", []).append(event.token_id)
        if self._names is not None:
            shown = unshown.setdefault("logprobs", {"content": [], "refusal": None})
            shown["content"] += self._logprobs(event)
        written = [_choice(choice, choice.delta(piece)) for piece in choice.read(event)]
        if not written:
            return b""
        written[0] |= unshown
        choice.unshown = {}
        *others, last = written
        chunks = [*map(self._chunk, others), self._chunk(last, self._sse_id(event.seq))]
        return b"".join(chunks)

    def _logprobs(self, event: TokenEvent) -> list[Json]:
        """Those of a token; empty for a token of the thinking or a special token."""
        names = self._names
        if names is None or not names.tokenizer.token_bytes(event.token_id):
            return []
        if event.thought is not None and not event.text:
            return []
        tops = [_entry(names, id, logprob) for id, logprob in event.top]
        return [{**_entry(names, event.token_id, event.logprob), "top_logprobs": tops}]


def _choice(choice: WrittenChatChoice, delta: Json, finish_reason: str | None = None) -> Json:
    """OpenAI's choice of a chunk."""
    return {
        "index": choice.index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def _entry(names: TokenNames, id: int, logprob: float | None) -> Json:
    data = names.tokenizer.token_bytes(id)
    return {"token": names[id], "logprob": finite(logprob), "bytes": list(data) if data else None}


def _call(call: WholeCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments.getvalue()}
    return {"id": f"call_{call.id}", "type": "function", "function": function}
