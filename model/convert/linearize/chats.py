"""Chats that the source writes itself: formats, questions, and greedy answers to compare."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.architectures.hybrid import with_past
from model.checkpoint import Checkpoint
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer

TOPICS = (
    *(
        "cats",
        "dogs",
        "the moon",
        "bread",
        "trains",
        "volcanoes",
        "rain",
        "a birthday party",
        "bees",
    ),
    *("healthy food", "friendship", "the ocean", "trees", "winter", "bicycles", "music", "money"),
    *(
        "computers",
        "the human body",
        "space",
        "sleep",
        "cooking",
        "a lost key",
        "mountains",
        "painting",
    ),
    *("school", "gardening", "dinosaurs", "football", "the sun", "electricity", "rivers", "time"),
    *("a small village", "lions", "colors", "holidays", "learning a language", "books", "coffee"),
    *("chess", "the desert", "elephants", "airplanes", "photography", "clouds", "ants", "castles"),
    *("running", "tea", "whales", "the wind", "clocks", "spiders", "swimming", "maps", "glass"),
    *("penguins", "dreams", "the heart", "earthquakes", "apples", "robots", "a kind teacher"),
    *("the seasons", "honesty", "camping", "the internet", "horses", "pirates", "islands", "snow"),
    *(
        "chocolate",
        "a brave mouse",
        "lighthouses",
        "recycling",
        "dancing",
        "frogs",
        "a night in a forest",
    ),
    *(
        "stars",
        "good habits",
        "cheese",
        "an old clockmaker",
        "ships",
        "birds",
        "patience",
        "medicine",
    ),
    *(
        "the Roman Empire",
        "Africa",
        "Japan",
        "the Middle Ages",
        "gravity",
        "light",
        "sound",
        "atoms",
    ),
    *(
        "vaccines",
        "climate",
        "a wise king",
        "a job interview",
        "exercise",
        "stress",
        "saving water",
    ),
    *(
        "a funny dragon",
        "brothers and sisters",
        "moving to a new city",
        "a picnic",
        "public speaking",
    ),
    *("Python programming", "fractions", "triangles", "prime numbers", "percentages", "spelling"),
)
QUESTIONS = (
    "Tell me about {}.",
    "Write a short story about {}.",
    "What is interesting about {}?",
    "Explain {} to a child.",
    "Give me three tips about {}.",
    "Write a short poem about {}.",
    "Why does {} matter?",
    "What should I know about {}?",
    "List five facts about {}.",
    "Write a short letter about {}.",
    "How would you describe {} in one sentence?",
    "What do people often get wrong about {}?",
    "I want to write an essay on {}. Where should I start?",
    "Compare {} with {}.",
    "What is the history of {}?",
    "Write a dialogue between two friends about {}.",
    "My daughter asks me about {}. What can I tell her?",
    "Can you give me a quiz question about {}?",
    "Summarize what is known about {} in two sentences.",
    "Invent a title for a book about {} and say what it is about.",
    "Do you like {}?",
    "What has {} to do with {}?",
)
PLAIN = (
    "Hello! How are you today?",
    "Who are you?",
    "What can you help me with?",
    "I feel sad today. Can you cheer me up?",
    "What is 12 plus 30?",
    "Write an email to my neighbor and ask him to water my plants.",
    "Translate 'good morning' into Spanish.",
    "Give me a synonym for 'happy'.",
    "Suggest a name for a small boat.",
    "I am bored. What can I do this afternoon?",
    "Correct this sentence: 'She go to school yesterday.'",
    "Write a to-do list for a busy Monday.",
    "How do I boil an egg?",
    "What is the difference between a lake and a sea?",
    "Tell me a joke.",
    "Tell me something surprising.",
)
FOLLOW_UPS = (
    "Can you give an example?",
    "Say that in one sentence.",
    "Why is that?",
    "Thank you! Tell me more.",
    "Can you explain it more simply?",
    "What else should I know?",
    "And what about {}?",
    "Now write it as a short poem.",
    "Make it shorter, please.",
    "What was my first question?",
    "That is interesting. How do you know?",
    "I do not understand the last part.",
    "Continue.",
    "Please give me a list of the main points.",
    "What would you recommend?",
    "Is that always true?",
    "Let us change the subject: tell me about {}.",
    "How does that compare with {}?",
    "What did you say first?",
    "Which of these is the most important?",
    "Great. Write one more.",
)


def question(rng: np.random.Generator) -> str:
    """The first message of a chat."""
    if rng.random() < 0.12:
        return _pick(rng, PLAIN)
    return _filled(rng, _pick(rng, QUESTIONS))


def follow_up(rng: np.random.Generator) -> str:
    """A later message."""
    if rng.random() < 0.2:
        return question(rng)
    return _filled(rng, _pick(rng, FOLLOW_UPS))


def _filled(rng: np.random.Generator, template: str) -> str:
    return template.format(*(_pick(rng, TOPICS) for _ in range(template.count("{}"))))


def _pick(rng: np.random.Generator, values: tuple[str, ...]) -> str:
    return values[int(rng.integers(len(values)))]


# -------------------------------------------------------------------------------------------------
# How a chat is written: by ChatML (SmolLM2, Qwen) or in the format of Llama 3.
#
# A chat template is code, which only the server runs; here its text tells which of the two it is.


@dataclass(frozen=True)
class ChatFormat:
    """The texts around messages. ``system`` is all that comes before the first one."""

    system: str
    user: str
    assistant: str
    #: The special token that ends a message, and what follows it.
    end: str
    after_end: str

    def turn(self, role: str, text: str) -> str:
        """One whole message of ``user`` or ``assistant``."""
        return f"{getattr(self, role)}{text}{self.end}{self.after_end}"


CHAT_ML = ChatFormat("", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "\n")
_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3 = ChatFormat(
    "<|begin_of_text|>", _LLAMA3.format("user"), _LLAMA3.format("assistant"), "<|eot_id|>", ""
)
#: The system message of a ChatML template where a chat has none.
_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'\"<{}]+)<\|im_end\|>")


def chat_format(template: str, tokenizer: Tokenizer) -> ChatFormat | None:
    """That of a template's text; None for one in another format."""
    for known in (CHAT_ML, LLAMA3):
        start = known.user.partition("user")[0]
        if start in template and known.end in tokenizer.special_ids:
            break
    else:
        return None
    if known is LLAMA3 or (system := _SYSTEM.search(template)) is None:
        return known
    message = f"<|im_start|>system\n{system[1]}<|im_end|>\n"
    return ChatFormat(message, known.user, known.assistant, known.end, known.after_end)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text of such a format, of which the names of special tokens are these tokens."""
    return tokenizer.encode(text, allow_special=True)


# -------------------------------------------------------------------------------------------------
# Chats that the source writes itself: what the student will be asked to say.
#
# Questions are made of templates and topics, or written by the source too, which is asked to
# continue after the beginning of a user's message (Xu et al. 2024, "Magpie"). The native runtime
# writes many chats side by side: a chat is a function of its seed and number alone, in any batch,
# so that one that was interrupted is read again and continues with the same tokens.


#: Tokens of a chat, and of one message in it.
MAX_CHAT, MAX_ANSWER, MAX_QUESTION = 1023, 320, 48
#: Turns of a chat: a number of them is drawn.
MAX_TURNS = 6
#: How often the source writes a question.
OWN_QUESTIONS = 0.35
TEMPERATURE, TOP_P = 0.8, 0.95
#: Chats that are written at a time, and of a shard.
ROWS, SHARD_CHATS = 16, 64
SAVE_EVERY_S = 120.0

#: Is sent each token that the source draws; gives the tokens that it reads before the next one.
Script = Generator[list[int], int, None]


def conversation(rng: np.random.Generator, tokenizer: Tokenizer, chat: ChatFormat) -> Script:
    """One chat. What it gave when it ends is the whole of it."""
    feed = encode(tokenizer, chat.system)
    for number in range(1 + int(rng.integers(MAX_TURNS))):
        if rng.random() < OWN_QUESTIONS:
            feed += encode(tokenizer, chat.user)
            yield from _message(feed, tokenizer.special_ids[chat.end], MAX_QUESTION)
            feed = encode(tokenizer, chat.end + chat.after_end + chat.assistant)
        else:
            text = question(rng) if number == 0 else follow_up(rng)
            feed += encode(tokenizer, chat.turn("user", text) + chat.assistant)
        if not (yield from _message(feed, tokenizer.special_ids[chat.end], MAX_ANSWER)):
            return  # too long an answer ends a chat in its middle
        feed = encode(tokenizer, chat.end + chat.after_end)
    yield feed


def _message(feed: list[int], end: int, limit: int) -> Generator[list[int], int, bool]:
    """Reads ``feed`` and up to ``limit`` tokens that are drawn; whether the source ended it."""
    for _ in range(limit):
        drawn = yield feed
        if drawn == end:
            return True
        feed = [drawn]
    return False


@dataclass
class _Row:
    """A chat as it is written. The runtime has read ``ids`` but for the last ``unread``."""

    number: int
    script: Script
    draw: object
    ids: list[int] = field(default_factory=list)
    unread: int = 0
    drawn: list[int] = field(default_factory=list)

    def feed(self, drawn: int | None) -> bool:
        """Continues after a token; false where the chat is over."""
        if drawn is not None:
            self.drawn.append(drawn)
        try:
            ids = next(self.script) if drawn is None else self.script.send(drawn)
        except StopIteration:
            return False
        ids = ids[: MAX_CHAT - len(self.ids)]
        self.ids += ids
        self.unread += len(ids)
        return len(self.ids) < MAX_CHAT


class Writer:
    """Writes the chats of a shard, those with numbers from ``first`` on."""

    def __init__(
        self,
        runtime: Runtime,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        seed: int,
        first: int,
        count: int = SHARD_CHATS,
    ) -> None:
        self._runtime, self._tokenizer, self._chat, self._seed = runtime, tokenizer, chat, seed
        self._waiting = list(range(first, first + count))
        self.finished: dict[int, list[int]] = {}
        self._pool = runtime.empty_pool(min(ROWS, count))
        self._rows: list[_Row | None] = [None] * len(self._pool)

    @property
    def num_tokens(self) -> int:
        """Tokens that are written."""
        rows = (len(row.ids) for row in self._rows if row is not None)
        return sum(map(len, self.finished.values())) + sum(rows)

    def step(self) -> bool:
        """Each row reads, and draws a token; false when all chats are finished."""
        for slot, row in enumerate(self._rows):
            if row is None and self._waiting:
                self._rows[slot] = self._begin(self._waiting.pop(0), [])
        active = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
        if not active:
            return False
        drawn = self._runtime.run(
            self._pool,
            [slot for slot, _ in active],
            [len(row.ids) - row.unread for _, row in active],
            [row.ids[-row.unread :] for _, row in active],
            [row.draw for _, row in active],
        )
        for (slot, row), (token,) in zip(active, drawn, strict=True):
            row.unread = 0
            if not row.feed(token):
                self.finished[row.number] = row.ids
                self._rows[slot] = None
        return True

    def _begin(self, number: int, drawn: list[int]) -> _Row:
        """A chat of which the tokens ``drawn`` were drawn before."""
        rng = np.random.default_rng([self._seed, number])
        draw = self._runtime.draw(
            temperature=TEMPERATURE, top_p=TOP_P, seed=int(rng.integers(1 << 31))
        )
        row = _Row(number, conversation(rng, self._tokenizer, self._chat), draw)
        for token in (None, *drawn):
            row.feed(token)
        return row

    def chats(self) -> list[list[int]]:
        """All chats as far as they are written, in the order of their numbers."""
        rows = {row.number: row.ids for row in self._rows if row is not None}
        return [ids for _, ids in sorted((self.finished | rows).items())]

    def save(self, path: Path) -> None:
        """What a later `resume` needs."""
        rows = {row.number: row.drawn for row in self._rows if row is not None}
        values = {"finished": self.finished, "rows": rows, "waiting": self._waiting}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Continues from what was saved."""
        values = json.loads(path.read_text(encoding="utf-8"))
        self.finished = {int(number): ids for number, ids in values["finished"].items()}
        self._waiting = values["waiting"]
        for slot, (number, drawn) in enumerate(values["rows"].items()):
            self._rows[slot] = self._begin(int(number), drawn)


def writing_runtime(checkpoint: Checkpoint, threads: int) -> Runtime:
    """The source with room for a chat. Raises `NativeError`."""
    config = with_past(checkpoint.config, MAX_CHAT + 1, "stop")
    num_ids = checkpoint.tokenizer.vocab_size
    return Runtime(config, checkpoint.weights, "bfloat16", threads, num_ids=num_ids)


def write_chats(
    folder: Path,
    writers: Callable[[int], Writer],
    num_tokens: int,
    stop: Callable[[], bool],
    progress: Callable[[int], None],
) -> bool:
    """Writes shards until they have ``num_tokens`` in all; false where it was stopped before.

    ``writers`` gives that of a shard by its number. The last chats end where the tokens do. What is
    written when it stops is saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while (done := shard_tokens(folder)) < num_tokens:
        number = len(shard_paths(folder))
        writer, unfinished = writers(number), folder / f"unfinished-{number:05d}.json"
        if unfinished.is_file():
            writer.resume(unfinished)
        saved = time.monotonic()
        while not (ended := stop()) and writer.step():
            progress(done + writer.num_tokens)
            if done + writer.num_tokens >= num_tokens:
                break
            if time.monotonic() - saved > SAVE_EVERY_S:
                writer.save(unfinished)
                saved = time.monotonic()
        if ended:
            writer.save(unfinished)
            return False
        write_shard(folder / f"{number:05d}.npz", writer.chats())
        unfinished.unlink(missing_ok=True)
    return True


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder, in their order."""
    return sorted(folder.glob("*.npz"))


def shard_tokens(folder: Path) -> int:
    """Tokens of all shards."""
    total = 0
    for path in shard_paths(folder):
        with np.load(path) as arrays:
            total += len(arrays["ids"])
    return total


def write_shard(path: Path, chats: list[list[int]]) -> None:
    """Replaces the shard ``path``."""
    starts = np.cumsum([0, *map(len, chats[:-1])], dtype=np.int64)
    ids: NDArray[np.uint32] = np.concatenate([np.array(chat, np.uint32) for chat in chats])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, ids=ids, starts=starts)
    partial.replace(path)
