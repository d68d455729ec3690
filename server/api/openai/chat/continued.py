"""Messages that continue a kept session: the new turns alone, as the template writes them there.

The session has read and written all that came before, so nothing of that is rendered. The new
messages are rendered after a placeholder for it, and what follows the placeholder is the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.openai.chat.conversation import Prompt, prompt_of
from server.api.openai.chat.messages import (
    AssistantMessage,
    ChatMessage,
    FunctionTool,
    UserMessage,
)
from server.engine.types import Finished, TokenEvent
from server.errors import invalid
from server.models.service import Service
from server.store.errors import HistoryGone

#: Stands for what was said. It ends in a letter, so that no token reaches beyond it.
PLACEHOLDER = "Thus it was said"
#: The last events of an answer: what it has written after its text is in few of them.
_NUM_LAST = 64
#: Bytes of an answer's text by which its end is found.
_NUM_SOUGHT = 48


async def continued_prompt(
    service: Service,
    owner: str,
    session: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[FunctionTool] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> Prompt:
    """What ``session`` is to read next, with the parameters of `prompt_of`.

    All that the template writes of ``messages`` where the session has not answered yet. Raises
    `RequestError`.
    """
    info = await service.sessions.info(session, owner)
    before: list[ChatMessage] = []
    if info.seq > 0:
        said = AssistantMessage(role="assistant", content=PLACEHOLDER)
        before = [UserMessage(role="user", content=PLACEHOLDER), said]
    prompt = await prompt_of(
        service,
        [*before, *messages],
        tools,
        add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=variables,
    )
    if not before:
        return prompt
    placeholder = await prompt_of(
        service, before, tools, continue_final_message=True, template_kwargs=variables
    )
    num_before = len(placeholder.ids)
    if prompt.ids[:num_before] != placeholder.ids:
        raise invalid("session", "the model's chat template does not write new turns by themselves")
    try:
        events = await service.sessions.read(
            session, owner, max(0, info.seq - _NUM_LAST), _NUM_LAST
        )
    except HistoryGone:
        events = []
    return Prompt(_unread(service, prompt.ids[num_before:], events, info.position), prompt.end)


def _unread(
    service: Service,
    new: Sequence[int],
    events: Sequence[TokenEvent | Finished],
    position: int,
) -> Sequence[int]:
    """What of ``new`` the session has not: its answer may have begun with what ends a turn.

    ``events`` are the last ones of the session, whose text has ``position`` tokens.
    """
    end = events[-1] if events else None
    if not isinstance(end, Finished) or end.position != position:
        return new  # not an answer, or other text came after it
    ends = [index for index, event in enumerate(events[:-1]) if isinstance(event, Finished)]
    last = events[ends[-1] + 1 :] if ends else events
    tokens = [event.token_id for event in last if isinstance(event, TokenEvent)]
    if tokens[-1:] == new[:1]:
        return new[1:]
    written = b"".join(map(service.tokenizer.token_bytes, tokens))
    shown = "".join(event.text for event in last).rstrip().encode()[-_NUM_SOUGHT:]
    place = written.rfind(shown)
    if not shown or place < 0:
        return new
    rest = without(service, new, written[place + len(shown) :])
    return new if rest is None else rest


def without(service: Service, ids: Sequence[int], begun: bytes) -> Sequence[int] | None:
    """``ids`` without the bytes ``begun`` that they begin with; None where they do not."""
    tokenizer = service.tokenizer
    place = 0
    while begun:
        token = tokenizer.token_bytes(ids[place]) if place < len(ids) else b""
        place += 1
        if not token or not (token.startswith(begun) or begun.startswith(token)):
            return None
        if len(token) > len(begun):
            rest = token[len(begun) :].decode(errors="replace")
            return [*tokenizer.encode_continuation(rest), *ids[place:]]
        begun = begun[len(token) :]
    return ids[place:]
