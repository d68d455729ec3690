"""The text of a session: ids, characters that are safe to send, thought and answer told apart."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

from model.tokenizer import Tokenizer
from server.engine.types import Turn
from server.errors import InvalidRequest

# -------------------------------------------------------------------------------------------------
# The ids of a text as it is held in memory: four bytes each, where a Python integer has 28.


class TokenArray(Sequence[int]):
    """Token ids that never change; equal to any sequence of the same.

    Raises `OverflowError` for an id below 0 or beyond 32 bits.
    """

    __slots__ = ("_ids",)
    __hash__ = None  # type: ignore[assignment]  # a tuple that it is equal to has another hash

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("I", ids)

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        """``ids``, copied unless they are one already."""
        return ids if isinstance(ids, cls) else cls(ids)

    @classmethod
    def joined(cls, first: Sequence[int], then: Sequence[int]) -> Self:
        """Both, one after the other; ``then`` itself where there is no ``first``."""
        if not first:
            return cls.of(then)
        found = cls(first)
        found._ids += cls.of(then)._ids
        return found

    @property
    def numbers(self) -> npt.NDArray[np.uint32]:
        """The same memory, for reading."""
        return np.frombuffer(self._ids, np.uint32)

    def copied(self) -> array[int]:
        """An array of the caller's own."""
        return self._ids[:]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> TokenArray: ...
    def __getitem__(self, place: int | slice) -> int | TokenArray:
        if isinstance(place, slice):
            return TokenArray(self._ids[place])
        return self._ids[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenArray):
            return self._ids == other._ids
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(map(int.__eq__, self._ids, other))

    def __repr__(self) -> str:
        return f"<{len(self)} token ids>"  # a text is not for a log


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for an id that the model does not have."""
    try:  # a third of the time of min() and max()
        highest = TokenArray.of(tokens).numbers.max(initial=0)
    except OverflowError:  # below 0, or far beyond
        highest = vocab_size
    if highest >= vocab_size:
        raise InvalidRequest(f"{param}: token ids must be in 0..{vocab_size - 1}", param)


def text_with_names(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ``ids``, with special tokens by their names."""
    names = {id: name.encode() for id, name in tokenizer.special_names.items()}
    begun = next((i for i, id in enumerate(ids) if id in names or tokenizer.token_bytes(id)), 0)
    data = [names.get(id) or tokenizer.token_bytes(id) for id in ids]
    if data and ids[begun] not in names:
        data[begun] = tokenizer.first_bytes(ids[begun])
    return b"".join(data).decode(errors="replace")


# -------------------------------------------------------------------------------------------------
# Token ids to text that is safe to send: whole characters, never a part of a stop string.


#: Bytes of the longest part of a character that is not whole, and tokens among which it is
#: looked for.
_MAX_PART_BYTES, _MAX_PART_TOKENS = 3, 64


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens. One per session.

    The first token of a text may have other bytes (`Tokenizer.first_bytes`): so long as none has
    come, the detokeniser is at the ``start``.
    """

    def __init__(self, tokenizer: Tokenizer, start: bool = True) -> None:
        self._tokenizer, self._at_start = tokenizer, start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._between_characters = True

    def push(self, token_id: int, exact: bool = False) -> str:
        """The characters that this token completes; bytes that can be none become U+FFFD.

        ``exact``: it is shown with all its bytes also as the first one of a text.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data if exact else self._tokenizer.first_bytes(token_id)
        try:
            return data.decode() if self._between_characters else self._decode(data)
        except UnicodeDecodeError:
            return self._decode(data)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """What `push` gives for all of them: decoded at once, in a tenth of the time."""
        texts, num = list[str](), 0
        while self._at_start and num < len(token_ids):
            texts.append(self.push(token_ids[num]))
            num += 1
        rest = b"".join(map(self._tokenizer.token_bytes, token_ids[num:]))
        return "".join([*texts, self._decode(rest)])

    def skip(self, token_ids: Iterable[int]) -> None:
        """Continues behind tokens whose text is not asked for."""
        self._at_start = self._at_start and self._tokenizer.silent_ids.issuperset(token_ids)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token stands for no text."""
        return token_id in self._tokenizer.silent_ids

    @property
    def undecoded(self) -> bytes:
        """The bytes of an unfinished character."""
        return self._decoder.getstate()[0]

    def restore(self, undecoded: bytes, start: bool = False) -> None:
        """Continues after ``undecoded``, at the ``start`` of a text or within it."""
        self._at_start = start
        self._decoder.setstate((undecoded, 0))
        self._between_characters = not undecoded

    def flush(self) -> str:
        """U+FFFD for an unfinished character, if there is one; starts again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._between_characters = True
        return text

    def _decode(self, data: bytes) -> str:
        """Takes into account how the last character began, and how the next one does."""
        text = self._decoder.decode(data)
        self._between_characters = not self._decoder.getstate()[0]
        return text


def text_within(
    tokenizer: Tokenizer, token_ids: Sequence[int], start: int, end: int, at_start: bool
) -> str:
    """The text of the tokens from ``start`` to ``end``: the characters that these complete.

    ``at_start``: the first of ``token_ids`` begins a text.
    """
    before = start
    num_bytes = 0
    while before and num_bytes < _MAX_PART_BYTES and start - before < _MAX_PART_TOKENS:
        before -= 1
        num_bytes += len(tokenizer.token_bytes(token_ids[before]))
    detokenizer = Detokenizer(tokenizer, at_start)
    detokenizer.skip(token_ids[:before])
    detokenizer.push_all(token_ids[before:start])
    return detokenizer.push_all(token_ids[start:end])


class StopStrings:
    """Withholds text that may turn out to be the start of a stop string. One per request."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    @property
    def withheld(self) -> str:
        """What may be the start of a stop string."""
        return self._held

    def restore(self, withheld: str) -> None:
        """Continues after ``withheld``."""
        self._held = withheld

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe now, and whether a stop string was met; it and the rest are dropped."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was withheld, at the end of a request that met no stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


# -------------------------------------------------------------------------------------------------
# Where the thinking in a text begins and ends, by its markers, which tokens cut as they like.


#: White space that is withheld at most, in characters: longer runs are text like any other.
MAX_SPACE = 256


class TurnPhase(IntEnum):
    """Where a turn's text is. It only moves forward."""

    START = 0  # what has come may be the beginning of the begin marker
    OPENED = 1  # after the begin marker, before the first word of the thinking
    THINKING = 2
    CLOSED = 3  # after the end marker, before the first word of the answer
    ANSWER = 4  # before the first word of the answer that is shown
    SHOWN = 5


class Cut(NamedTuple):
    """A piece of text, cut. ``closed``: the end marker is in it; ``rest`` came right after it."""

    thought: str = ""
    answer: str = ""
    closed: bool = False
    rest: str = ""


class Thoughts:
    """Cuts a text as it comes. White space around the thinking is dropped.

    Of that after it, at most `MAX_SPACE` characters are: no more is withheld.

    ``lead`` is what the marker in the prompt lacks, and may come first; ``undecided`` is text
    that may belong to a marker, or be white space that is dropped.
    """

    def __init__(self, turn: Turn) -> None:
        self._begin, self._end = turn.begin, turn.end
        self.part = {"": TurnPhase.START, "open": TurnPhase.OPENED, "closed": TurnPhase.CLOSED}[
            turn.prompted
        ]
        self.lead, self.undecided = turn.lead, ""

    def push(self, text: str) -> Cut:
        """What ``text`` adds."""
        if self.part >= TurnPhase.ANSWER:
            return Cut(answer=text)
        self.undecided += text
        if self.lead and not self._has_led():
            return Cut()
        if self.part is TurnPhase.START:
            self._start()
        cut = self._think() if self.part in (TurnPhase.OPENED, TurnPhase.THINKING) else Cut()
        if self.part is TurnPhase.CLOSED:
            self.undecided = self.undecided.lstrip()
            if self.undecided:
                self.part = TurnPhase.ANSWER
        if self.part is TurnPhase.ANSWER:
            cut, self.undecided = cut._replace(answer=self.undecided), ""
        return cut

    def flush(self) -> Cut:
        """What was undecided, where nothing more comes."""
        text, self.undecided = self.undecided, ""
        if self.part in (TurnPhase.OPENED, TurnPhase.THINKING):
            return Cut(thought=_stripped(text))
        return Cut(answer=text) if self.part is TurnPhase.START else Cut()

    def _has_led(self) -> bool:
        """Drops the lead; False where it may still come."""
        if self.lead.startswith(self.undecided) and self.lead != self.undecided:
            return False
        self.undecided = self.undecided.removeprefix(self.lead)
        self.lead = ""
        return True

    def _start(self) -> None:
        """The model may write the begin marker itself, or answer at once."""
        text = self.undecided.lstrip()
        if len(self.undecided) - len(text) > MAX_SPACE:
            self.part = TurnPhase.ANSWER
        elif text.startswith(self._begin):
            self.part, self.undecided = TurnPhase.OPENED, text.removeprefix(self._begin)
        elif not self._begin.startswith(text) or "\n\n" in self.undecided:
            self.part = TurnPhase.ANSWER

    def _think(self) -> Cut:
        if self.part is TurnPhase.OPENED:
            self.undecided = self.undecided.lstrip()
            if self.undecided:
                self.part = TurnPhase.THINKING
        thought, found, rest = self.undecided.partition(self._end)
        if found:
            self.part, self.undecided = TurnPhase.CLOSED, rest
            return Cut(_stripped(thought), closed=True, rest=rest)
        safe = _stripped(thought[: len(thought) - overlap(thought, self._end)])
        self.undecided = thought[len(safe) :]
        return Cut(safe)


def _stripped(text: str) -> str:
    """``text`` without the white space at its end, of which at most `MAX_SPACE` is dropped."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


# -------------------------------------------------------------------------------------------------
# The text of one turn of a chat: what the model thinks first, and its answer, told apart.
#
# Only a request with a `Turn` is read like this; the text of all others is shown as it comes.


class TurnState(NamedTuple):
    """What a `TurnText` needs to continue: see `Thoughts` for the first three.

    ``withheld`` and ``answer_withheld`` are what stop strings hold back. ``forced`` tokens come
    next, whatever the model would draw. ``num_thought`` tokens were thinking; 0 while it continues.
    """

    part: int
    lead: str = ""
    undecided: str = ""
    withheld: str = ""
    answer_withheld: str = ""
    forced: tuple[int, ...] = ()
    num_thought: int = 0


class ShownText(NamedTuple):
    """What became safe to show: of the thinking, None where that is over, and of the answer."""

    thought: str | None
    text: str
    met_stop: bool = False


class TurnText:
    """Reads the text of a turn, token by token.

    ``stop`` are the strings that end the answer. Where a ``grammar`` is waiting, it begins to
    apply when this `is_thinking` no more, and what came before it is not shown as the answer.
    """

    def __init__(self, turn: Turn, stop: tuple[str, ...], grammar: bool) -> None:
        self._turn, self._grammar = turn, grammar
        self._before, self._answer = StopStrings(turn.stop), StopStrings(stop)
        self._thoughts = Thoughts(turn)
        self._forced: tuple[int, ...] = ()
        self._num_drawn = self._num_thought = 0

    @property
    def state(self) -> TurnState:
        """For `restore`."""
        thoughts = self._thoughts
        held = (self._before.withheld, self._answer.withheld)
        place = (thoughts.part.value, thoughts.lead, thoughts.undecided)
        return TurnState(*place, *held, self._forced, self._num_thought)

    def restore(self, state: TurnState, num_drawn: int) -> None:
        """Continues where another one was after ``num_drawn`` tokens."""
        thoughts = self._thoughts
        thoughts.part, thoughts.lead = TurnPhase(state.part), state.lead
        thoughts.undecided = state.undecided
        self._before.restore(state.withheld)
        self._answer.restore(state.answer_withheld)
        self._forced, self._num_thought = state.forced, state.num_thought
        self._num_drawn = num_drawn

    @property
    def is_thinking(self) -> bool:
        """Whether the thinking continues, or what is forced after it."""
        return self._thoughts.part < TurnPhase.CLOSED or bool(self._forced)

    @property
    def is_within_thinking(self) -> bool:
        """Whether the text is between the two markers."""
        return self._thoughts.part in (TurnPhase.OPENED, TurnPhase.THINKING)

    @property
    def awaits_answer(self) -> bool:
        """Whether the thinking continues, or nothing but white space has come since."""
        return self.is_within_thinking or self._thoughts.part is TurnPhase.CLOSED

    @property
    def num_unrestricted(self) -> int | None:
        """The next tokens for which `allowed` gives no mask, whatever they are; None: all."""
        if self._forced or (self._grammar and self.is_thinking):
            return 0
        if self._turn.budget is None or self._thoughts.part >= TurnPhase.CLOSED:
            return None
        return max(0, self._turn.budget - self._num_drawn)

    @property
    def num_thought(self) -> int:
        """Tokens drawn for the thinking, with its markers."""
        return self._num_drawn if self.is_within_thinking else self._num_thought

    def allowed(self, vocab_size: int, ends: Iterable[int]) -> npt.NDArray[np.uint32] | None:
        """The mask of the tokens that may come next, [words]; None where any may.

        Where a grammar is waiting, none of ``ends`` may end the text before it.
        """
        self._force_in_time()
        waits = self._grammar and self.is_thinking
        if not self._forced and not waits:
            return None
        mask = np.zeros(-(-vocab_size // 32), np.uint32)
        if self._forced:
            mask[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
            return mask
        mask = ~mask
        for id in ends:
            mask[id // 32] &= ~np.uint32(1 << id % 32)
        return mask

    def push(self, text: str) -> ShownText:
        """What the next token makes safe to show; ``text`` is its text."""
        self._force_in_time()
        self._num_drawn += 1
        self._forced = self._forced[1:]
        safe, met = text, False
        if self._thoughts.part < TurnPhase.ANSWER:
            safe, met = self._before.push(text)
        cut = self._thoughts.push(safe)
        answer = cut.answer
        if self._thoughts.part >= TurnPhase.ANSWER:
            answer += self._before.flush()
        if cut.closed:
            self._num_thought = self._num_drawn
            if self._grammar:
                answer = ""
                if not cut.rest and not self._forced:
                    self._forced = self._turn.gap
        shown, met_answer = self._shown(answer)
        is_over = self._thoughts.part >= TurnPhase.ANSWER
        thought = None if is_over and not cut.thought else cut.thought
        return ShownText(thought, shown, met or met_answer)

    def finish(self, met_stop: bool, text: str = "") -> ShownText:
        """What was held back: of the answer only where no stop string was met; ``text`` is last."""
        safe = "" if met_stop else self._before.flush() + text
        cuts = self._thoughts.push(safe), self._thoughts.flush()
        thought = "".join(cut.thought for cut in cuts)
        if met_stop:
            return ShownText(thought, "")
        if self._thoughts.part is TurnPhase.START:
            self._thoughts.part = TurnPhase.ANSWER
        shown, met = self._shown("".join(cut.answer for cut in cuts))
        return ShownText(
            thought, shown + ("" if met else self._stripped(self._answer.flush())), met
        )

    def _force_in_time(self) -> None:
        """Closes the thinking where its budget is used up."""
        budget = self._turn.budget
        if budget is None or self._forced or not self.is_within_thinking:
            return
        if self._num_drawn >= budget:
            self._forced = self._turn.close

    def _shown(self, answer: str) -> tuple[str, bool]:
        """What of the answer may be shown now, and whether a stop string was met."""
        if not answer:
            return "", False
        safe, met = self._answer.push(answer)
        return self._stripped(safe), met

    def _stripped(self, text: str) -> str:
        """``text`` without the white space that the answer begins with."""
        if self._thoughts.part is TurnPhase.SHOWN:
            return text
        text = text.lstrip()
        if text:
            self._thoughts.part = TurnPhase.SHOWN
        return text
