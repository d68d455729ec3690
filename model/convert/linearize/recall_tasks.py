"""Texts made to teach recall: facts are told, other text follows, then they are asked for.

Ordinary text seldom repeats what it said hundreds of tokens before, so that a student learns
nothing there of the source's retrieval. Here each text is turns of a chat, or paragraphs, drawn
one after the other: a new fact, a question about one of the facts so far, or other text. The values
of answers are marked, as the tokens that only recall can predict. Names, kinds of fact and
sentences are others than those of the measure (`model.convert.linearize.measure`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from model.convert.linearize.chat_format import ChatFormat, encode
from model.tokenizer import Tokenizer

#: Gives about so many tokens of other text.
Filler = Callable[[np.random.Generator, int], list[int]]


@dataclass(frozen=True)
class Kind:
    """A kind of fact; ``{who}`` and ``{what}`` are filled in."""

    told: str
    question: str
    answer: str  # ends with the value
    values: tuple[str, ...]


NAMES = (
    *("Oliver", "Nora", "Hugo", "Clara", "Felix", "Ruth", "Simon", "Ida", "Victor", "Grace"),
    *("Martin", "Elsa", "Oscar", "Judith", "Leo", "Agnes", "Walter", "Helen", "Bruno", "Edith"),
)
KINDS = (
    Kind(
        "{who} has a pet called {what}.",
        "What is the name of {who}'s pet?",
        "{who}'s pet is called {what}",
        (
            "Rex",
            "Bella",
            "Coco",
            "Shadow",
            "Ginger",
            "Pepper",
            "Daisy",
            "Misty",
            "Biscuit",
            "Storm",
        ),
    ),
    Kind(
        "{who} lives in {what}.",
        "Where does {who} live?",
        "{who} lives in {what}",
        ("Paris", "Oslo", "Cairo", "Lima", "Dublin", "Madrid", "Vienna", "Boston", "Tokyo", "Rome"),
    ),
    Kind(
        "{who} works as a {what}.",
        "What does {who} do for a living?",
        "{who} works as a {what}",
        ("baker", "teacher", "pilot", "farmer", "nurse", "painter", "sailor", "judge", "tailor"),
    ),
    Kind(
        "{who} likes to eat {what} most of all.",
        "Which food does {who} like most?",
        "Most of all {who} likes {what}",
        ("soup", "rice", "cheese", "apples", "pancakes", "fish", "honey", "noodles", "bread"),
    ),
    Kind(
        "{who} hid the key under the {what}.",
        "Where did {who} hide the key?",
        "{who} hid the key under the {what}",
        ("carpet", "bench", "stone", "bed", "bridge", "table", "lamp", "roof", "barrel", "clock"),
    ),
    Kind(
        "The number of {who}'s room is {what}.",
        "Which number has {who}'s room?",
        "The number of {who}'s room is {what}",
        tuple(str(number) for number in range(11, 99, 3)),
    ),
    Kind(
        "{who} plays the {what} every evening.",
        "Which instrument does {who} play?",
        "{who} plays the {what}",
        ("piano", "violin", "flute", "drums", "guitar", "trumpet", "harp", "cello"),
    ),
)
ASKS = (
    "Please tell me something.",
    "Can you write a story for me?",
    "Please continue.",
    "Tell me more.",
    "Write a few sentences.",
)
THANKS = ("Thank you for telling me.", "I will remember that.", "Good to know.", "I see.")
#: Tokens of other text at a time: evenly in the logarithm between these.
FILLER_TOKENS = (20, 700)


@dataclass
class RecallText:
    """A text that grows: ``ids``, and for each whether it is the value of an answer."""

    ids: list[int] = field(default_factory=list)
    marked: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], marked: bool = False) -> None:
        """Appends tokens."""
        self.ids += ids
        self.marked += [marked] * len(ids)


def recall_text(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    filler: Filler,
    num_tokens: int,
    chat: ChatFormat | None,
) -> RecallText:
    """A text of exactly ``num_tokens``; never a chat where ``chat`` is None."""
    writer = _Writer(rng, tokenizer, filler, chat)
    while len(writer.text.ids) < num_tokens:
        writer.event()
    return RecallText(writer.text.ids[:num_tokens], writer.text.marked[:num_tokens])


class _Writer:
    """Writes event after event, as a chat or as paragraphs."""

    def __init__(
        self,
        rng: np.random.Generator,
        tokenizer: Tokenizer,
        filler: Filler,
        chat: ChatFormat | None,
    ) -> None:
        self._rng, self._tokenizer, self._filler = rng, tokenizer, filler
        self._told: dict[tuple[int, str], str] = {}
        self._chat = chat if rng.random() < 0.7 else None
        self.text = RecallText()
        self._write(self._chat.system if self._chat else "Here are some facts and stories.\n\n")
        self._tell(int(rng.integers(1, 5)))

    def event(self) -> None:
        """Other text, then a question or a fact."""
        low, high = np.log(FILLER_TOKENS)
        length = int(np.exp(self._rng.uniform(low, high)))
        other = self._filler(self._rng, length)
        if self._chat:
            self._write(self._chat.turn("user", self._pick(ASKS)) + self._chat.assistant)
            self.text.add(other)
            self._write(self._chat.end + self._chat.after_end)
        else:
            self.text.add(other)
            self._write("\n\n")
        if self._rng.random() < 0.4:
            self._tell(int(self._rng.integers(1, 3)))
        for _ in range(int(self._rng.integers(1, 4))):
            self._ask()

    def _tell(self, count: int) -> None:
        sentences = []
        for _ in range(count):
            kind, who = int(self._rng.integers(len(KINDS))), self._pick(NAMES)
            what = self._told.setdefault((kind, who), self._pick(KINDS[kind].values))
            sentences.append(KINDS[kind].told.format(who=who, what=what))
        told = " ".join(sentences)
        if self._chat:
            thanks = self._chat.turn("assistant", self._pick(THANKS))
            self._write(self._chat.turn("user", told) + thanks)
        else:
            self._write(told + "\n\n")

    def _ask(self) -> None:
        keys = list(self._told)
        kind, who = keys[int(self._rng.integers(len(keys)))]
        what = self._told[kind, who]
        question = KINDS[kind].question.format(who=who)
        beginning = KINDS[kind].answer.format(who=who, what="").rstrip()
        if self._chat:
            self._write(self._chat.turn("user", question) + self._chat.assistant + beginning)
        else:
            self._write(f"{question} {beginning}")
        self.text.add(self._tokenizer.encode(f" {what}"), marked=True)
        self._write(f".{self._chat.end}{self._chat.after_end}" if self._chat else ".\n\n")

    def _write(self, text: str) -> None:
        self.text.add(encode(self._tokenizer, text))

    def _pick(self, values: tuple[str, ...]) -> str:
        return values[int(self._rng.integers(len(values)))]
