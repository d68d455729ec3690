"""What a step trains on: texts, chats, and tasks that are made to teach recall."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.convert.linearize.chats import ChatFormat, encode
from model.evaluation import DataError, documents
from model.tokenizer import Tokenizer

# -------------------------------------------------------------------------------------------------
# Texts made to teach recall: facts are told, other text follows, then they are asked for.
#
# Ordinary text seldom repeats what it said hundreds of tokens before, so that a student learns
# nothing there of the source's retrieval. Here each text is turns of a chat, or paragraphs, drawn
# one after the other: a new fact, a question about one of the facts so far, or other text. The
# values of answers are marked, as the tokens that only recall can predict. Names, kinds of fact and
# sentences are others than those of the measure (`model.convert.linearize.report`).


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


# -------------------------------------------------------------------------------------------------
# What a step trains on: a pure function of the step, so that a stopped run continues alike.
#
# A sequence is T + 1 tokens: a piece of a book or of stories that starts anywhere; chats that the
# source wrote, from the beginning of one on, one after the other in the shard; or a made recall
# text. Source and student read the same tokens, so that chats that follow each other in a sequence
# are one text to both.


#: Ids of a text, of 16 or 32 bits by the size of the vocabulary.
Ids = NDArray[np.uint16] | NDArray[np.uint32]
SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Shares:
    """How often a sequence is of each kind; the rest is texts."""

    chats: float = 0.35
    recall: float = 0.2


@dataclass(frozen=True)
class Text:
    """Ids of a text, and how often it is drawn next to the others."""

    ids: Ids
    weight: float = 1.0


@dataclass(frozen=True)
class Sequence:
    """``ids`` [T + 1], and ``marked`` [T + 1] bool: tokens that recall alone predicts."""

    ids: Tensor
    marked: Tensor


def separator(tokenizer: Tokenizer) -> int:
    """The id between two documents."""
    return tokenizer.special_ids.get(SEPARATOR, tokenizer.eos_token_id)


def tokenized(file: Path, tokenizer: Tokenizer, cache: Path) -> Ids:
    """All documents of a text, each followed by the separator; kept as a file in ``cache``.

    Raises `DataError` for a text without documents.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with file.open("rb") as text:
        content = hashlib.file_digest(text, "sha256").hexdigest()
    digest = hashlib.sha256(f"{tokenizer.digest} {content}".encode()).hexdigest()[:16]
    path = cache / f"{file.stem}-{digest}.ids"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        ids = [
            np.array([*tokenizer.encode(text), separator(tokenizer)], dtype)
            for text in documents(file)
        ]
        if not ids:
            raise DataError(f"{file} has no text")
        partial = path.with_suffix(".partial")
        np.concatenate(ids).tofile(partial)
        partial.replace(path)
    return np.memmap(path, dtype, "r")


@dataclass(frozen=True)
class Shard:
    """Chats of the source, and where each begins."""

    ids: Ids
    starts: NDArray[np.int64]


def read_shards(folder: Path) -> list[Shard]:
    """Those in a folder, by name."""
    shards = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            shards.append(Shard(arrays["ids"], arrays["starts"]))
    return shards


class Sequences:
    """Sequences by step and row. Without chats their share goes to texts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: list[Text],
        chats: list[Shard],
        shares: Shares,
        seed: int,
        chat: ChatFormat | None,
    ) -> None:
        self._tokenizer, self._texts, self._chat_format = tokenizer, texts, chat
        self._chats, self._seed = chats, seed
        self._shares = shares if chats else replace(shares, chats=0.0)
        weights = np.array([text.weight for text in texts])
        self._weights = weights / weights.sum()

    def draw(self, step: int, row: int, num_tokens: int) -> Sequence:
        """The sequence of ``num_tokens`` + 1 tokens of a row of a step."""
        rng = np.random.default_rng([self._seed, step, row])
        length, kind = num_tokens + 1, rng.random()
        if kind < self._shares.recall:
            text = recall_text(rng, self._tokenizer, self._filler, length, self._chat_format)
            return Sequence(torch.tensor(text.ids), torch.tensor(text.marked))
        is_chat = kind < self._shares.recall + self._shares.chats
        ids = self._chat(rng, length) if is_chat else self._text(rng, length)
        tokens = torch.from_numpy(np.resize(ids, length).astype(np.int64))
        return Sequence(tokens, torch.zeros(length, dtype=torch.bool))

    def _chat(self, rng: np.random.Generator, length: int) -> Ids:
        sizes = np.array([len(shard.ids) for shard in self._chats], float)
        shard = self._chats[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        fit = shard.starts[shard.starts + length <= len(shard.ids)]
        start = int(rng.choice(fit)) if len(fit) else 0
        return shard.ids[start : start + length]

    def _text(self, rng: np.random.Generator, length: int) -> Ids:
        ids = self._texts[int(rng.choice(len(self._texts), p=self._weights))].ids
        start = int(rng.integers(max(1, len(ids) - length)))
        return ids[start : start + length]

    def _filler(self, rng: np.random.Generator, length: int) -> list[int]:
        end = separator(self._tokenizer)
        return [int(id) for id in self._text(rng, length) if id != end]


def common_ids(arrays: list[Ids], tokenizer: Tokenizer, count: int) -> Tensor:
    """The ``count`` ids that occur most in ``arrays``, in ascending order [count] int64.

    With all special ones and those of single bytes, by which all else can be written. A loss over
    these alone costs a third of that over SmolLM2's whole vocabulary.
    """
    size = tokenizer.vocab_size
    counts = np.zeros(size, np.int64)
    for ids in arrays:
        counts += np.bincount(ids, minlength=size)
    always = [id for id in range(size) if len(tokenizer.token_bytes(id)) <= 1]
    counts[[*always, *tokenizer.special_names]] += 1 << 40
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
