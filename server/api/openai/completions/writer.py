"""OpenAI's ``text_completion``, whole or in chunks, from the events of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from server.api.completion import ended, sse
from server.api.errors import error_object
from server.api.frames import EpochName
from server.api.openai.completions.parts import (
    PromptJson,
    Shown,
    TextChoice,
    choice_json,
    write_prompt,
)
from server.api.openai.logprobs import ScoredPrompt
from server.api.openai.writer import AnswerWriter, written_list
from server.engine.token_ids import TokenArray
from server.engine.types import Event, Finished, Scored, Started, TokenEvent, Usage
from server.engine.types import Request as EngineRequest
from server.errors import RequestError

TEXT = Shown()


class CompletionWriter(AnswerWriter[TextChoice]):
    """Writes the answer to ``requests``, one of each prompt. ``created_s`` is a Unix time.

    Choices are numbered prompt by prompt. Where more are drawn than shown, the most probable are
    shown.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        model: str,
        created_s: int,
        epoch_name: EpochName = "-{}".format,
        shown: Shown = TEXT,
    ) -> None:
        first, echoes = requests[0], shown.echo or ("",) * len(requests)
        head = {
            "id": first.request_id,
            "object": "text_completion",
            "created": created_s,
            "model": model,
            "choices": [],
            "session": None,
            "seed": first.sampling.seed if first.sampling is not None else None,
            "position": None,
        }
        choices: dict[str, TextChoice] = {}
        for request, echo in zip(requests, echoes, strict=True):
            for id in request.ids:
                choices[id] = TextChoice(len(choices), request, echo, shown)
        super().__init__(head, choices, shown.options, epoch_name)
        self._requests, self._shown = requests, shown
        self._is_plain = not (shown.logprobs is not None or shown.token_ids or self._shows_so_far)

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        choice = self._choices[event.request_id]
        if isinstance(event, TokenEvent):
            choice.add(event)
        elif isinstance(event, Scored):
            choice.scored = event
        elif isinstance(event, Started):
            self._begin_prompt(choice, event)
        else:
            choice.last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer, in parts. Raises the `RequestError` that a request ended by."""
        for choice in self._choices.values():
            assert choice.last is not None, choice.index
            ended(choice.last)
        return written_list(self._summary(), "choices", self._written())

    def _written(self) -> Iterator[bytes]:
        num_written = 0
        for request in self._requests:
            choices, prompt = [self._choices[id] for id in request.ids], PromptJson()
            if (scored := _scored_prompt(choices[0])) is not None:
                prompt = yield from write_prompt(ScoredPrompt.of(request, scored), self._shown)
            if len(choices) > self._shown.num:
                choices.sort(key=lambda choice: choice.mean_logprob, reverse=True)
            for choice in choices[: self._shown.num]:
                yield orjson.dumps(choice.whole(num_written, prompt))
                num_written += 1

    def _summary(self) -> dict[str, Any]:
        first = self._ends[0]
        position = first.position if len(self._requests) == 1 else None
        about = {"session": first.session, "position": position, **_handle(first)}
        return {**super()._summary(), **about}

    # In chunks

    def token(self, event: TokenEvent) -> bytes:
        """The server-sent event for one token."""
        choice = self._choices[event.request_id]
        if not self._is_plain:
            return self._detailed(choice, event)
        if not choice.around:
            chunk = self._chunk(choice_json(choice.index, "TEXT"), position=1)
            head, _, after = chunk.rpartition(b"1")
            before, _, between = head.rpartition(b'"TEXT"')
            choice.around = before, between, after
        before, between, after = choice.around
        text = orjson.dumps(event.text)
        id = b"id: %b%d\n" % (self._id, event.seq) if self._id else b""
        return b"%b%b%b%b%d%b" % (id, before, text, between, event.position, after)

    def chunks(self, event: Event) -> bytes | Iterator[bytes]:
        """The server-sent events for one event; in parts where it tells of each prompt token."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        choice = self._choices[event.request_id]
        if isinstance(event, Started):
            return self._started(choice, event)
        if isinstance(event, Scored):
            return self._scored(choice, event, (choice.begin or 0) + len(event.token_ids))
        if isinstance(event, Finished) and event.finish_reason is None and choice.request.score:
            self._end(choice, event)
            return self._scored(choice, event, event.position)
        try:
            last = ended(event)
        except RequestError as error:
            return sse({"error": error_object(error)})
        self._end(choice, last)
        written = choice_json(choice.index, last.text, last.finish_reason or "length")
        if self._shown.token_ids:
            written["token_ids"] = []
        sse_id = self._sse_id(last.seq)
        place = {"session": last.session, "position": last.position}
        return self._chunk(written, sse_id, **place, **_handle(last))

    def _started(self, choice: TextChoice, event: Started) -> bytes | Iterator[bytes]:
        """The prompt's text; for a kept session a chunk that names it, with text or without.

        In parts where it repeats the prompt for each of its choices.
        """
        request, choice.begin = choice.request, event.position
        if event.request_id != request.request_id:
            return b""  # a copy, after the prompt
        is_kept = request.keep or request.session is not None
        if is_kept:
            self._id = f"{self._epoch_name(event.epoch)}:".encode()
        echo = "" if request.score else choice.echo
        self._begin_prompt(choice, event)
        ids: dict[str, Any] = {}
        if choice.prompt_ids is not None:
            ids = {"prompt_token_ids": [*choice.prompt_ids], "token_ids": []}
        if not is_kept and not echo and not ids:
            return b""
        chunks = (
            self._chunk(
                choice_json(self._choices[id].index, echo, **ids),
                session=event.session,
                position=event.position,
            )
            for id in request.ids
        )
        return chunks if echo or ids else b"".join(chunks)

    def _scored(
        self, choice: TextChoice, event: Scored | Finished, position: int
    ) -> Iterator[bytes]:
        """The prompt, as far as it is shown, and how likely it was, for each of its choices."""
        prompt = yield from write_prompt(ScoredPrompt.of(choice.request, event), self._shown)
        more = prompt.more
        if prompt.columns is not None:
            more["logprobs"] = prompt.columns.json()
        text, reason, session = choice.echo, None, None
        sse_id: bytes | None = None
        if isinstance(event, Finished):
            text, reason, session = text + event.text, "length", event.session
            sse_id = self._sse_id(event.seq)
        for one in map(self._choices.__getitem__, choice.request.ids):
            written = choice_json(one.index, text, reason, **more)
            yield self._chunk(written, sse_id, session=session, position=position)

    def _detailed(self, choice: TextChoice, event: TokenEvent) -> bytes:
        """A token's chunk with its log-probabilities, or with the usage so far."""
        written = choice_json(choice.index, event.text)
        if self._shown.token_ids:
            written["token_ids"] = [event.token_id]
        if choice.logprobs is not None:
            written["logprobs"] = choice.logprobs.of([(event.token_id, event.logprob, event.top)])
        fed = 0 if choice.begin is None else event.position - choice.begin
        choice.begin = None  # a prompt counts once its first token has been drawn
        so_far = self._so_far
        self._so_far = Usage(so_far.prompt_tokens + fed, so_far.completion_tokens + 1)
        return self._chunk(written, self._sse_id(event.seq), position=event.position)

    def _begin_prompt(self, choice: TextChoice, event: Started) -> None:
        """The ids of the prompt are those that are fed, for all choices of its request."""
        if event.request_id != choice.request.request_id:
            return  # a copy, after the prompt
        for one in map(self._choices.__getitem__, choice.request.ids):
            if one.prompt_ids is not None:
                one.prompt_ids = TokenArray.joined(event.start, choice.request.tokens)

    def _end(self, choice: TextChoice, last: Finished) -> None:
        choice.last = last
        if choice.request.sampling is None:
            self._so_far = Usage(self._so_far.prompt_tokens + last.usage.prompt_tokens, 0)


def _handle(last: Finished) -> dict[str, str]:
    """The prompt's, where there is one."""
    return {} if last.prefix is None else {"prefix": last.prefix}


def _scored_prompt(choice: TextChoice) -> Scored | Finished | None:
    """What says how likely the prompt was; nothing where its request ended before."""
    if not choice.request.score or choice.request.sampling is not None:
        return choice.scored
    return choice.last if isinstance(choice.last, Finished) else None
