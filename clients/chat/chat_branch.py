"""A branch of a chat: messages, which the server writes by the model's template.

All of them are sent each time; the server's prefix cache has the earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from clients.chat.branch import Asked, Turn
from clients.chat.chat_answer import ChatAnswer


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

    def answer(self, asked: Asked, may_be_known: bool = False) -> ChatAnswer:
        body: dict[str, Any] = {"model": self.model, "input": self._items(asked.prompt)}
        if self.effort is not None:
            body["reasoning"] = {"effort": self.effort}
        sampling: dict[str, Any] = {**asked.sampling}
        if (max_tokens := sampling.pop("max_tokens", None)) is not None:
            body["max_output_tokens"] = max_tokens
        return ChatAnswer(self.http, {**body, **sampling}, asked.key, may_be_known)

    def rewind(self, num_turns: int) -> None:
        del self.turns[num_turns:]

    def fork(self, num_turns: int | None = None) -> ChatBranch:
        return replace(self, turns=self.turns[:num_turns])

    reread = fork

    def delete(self) -> None:
        """Nothing is kept."""

    def _items(self, prompt: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if self.system:
            items.append({"role": "system", "content": self.system})
        for turn in self.turns:
            if not turn.answer:
                continue  # it was stopped before its first word
            items.append({"role": "user", "content": turn.prompt})
            if turn.thought:
                part = {"type": "reasoning_text", "text": turn.thought}
                items.append({"type": "reasoning", "content": [part]})
            items.append({"role": "assistant", "content": turn.answer})
        return [*items, {"role": "user", "content": prompt}]
