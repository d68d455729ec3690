"""`POST /v1/completions`: one prompt or many, whole or in chunks, with log-probabilities."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any, Literal, NotRequired

import orjson
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answers import JsonAnswer, StreamAnswer, ended, sse
from server.api.errors import error_object
from server.api.events import EpochName
from server.api.openai.bodies import CompletionBody, prompts_in
from server.api.openai.choices import (
    AnswerWriter,
    Columns,
    LegacyLogprobs,
    ScoredPrompt,
    TokenNames,
    WrittenChoice,
    joined,
    prompt_logprobs,
    written_list,
)
from server.api.prepare import drawn_seed, generate_request
from server.api.routing import ERRORS, EVENT_STREAM, body_schema, keyed, service_with
from server.api.schemas.requests import StreamOptions
from server.api.schemas.responses import PromptUsage
from server.api.schemas.wire import body_of
from server.engine.text import TokenArray
from server.engine.types import Event, Finished, Scored, Started, TokenEvent, Usage
from server.engine.types import Request as EngineRequest
from server.errors import RequestError, invalid
from server.models.service import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES, Service

# -------------------------------------------------------------------------------------------------
# What the answer to `POST /v1/completions` says of a prompt and of a choice, as JSON.
#
# Lists of log-probabilities are written in blocks as they come, so that an answer takes
# no more memory than its JSON, and no block takes long.


class LegacyLogprobsAnswer(TypedDict):
    """OpenAI's: of each token its text, its log-probability, those of others, and its place."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(TypedDict):
    """vLLM's; the rank is known of the most probable tokens alone."""

    logprob: float
    rank: int | None
    decoded_token: str


class Choice(TypedDict):
    """A text."""

    index: int
    text: str
    logprobs: LegacyLogprobsAnswer | None
    finish_reason: Literal["stop", "length", "cancelled"]
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """OpenAI's ``text_completion``, with the session, the seed and the position.

    ``position`` is null where there are several prompts, ``seed`` where nothing is generated.
    ``prefix`` is there where it was asked for and the prompt's state is kept.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: PromptUsage
    session: str | None
    seed: int | None
    position: int | None
    prefix: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer has apart from the text.

    ``num`` choices of each prompt. ``names`` are needed for ``logprobs`` and
    ``prompt_logprobs``: so many of the most probable tokens, None for none at all. With
    ``token_ids`` those of the prompt and of the text are shown.
    ``echo`` has the prompts' texts.
    """

    num: int = 1
    options: StreamOptions | None = None
    echo: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    names: TokenNames | None = None

    def legacy(self, offset: int = 0, at_start: bool = False) -> LegacyLogprobs:
        """A writer of ``logprobs``, of a text from its start or of what continues it."""
        assert self.names is not None and self.logprobs is not None, self
        return LegacyLogprobs(self.names, self.logprobs, offset, at_start)


@dataclass(frozen=True, slots=True)
class PromptJson:
    """How likely a prompt was, written once for all of its choices; None where not asked for."""

    columns: Columns | None = None
    ranked: orjson.Fragment | None = None

    @property
    def more(self) -> dict[str, Any]:
        """Fields of a choice."""
        return {} if self.ranked is None else {"prompt_logprobs": self.ranked}


def write_prompt(prompt: ScoredPrompt, shown: Shown) -> Generator[bytes, None, PromptJson]:
    """Returns the prompt's JSON, and yields nothing after each block: others have their turn."""
    columns = Columns() if shown.echo and shown.logprobs is not None else None
    legacy = None if columns is None else shown.legacy(at_start=prompt.begins)
    ranked: list[bytes] = []
    for block in prompt.blocks():
        if columns is not None and legacy is not None:
            columns.add(legacy.of(block.items))
        if shown.prompt_logprobs is not None:
            assert shown.names is not None, shown
            entries = prompt_logprobs(block, shown.names, shown.prompt_logprobs)
            ranked.append(orjson.dumps(entries)[1:-1])
        yield b""
    return PromptJson(columns, joined(ranked) if ranked else None)


class TextChoice(WrittenChoice):
    """One choice of ``request``'s: its text and log-probabilities, as far as they have come.

    The request's first choice also has what is known of its prompt.
    """

    def __init__(self, index: int, request: EngineRequest, echo: str, shown: Shown) -> None:
        self.index, self.request, self.echo = index, request, echo
        #: Where its prompt begins, until a token was drawn after it.
        self.begin: int | None = None
        self.scored: Scored | None = None
        #: The ids of the prompt and of the text, where they are shown.
        self.prompt_ids: Sequence[int] | None = request.tokens if shown.token_ids else None
        self.token_ids: list[int] = []
        self.logprobs = None if shown.logprobs is None else shown.legacy(len(echo))
        self._text = StringIO()
        self._columns = None if shown.logprobs is None else Columns()

    def add(self, event: TokenEvent) -> None:
        """One more token of a whole answer."""
        self._text.write(event.text)
        if self.prompt_ids is not None:
            self.token_ids.append(event.token_id)
        if self.logprobs is not None and self._columns is not None:
            self._columns.add(self.logprobs.of([(event.token_id, event.logprob, event.top)]))

    def whole(self, index: int, prompt: PromptJson) -> dict[str, Any]:
        """All of it, as the answer's choice number ``index``."""
        assert isinstance(self.last, Finished), self.index
        text = self.echo + self._text.getvalue() + self.last.text
        logprobs = None if self._columns is None else self._columns.json(prompt.columns)
        reason = self.last.finish_reason or "length"
        more = prompt.more
        if self.prompt_ids is not None:
            more |= {"prompt_token_ids": [*self.prompt_ids], "token_ids": self.token_ids}
        return choice_json(index, text, reason, logprobs=logprobs, **more)

    @property
    def mean_logprob(self) -> float:
        """Per token."""
        assert isinstance(self.last, Finished), self.index
        return (self.last.logprob_sum or 0.0) / max(1, self.last.usage.completion_tokens)


def choice_json(index: int, text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """OpenAI's choice."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **more}


# -------------------------------------------------------------------------------------------------
# OpenAI's ``text_completion``, whole or in chunks, from the events of its requests.


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
        is_kept = any(request.keep or request.session is not None for request in requests)
        super().__init__(head, choices, shown.options, epoch_name, is_kept)
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


#: Choices of one answer, of all prompts together.
MAX_ANSWER_CHOICES = 1024

OnePrompt = str | list[int]

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=Completion,
    response_model_exclude_unset=True,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(CompletionBody),
)
async def complete(request: Request) -> Response:
    """Generate text: JSON, or server-sent events with stream."""
    body = keyed(request, await body_of(CompletionBody, request))
    service = await service_with(request, body.session, body.model)
    if body.session is not None or body.keep:
        request.state.caller.require("sessions")
    num_top = body.top_logprobs if body.logprobs is None else body.logprobs
    _check(body, num_top)
    prompts = _prompts(body)
    num_drawn, ranked = body.best_of or body.n or 1, (body.best_of or 1) > (body.n or 1)
    # How many others are named in place of each token of the prompt; None: these are not asked.
    asked = (body.prompt_logprobs, num_top if body.echo else None)
    num_scored = max((num for num in asked if num is not None), default=None)
    seed = body.seed  # one for all prompts
    if seed is None:
        seed = drawn_seed(request.state.owner, body.idempotency_key)
    sampling = body.model_copy(update={"seed": seed, "top_logprobs": num_top})
    name, requests = f"cmpl-{secrets.token_hex(16)}", list[EngineRequest]()
    for index, prompt in enumerate(prompts):
        each = await generate_request(
            service,
            name if index == 0 else f"{name}-{index}",
            request.state.owner,
            prompt,
            body,
            sampling,
            num_drawn,
            ranked,
            num_scored,
            prefixed=body,
        )
        requests.append(each)
        if len(prompts) > 1:
            await asyncio.sleep(0)  # others have their turn between the prompts
    # A thread decodes what is repeated.
    shown_of = partial(_shown, service, body, prompts, num_top)
    shown = await asyncio.to_thread(shown_of) if body.echo else shown_of()
    of_prompts, of_texts = _num_bytes(requests, shown)
    num_bytes = of_prompts if body.stream else of_prompts + of_texts
    param = "max_tokens" if of_texts > of_prompts else _of_prompt(body)
    fields = "the prompt, n, max_tokens, logprobs and prompt_logprobs"
    service.large_answers.check(num_bytes, param, fields)
    epoch_name = service.async_engine.epoch_name
    writer = CompletionWriter(requests, service.model.name, int(time.time()), epoch_name, shown)
    if body.stream:  # each choice repeats the prompt, which is written once
        return StreamAnswer(service, requests, writer, of_prompts // shown.num)
    return JsonAnswer(service, requests, writer, num_bytes)


def _num_bytes(requests: Sequence[EngineRequest], shown: Shown) -> tuple[int, int]:
    """What an answer may take for its prompts, and how likely they were; and for its texts."""
    of_token = 0 if shown.logprobs is None else 1 + shown.logprobs
    of_prompt = 0 if shown.prompt_logprobs is None else 1 + shown.prompt_logprobs
    of_prompt += of_token if shown.echo else 0
    per_id = ID_BYTES if shown.token_ids else 0
    num_chars, num_fed = sum(map(len, shown.echo)), sum(len(each.tokens) for each in requests)
    num_drawn = sum(r.num_choices * r.sampling.max_tokens for r in requests if r.sampling)
    return (
        shown.num * (num_chars + num_fed * (of_prompt * LOGPROB_BYTES + per_id)),
        num_drawn * (TOKEN_BYTES + of_token * LOGPROB_BYTES + per_id),
    )


def _of_prompt(body: CompletionBody) -> str:
    """The field that makes most of what an answer says of its prompts."""
    if (body.n or 1) > 1:
        return "n"
    return "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"


def _prompts(body: CompletionBody) -> Sequence[OnePrompt | None]:
    """Each prompt by itself; None where a session continues without one."""
    if body.prompt is None:
        return [None]
    prompts = prompts_in(body.prompt)
    if len(prompts) > 1:
        if body.session is not None or body.keep:
            raise invalid("prompt", "must be one where the session is kept")
        if body.idempotency_key is not None:
            raise invalid("idempotency_key", "is for one prompt: its answer is kept in a session")
        if len(prompts) * (body.best_of or body.n or 1) > MAX_ANSWER_CHOICES:
            raise invalid("n", f"all prompts may have {MAX_ANSWER_CHOICES} choices together")
    return prompts


def _check(body: CompletionBody, num_top: int | None) -> None:
    """Raises `InvalidRequest` for fields that do not go together."""
    body.check(shows_logprobs=(num_top, body.prompt_logprobs) != (None, None))
    num_shown, num_drawn = body.n or 1, body.best_of or body.n or 1
    if body.return_prefix and body.prompt is not None and len(prompts_in(body.prompt)) > 1:
        raise invalid("return_prefix", "names one prompt: give it with one")
    if num_drawn < num_shown:
        raise invalid("best_of", "must be at least n")
    if num_drawn > num_shown and body.stream:
        raise invalid("best_of", "cannot be streamed: all must end before the best are known")
    if num_drawn > 1 and body.max_tokens == 0:
        raise invalid("best_of" if body.n is None else "n", "must be 1 where nothing is generated")
    if body.logprobs is not None and body.top_logprobs not in (None, body.logprobs):
        raise invalid("top_logprobs", "is another name for logprobs: give one of them")


def _shown(
    service: Service,
    body: CompletionBody,
    prompts: Sequence[OnePrompt | None],
    num_top: int | None,
) -> Shown:
    tokenizer = service.tokenizer
    echo: tuple[str, ...] = ()
    if body.echo:
        echo = tuple(p if isinstance(p, str) else tokenizer.decode(p or ()) for p in prompts)
    has_names = (num_top, body.prompt_logprobs) != (None, None)
    return Shown(
        num=body.n or 1,
        options=body.stream_options,
        echo=echo,
        logprobs=num_top,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        names=TokenNames(tokenizer) if has_names else None,
    )
