"""What a chat template leaves unsaid of a model's turns: texts that end them, and thinking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from model.chat.call_forms import TAGGED, CallForm

_OPENING = re.compile(r"\{[{%]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Switch:
    """A template's variable that turns thinking on and off, and its values for that."""

    name: str
    on: bool | str = True
    off: bool | str = False


#: Those of published templates; a request may use any of the names for any template.
SWITCHES = (
    Switch("enable_thinking"),
    Switch("thinking"),
    Switch("rwkv_generation_prompt", "open_think", "fake_think"),
)


@dataclass(frozen=True)
class Thinking:
    """Text before an answer, between the markers ``begin`` and ``end``.

    ``close`` is what a model writes to end its thinking, and what stands between that and the
    answer. The template's variables ``switches`` turn it on and off; its variable
    ``reasoning_effort`` takes the words ``efforts``, none where it has no levels. ``default`` is
    for requests that do not say; None leaves it to the template.
    """

    begin: str = "<think>"
    end: str = "</think>"
    close: str = "\n</think>\n\n"
    switches: tuple[Switch, ...] = SWITCHES[:1]
    efforts: tuple[str, ...] = ()
    default: bool | None = None

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

    Texts of ``ends`` end an answer and the thinking before it. ``space`` is what the model writes
    between a prompt that ends in a word and its answer. ``calls`` is the form of a call that is
    forced where the template has none.
    """

    ends: tuple[str, ...] = ()
    thinking: Thinking | None = None
    space: str = ""
    calls: CallForm = TAGGED


def thinking_in(template: str) -> Thinking | None:
    """How a model thinks by its checkpoint's ``template``; None where it does not."""
    # A template may leave the marker's last character to the model.
    if Thinking.end[:-1] not in template:
        return None
    efforts = ("low", "medium", "high") if "reasoning_effort" in template else ()
    switches = tuple(switch for switch in SWITCHES if _reads(template, switch.name))
    return Thinking(switches=switches, efforts=efforts)


def _reads(template: str, name: str) -> bool:
    """Whether ``template`` uses the variable before it gives it a value of its own."""
    found = re.compile(rf"(?<![\w.]){name}(?!\w)")
    for code in _code(template):
        first, *others = [*found.finditer(code), None]
        if first is not None:
            is_set = code[: first.start()].split()[-1:] == ["set"]
            return not is_set or others[0] is not None
    return False


def _code(template: str) -> Iterator[str]:
    """What is between a template's braces, without its texts in quotes."""
    start = 0
    while (opening := _OPENING.search(template, start)) is not None:
        end = template.find("}}" if opening[0] == "{{" else "%}", opening.end())
        if end < 0:
            return
        yield _QUOTED.sub("''", template[opening.end() : end])
        start = end + 2
