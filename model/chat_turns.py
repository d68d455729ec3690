"""What a chat template leaves unsaid of a model's turns: texts that end them, and thinking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Thinking:
    """Text before an answer, between the markers ``begin`` and ``end``.

    ``close`` is what a model writes to end its thinking, and what stands between that and the
    answer. The template's variable ``enable_thinking`` turns it on and off where ``can_switch``;
    its variable ``reasoning_effort`` takes the words ``efforts``, none where it has no levels.
    """

    begin: str = "<think>"
    end: str = "</think>"
    close: str = "\n</think>\n\n"
    can_switch: bool = True
    efforts: tuple[str, ...] = ()

    @property
    def gap(self) -> str:
        """What stands between the end marker and the answer."""
        return self.close.partition(self.end)[2]

    def prompted(self, prompt: str) -> tuple[Literal["", "open", "closed"], str]:
        """Which markers ``prompt`` ends with, and what the last one lacks, if anything.

        Templates may leave a marker's last character to the model: tokenizers join it with what
        follows.
        """
        text = prompt.rstrip()
        for marker, found in ((self.end, "closed"), (self.begin, "open")):
            for lead in ("", marker[-1]):
                if text.endswith(marker.removesuffix(lead)):
                    return ("closed" if found == "closed" else "open"), lead
        return "", ""


@dataclass(frozen=True)
class Turns:
    """How a model's turns end other than by tokens, and how it thinks.

    Texts of ``ends`` end an answer and the thinking before it.
    """

    ends: tuple[str, ...] = ()
    thinking: Thinking | None = None


def thinking_in(template: str) -> Thinking | None:
    """How a model thinks by its checkpoint's ``template``; None where it does not."""
    usual = Thinking()
    if usual.end not in template:
        return None
    efforts = ("low", "medium", "high") if "reasoning_effort" in template else ()
    return Thinking(can_switch="enable_thinking" in template, efforts=efforts)
