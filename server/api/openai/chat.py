"""`POST /v1/chat/completions`: messages by the model's template, and calls of functions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from model.chat import CallForm
from server.api.answers import JsonAnswer, StreamAnswer, drafted, ended, sse, total_usage
from server.api.chat.calls import Arguments, CallBegins, Text, ToolChoice
from server.api.chat.messages import MAX_PARTS, Messages, TemplateKwargs, TextPart, Tools
from server.api.chat.prepare import Chat, Effort, prepared
from server.api.chat.reader import AnswerPiece, AnswerReader, Thought, WholeAnswer, WholeCall
from server.api.errors import error_object
from server.api.events import EpochName
from server.api.openai.bodies import CHAT, GenerationBody, with_usual_thinking
from server.api.openai.choices import (
    AnswerWriter,
    Json,
    JsonList,
    TokenNames,
    WrittenChoice,
    finite,
    written_list,
)
from server.api.routing import ERRORS, EVENT_STREAM, body_schema, keyed, service_with
from server.api.schemas.requests import SomeTokens, StreamOptions
from server.api.schemas.responses import CompletionDetails, PromptUsage
from server.api.schemas.wire import Refusal, Wire, body_of
from server.engine.types import Event, Finished, Scored, Started, TokenEvent, Usage
from server.engine.types import Request as EngineRequest
from server.errors import RequestError, invalid
from server.models.service import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES, ModelInfo


class Prediction(Wire):
    """What most of the answer is expected to be: what of it is right is generated faster."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """All of it."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[Mapping[str, Refusal]] = CHAT

    messages: Messages
    max_completion_tokens: SomeTokens | None = None
    logprobs: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Effort | None = None
    prediction: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def _usual_thinking(cls, value: object) -> object:
        return with_usual_thinking(value)


class ChatTop(TypedDict):
    """A token that was likely; ``bytes`` are what it stands for."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatTop):
    """A token that was drawn."""

    top_logprobs: list[ChatTop]


class ChatLogprobs(TypedDict):
    """How likely the tokens of an answer were."""

    content: list[ChatToken]
    refusal: None


class CalledFunctionAnswer(TypedDict):
    """What to call; ``arguments`` is JSON that conforms to the function's schema."""

    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    """A call that the client may make for the model."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class ChatMessageAnswer(TypedDict):
    """What the assistant says, or calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    refusal: None
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled"]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """OpenAI's ``chat.completion``, with the seed, and of a kept session its name and length."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: PromptUsage
    seed: int
    session: NotRequired[str]
    position: NotRequired[int]
    prompt_token_ids: NotRequired[list[int]]


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
        request: EngineRequest,
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


router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    response_model_exclude_unset=True,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(ChatBody),
)
async def chat(request: Request) -> Response:
    """Answer messages: JSON, or server-sent events with stream."""
    body = keyed(request, await body_of(ChatBody, request))
    service = await service_with(request, body.session, body.model)
    if body.session is not None or body.keep:
        request.state.caller.require("sessions")
    _check(body)
    made = await prepared(service, request.state.owner, _chat(body))
    num_bytes = 0 if body.stream else _num_bytes(body, made.request)
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    service.large_answers.check(num_bytes, param, f"n, {param} and top_logprobs")
    names, now = TokenNames(service.tokenizer) if body.logprobs else None, int(time.time())
    writer = ChatWriter(
        made.request,
        service.model,
        now,
        body.stream_options,
        made.calls,
        names,
        service.async_engine.epoch_name,
        bool(body.return_token_ids),
    )
    if body.stream:
        return StreamAnswer(service, made.request, writer)
    return JsonAnswer(service, made.request, writer, num_bytes)


def _num_bytes(body: ChatBody, engine_request: EngineRequest) -> int:
    """What an answer may take."""
    assert engine_request.sampling is not None
    num_entries = 1 + (body.top_logprobs or 0) if body.logprobs else 0
    per_id = ID_BYTES if body.return_token_ids else 0
    per_token = TOKEN_BYTES + num_entries * LOGPROB_BYTES + per_id
    of_prompt = len(engine_request.tokens) * per_id
    return of_prompt + engine_request.num_choices * engine_request.sampling.max_tokens * per_token


def _check(body: ChatBody) -> None:
    """Raises `InvalidRequest` for fields that do not go together."""
    body.check(shows_logprobs=bool(body.logprobs))
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if body.max_completion_tokens is not None and body.max_tokens not in (
        None,
        body.max_completion_tokens,
    ):
        raise invalid("max_tokens", "is another name for max_completion_tokens: give one of them")


def _chat(body: ChatBody) -> Chat:
    is_renamed = body.max_completion_tokens is not None
    return Chat(
        id=f"chatcmpl-{secrets.token_hex(16)}",
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.response_format,
        drawing=body,
        wanted=body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n or 1,
        with_logprobs=bool(body.logprobs),
        effort=body.reasoning_effort,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        prediction=None if body.prediction is None else body.prediction.text,
        names={"max_tokens": "max_completion_tokens"} if is_renamed else {},
    )
