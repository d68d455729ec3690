"""From the body of a response to the engine's request, with the session that it continues from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.chat import TAGGED
from server.api.chat.calls import (
    AllowedFunction,
    AllowedFunctions,
    AllowedToolChoice,
    ChosenFunction,
    NamedToolChoice,
    ToolChoice,
    ToolUse,
    tool_use,
)
from server.api.chat.messages import FunctionDefinition, FunctionTool, tool_object
from server.api.chat.prepare import Effort, reasoning_of, sampling_of, turn_of
from server.api.chat.prompt import Prompt
from server.api.openai.responses.events import ResponseWriter
from server.api.openai.responses.items import (
    LOGPROBS,
    Json,
    NamedSchema,
    Note,
    ResponseAllowedTools,
    ResponsesBody,
    ResponseToolChoice,
    id_under_key,
    input_items,
    new_id,
)
from server.api.openai.responses.items import ToolChoice as ResponseToolChoiceField
from server.api.openai.responses.stored import (
    Answer,
    FindTurn,
    PreviousNotFound,
    ResponseNotFound,
    ResponseTurn,
    StoredResponse,
    TurnInput,
    find,
    has_references,
    history,
    referred,
    what_follows,
    whole_prompt,
)
from server.api.prepare import Conversation, generate_request, renamed
from server.api.schemas.requests import Continuation, JsonSchema, JsonSchemaFormat, ResponseFormat
from server.engine.types import Finished, Request, TokenEvent
from server.errors import InvalidRequest, RequestError, SessionNotFound, invalid
from server.models.service import Service
from server.runtime.readers import Sink
from server.sessions.sessions import KeyInUse

# -------------------------------------------------------------------------------------------------
# What a body says of the answer: sampling, format and tools, and what is echoed of it.


def check(body: ResponsesBody) -> None:
    """Raises `InvalidRequest` for fields that do not go together."""
    if body.state is not None and body.previous_response_id is not None:
        raise invalid("state", "is what a conversation begins with: that one has begun")
    if body.background and body.store is False:
        raise invalid("background", "needs store to be true")
    if body.idempotency_key is not None and body.store is False:
        raise invalid("idempotency_key", "needs store to be true")
    if body.top_logprobs and not wants_logprobs(body):
        raise invalid("top_logprobs", "needs include to have message.output_text.logprobs")


def effort_of(body: ResponsesBody) -> Effort | None:
    """How much the model is to think; None where the body does not say."""
    return None if body.reasoning is None else body.reasoning.effort


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the output is to show them."""
    return LOGPROBS in (body.include or ())


def _chat_tools(body: ResponsesBody) -> list[FunctionTool]:
    """Tools as chats and their templates have them."""
    return [
        FunctionTool(
            type="function",
            function=FunctionDefinition(**tool.model_dump(exclude={"type"}, exclude_unset=True)),
        )
        for tool in body.tools or ()
    ]


def tools_of(service: Service, body: ResponsesBody) -> ToolUse:
    """What tools and format come to. Raises `InvalidRequest` where they do not go together."""
    tools, choice = _chat_tools(body), body.tool_choice
    chosen = _chat_choice(choice)
    return tool_use(tools, chosen, body.parallel_tool_calls, _format(body), service.chat_template)


def _chat_choice(choice: ResponseToolChoiceField | None) -> ToolChoice:
    """``choice`` as chats have it."""
    if isinstance(choice, ResponseToolChoice):
        return NamedToolChoice(type="function", function=ChosenFunction(name=choice.name))
    if isinstance(choice, ResponseAllowedTools):
        names = [ChosenFunction(name=tool.name) for tool in choice.tools]
        tools = [AllowedFunction(type="function", function=name) for name in names]
        allowed = AllowedFunctions(mode=choice.mode, tools=tools)
        return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return choice or "auto"


def _format(body: ResponsesBody) -> ResponseFormat | None:
    """The format as chats have it."""
    wanted = body.text.format if body.text is not None else None
    if not isinstance(wanted, NamedSchema):
        return wanted
    schema = JsonSchema(**wanted.model_dump(exclude={"type"}, exclude_unset=True))
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


#: The names that fields of the engine and of chats have here; calls of tools are a format, too.
_OURS = {
    "response_format": "text",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}


def in_our_words(error: InvalidRequest, body: ResponsesBody) -> InvalidRequest:
    """``error`` with the names that the fields have here."""
    is_format = body.text is not None and body.text.format is not None
    return renamed(error, _OURS if is_format else {**_OURS, "response_format": "tools"})


def echoed_fields(service: Service, body: ResponsesBody, limit: int, seed: int) -> Json:
    """What of the response object never changes."""
    given = body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)

    def echo(*names: str) -> Json:
        return {name: given.get(name) for name in names}

    named = echo("instructions", "previous_response_id", "prompt_cache_key", "safety_identifier")
    return {
        "created_at": int(time.time()),
        "model": service.model.name,
        "max_tool_calls": None,
        "service_tier": "default",
        **named,
        "background": bool(body.background),
        "store": body.store is not False,
        "max_output_tokens": limit,
        "metadata": given.get("metadata", {}),
        "reasoning": {"effort": effort_of(body), "summary": None},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": given.get("temperature", service.model.sampling.temperature),
        "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": given.get("top_p", service.model.sampling.top_p),
        "truncation": given.get("truncation", "disabled"),
        "user": given.get("user"),
        "seed": seed,
    }


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A response that is about to be made: `begin` it, and `end` it in any case.

    ``source`` is the response whose session it continues from. ``once``: it is asked
    for under the client's own key.
    """

    service: Service
    note: Note
    request: Request
    source: StoredResponse | None = None
    once: bool = False

    @property
    def is_stored(self) -> bool:
        return self.request.keep

    @property
    def is_in_background(self) -> bool:
        return bool(self.note.fields["background"])

    def writer(self, after: int = -1) -> ResponseWriter:
        return ResponseWriter(self.note, self.service.tokenizer, after)

    async def begin(self, sink: Sink) -> PreparedResponse:
        """Starts it; its events go to ``sink``. Returns it with its session's name, if it has one.

        A session that was made for it and has not been used is gone again.
        """
        if self.source is None:
            await self._submit(sink)
            return self
        session = await self._branched(self.source)
        begun = replace(self, request=replace(self.request, session=session))
        try:
            await begun._submit(sink)
        except BaseException:
            await begun.forget()
            raise
        return begun

    async def _branched(self, source: StoredResponse) -> str:
        """A session of its own; gone again where the caller leaves meanwhile."""
        branching = asyncio.ensure_future(_branch(source))
        try:
            return await asyncio.shield(branching)
        except asyncio.CancelledError:
            with contextlib.suppress(RequestError):
                session = await branching
                await replace(self, request=replace(self.request, session=session)).forget()
            raise

    async def _submit(self, sink: Sink) -> None:
        sessions = self.service.sessions
        if not self.once:
            await sessions.submit(self.request, sink)
        elif await self.service.keys.submit_once(self.request, sink) is not None:
            raise KeyInUse  # begun by another while this one was read

    async def end(self) -> None:
        """Deletes what was not to be stored."""
        if not self.is_stored and self.request.session is not None:
            await self.forget()

    async def forget(self) -> None:
        """Deletes the session that was made for it."""
        assert self.request.session is not None
        with contextlib.suppress(RequestError):
            await self.service.sessions.delete(self.request.session, self.request.owner)


def needs_sessions(body: ResponsesBody) -> bool:
    """Whether ``body`` reads or writes what is stored: its key needs the scope for that."""
    continues = body.previous_response_id is not None
    return body.store is not False or continues or has_references(body.input)


async def prepare(
    service: Service, owner: str, body: ResponsesBody, find_previous: FindTurn
) -> PreparedResponse:
    """What ``body`` asks for. Raises `RequestError`."""
    check(body)
    is_stored = body.store is not False
    id = new_id()
    if body.idempotency_key is not None:
        id = response_of_key(service, owner, body.idempotency_key)
    try:
        found = await referred(find_previous, body.input)
        # Whatever goes through all items or tools is for a thread: there may be many.
        use, described = await asyncio.to_thread(_tool_use, service, body)
        reasoning = reasoning_of(service, effort_of(body), "reasoning.effort")
        items = await asyncio.to_thread(input_items, body.input, id, found)
        if not items:
            raise invalid("input", "has nothing that the model reads")
        variables = {**reasoning.variables, **use.variables}
        turn_input = TurnInput(items, body.instructions, use.shown, described, variables)
        prompt, source, state = await _prompt(service, owner, turn_input, body, find_previous)
        turn, added = turn_of(service, prompt.end, reasoning, use.format, bool(body.ignore_eos))
        sampling = sampling_of(
            service, body, use.format, body.max_output_tokens, wants_logprobs(body)
        )
        wanted = Continuation.model_construct(
            keep=is_stored, state=state if source is None else None
        )
        prompt_ids = [*prompt.ids, *added]
        conversation = Conversation("input", turn, prompt.cache_at)
        request = await generate_request(
            service, id, owner, prompt_ids, wanted, sampling, conversation=conversation
        )
    except InvalidRequest as error:
        raise in_our_words(error, body) from None
    assert request.sampling is not None
    limit, seed = request.sampling.max_tokens, request.sampling.seed
    fields = await asyncio.to_thread(echoed_fields, service, body, limit, seed)
    apart = turn is not None and turn.prompted != ""
    note = Note(
        id,
        fields,
        [*turn_input.items],
        [*turn_input.described],
        use.calls is not None,
        wants_logprobs(body),
        apart,
        state,
        (use.calls or TAGGED).name,
        request.tokens if body.return_token_ids else None,
        _must_call(service, use.variables),
    )
    fields_of_size = "max_output_tokens and top_logprobs"
    service.large_answers.check(note.num_bytes, "max_output_tokens", fields_of_size)
    if is_stored:
        request = replace(request, key=id, note=note.packed(), unattended=True)
    return PreparedResponse(service, note, request, source, body.idempotency_key is not None)


def _tool_use(service: Service, body: ResponsesBody) -> tuple[ToolUse, list[Json]]:
    """What tools and format come to, and the tools as a template reads them."""
    use = tools_of(service, body)
    return use, [tool_object(tool) for tool in use.shown]


def response_of_key(service: Service, owner: str, key: str) -> str:
    """The id of the response that ``owner`` asks for under its own ``key``."""
    store = service.async_engine.epoch_name(0).removesuffix("-0")
    return id_under_key(store, owner, key)


def stored_previous(service: Service, owner: str) -> FindTurn:
    """Finds what is stored, and has ended."""

    async def find_previous(id: str) -> ResponseTurn:
        kept = await find([service], owner, id)
        end = kept.keyed.finished
        if end is None:
            raise invalid("previous_response_id", "names a response that has not ended")
        if end.finish_reason == "error":
            raise invalid("previous_response_id", "names a response that failed")
        return ResponseTurn(kept.note, kept.output, kept)

    return find_previous


async def _prompt(
    service: Service,
    owner: str,
    turn_input: TurnInput,
    body: ResponsesBody,
    find_previous: FindTurn,
) -> tuple[Prompt, StoredResponse | None, str | None]:
    """What is to be read, and the response after whose session's text it comes.

    And the named state that the conversation begins with.
    """
    previous_id = body.previous_response_id
    if previous_id is None:
        return await whole_prompt(service, owner, turn_input), None, body.state
    try:
        previous = await find_previous(previous_id)
    except ResponseNotFound:
        raise PreviousNotFound(previous_id) from None
    state = previous.note.state
    if previous.kept is not None and _can_continue(turn_input, previous.kept):
        following = await what_follows(service, turn_input, await _answer(previous.kept))
        if following is not None:
            return following, previous.kept, state
    before = await history(find_previous, previous)
    return await whole_prompt(service, owner, turn_input, before), None, state


def _can_continue(turn_input: TurnInput, kept: StoredResponse) -> bool:
    """Whether the model was told the same before, and has read all that it was asked.

    Past thinking is for the template, which most often leaves it out: no state can forget it.
    """
    end, note = kept.keyed.finished, kept.note
    if note.apart or (end is not None and end.usage.reasoning_tokens):
        return False
    if end is None or (end.finish_reason == "cancelled" and not end.usage.completion_tokens):
        return False
    described = [*turn_input.described]
    told = (turn_input.instructions, described, _must_call(kept.service, turn_input.variables))
    return told == (note.fields["instructions"], note.tools, note.must_call)


def _must_call(service: Service, variables: Mapping[str, Any]) -> bool:
    """Whether the template tells the model that it must call; most have no words for that."""
    return "tool_choice" in variables and "tool_choice" in service.chat_template.of(with_tools=True)


async def _answer(kept: StoredResponse) -> Answer:
    """The answer of a response that has ended, with its text where texts end the model's turns."""
    end = kept.keyed.finished
    assert end is not None, kept.note.id
    with_text = bool(kept.service.chat_template.turns.ends)
    seq = kept.keyed.first_seq if with_text else max(kept.keyed.first_seq, end.seq - 2)
    tokens: list[int] = []
    texts: list[str] = []
    while seq < end.seq and (events := await kept.events(seq)):
        tokens += (event.token_id for event in events if isinstance(event, TokenEvent))
        texts += (event.text for event in events)
        seq = events[-1].seq
    return Answer(tokens, "".join(texts) if with_text else None)


async def _branch(source: StoredResponse) -> str:
    """A session like that of ``source`` was when its response had ended."""
    sessions, owner = source.service.sessions, source.owner
    session, end = source.keyed.session, source.keyed.finished
    assert isinstance(end, Finished), source.note.id
    try:
        (fork,) = await sessions.fork(session, owner, 1, None)
        if fork.position != end.position:  # it has continued by itself since
            await sessions.delete(fork.session, owner)
            (fork,) = await sessions.fork(session, owner, 1, end.position)
    except SessionNotFound:
        raise PreviousNotFound(source.note.id) from None
    return fork.session
