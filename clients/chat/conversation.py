"""A conversation: branches by name, one of which is active, and the commands on them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.markup import escape

from clients.chat import archive
from clients.chat.archive import NotAnArchive
from clients.chat.branch import Asked, Branch, Turn
from clients.chat.chat_branch import ChatBranch
from clients.chat.kept import ChatFile, KeptBranch, KeptChat, NotKept
from clients.chat.text_branch import TextBranch
from clients.python import (
    Client,
    ConnectionLost,
    EverstreamError,
    HistoryGone,
    NotFound,
    SessionNotFound,
)
from clients.python.protocol import Sampling

TEXT_HELP = """\
The model continues the text that you type. An empty line continues without new text. Ctrl-C stops.
"""
CHAT_HELP = """\
The model answers what you type. What it thinks first is dim. Ctrl-C stops.
  /think LEVEL         how much it thinks: none, minimal, low, medium or high; off is none
  /system [TEXT]       set or remove the system message
"""
HELP = """\
  /history             print the conversation turn by turn
  /undo [N]            remove the last turn, or the last N turns
  /again               generate another answer in place of the last one
  /rewind N            return to the state after the first N turns
  /fork NAME [N]       copy this branch (after its first N turns) and continue in the copy
  /branches            list all branches
  /switch NAME         continue in another branch
  /save FILE           save this branch to a file, for this or another server
  /load FILE [NAME]    load such a file as a new branch
  /new                 start a new conversation
  /temp NUMBER         set the temperature; also /top-p NUMBER, and /tokens NUMBER per answer
  /seed NUMBER         set the seed; without a number, each answer uses a new seed
  /help, /quit         list the commands; end the chat"""

#: Words for `/think`, and OpenAI's words for them.
EFFORTS = {word: word for word in ("none", "minimal", "low", "medium", "high")}
EFFORTS |= {"on": "medium", "off": "none"}

MAIN = "main"
MAX_SHOWN_CHARS = 60


class Setting(NamedTuple):
    """A sampling option that a command sets: the type of its argument, and its range."""

    option: str
    read: Callable[[str], float]
    least: float
    most: float


_SETTINGS = {
    "/temp": Setting("temperature", float, 0.0, 2.0),
    "/top-p": Setting("top_p", float, 0.0, 1.0),
    "/tokens": Setting("max_tokens", int, 1, 1_000_000),
    "/seed": Setting("seed", int, 0, 2**63 - 1),
}


class Mistaken(ValueError):
    """A command that cannot be executed; the message has the reason."""


class Conversation:
    """Branches of one model on one server; `run` executes lines of input."""

    def __init__(
        self,
        client: Client,
        console: Console,
        model: str | None = None,
        http: httpx.Client | None = None,
        file: ChatFile | None = None,
    ) -> None:
        """``model`` None is the server's first. Raises `EverstreamError` if there is none.

        A model with a chat template answers messages, which are sent over ``http``; without
        that it continues text, as models without a template do. With a ``file`` the conversation
        is the one that is kept there. Raises `NotKept` if it cannot be continued.
        """
        self._client, self._console, self._file = client, console, file
        kept = None if file is None else file.load()
        if kept is not None:
            model = model or kept.model
        models = client.models()
        found = next((each for each in models if model in (None, each["id"])), None)
        if found is None:
            raise NotFound(f"the server has no model {model!r}", "model_not_found", "model", 404)
        self._model = found
        self._http = http if found["everstream"].get("chat") else None
        self._effort: str | None = None
        self._asked: Asked | None = None
        if kept is None:
            self._branches: dict[str, Branch] = {MAIN: self._opened()}
            self._name = MAIN
        else:
            self._restore(kept)
        self._sampling: Sampling = {} if self._http else {"max_tokens": 120}
        self._commands: dict[str, Callable[[Sequence[str]], None]] = {
            "/history": self._history,
            "/undo": self._undo,
            "/again": self._again,
            "/rewind": self._rewind,
            "/fork": self._fork,
            "/branches": self._list,
            "/switch": self._switch,
            "/save": self._save,
            "/load": self._load,
            "/new": self._new,
        }
        if self._http:
            self._commands |= {"/think": self._think, "/system": self._system}

    @property
    def branch(self) -> Branch:
        """The active branch."""
        return self._branches[self._name]

    def run(self, lines: Iterator[str]) -> None:
        """Executes one line after another until they end or one is /quit."""
        details = self._model["everstream"]
        state_kib = details["state_bytes_per_session"] / 1024
        kind = f"{details['attention']} attention, state {state_kib:.0f} KiB"
        self._say(f"{self._model['id']}: {kind}; /help for help")
        if self.branch.turns or self._asked:
            self._where()
        if (asked := self._asked) is not None:
            self._say(f"> {asked.prompt}")
            self._attempt(lambda: self._answer(asked, may_be_known=True))
        for line in lines:
            if line.strip() == "/quit":
                break
            if line.startswith("/"):
                self._attempt(lambda: self._command(line.split()))  # noqa: B023 - called at once
            else:
                self._attempt(lambda: self._talk(line))  # noqa: B023 - called at once
        if self._file is None:
            for branch in self._branches.values():
                branch.delete()

    def _attempt(self, act: Callable[[], None]) -> None:
        """Does it, or says why not. Raises `ConnectionLost`."""
        try:
            act()
            self._keep()
        except SessionNotFound:
            self._complain("the session has expired; /new starts a new one")
        except ConnectionLost:
            raise
        except OSError as error:
            self._complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (EverstreamError, Mistaken, NotAnArchive) as error:
            self._complain(str(error))

    # What is kept in a file

    def _keep(self) -> None:
        if self._file is None:
            return
        branches = {
            name: KeptBranch(
                branch.turns,
                branch.session.id if isinstance(branch, TextBranch) else None,
                branch.system if isinstance(branch, ChatBranch) else "",
            )
            for name, branch in self._branches.items()
        }
        model = self._model["id"]
        self._file.save(KeptChat(model, branches, self._name, self._effort, self._asked))

    def _restore(self, kept: KeptChat) -> None:
        if kept.model != self._model["id"]:
            raise NotKept(f"the conversation is with the model {kept.model}")
        self._name, self._effort, self._asked = kept.active, kept.effort, kept.asked
        self._branches = {name: self._restored(branch) for name, branch in kept.branches.items()}

    def _restored(self, kept: KeptBranch) -> Branch:
        model = self._model["id"]
        if self._http and kept.session is None:
            return ChatBranch(self._http, model, kept.turns, kept.system, self._effort)
        if self._http or kept.session is None:
            needed = "needs" if self._http else "cannot have"
            raise NotKept(f"the conversation {needed} the option --text")
        return TextBranch(self._client, model, self._client.session(kept.session), kept.turns)

    # Text

    def _talk(self, prompt: str) -> None:
        if self._http and not prompt.strip():
            return
        self._asked = Asked(prompt, {**self._sampling}, f"chat-{secrets.token_hex(16)}")
        self._keep()
        self._answer(self._asked)

    def _answer(self, asked: Asked, may_be_known: bool = False) -> None:
        """Shows the answer and adds the turn; one that cannot be read for now stays asked for."""
        try:
            self._show(asked, may_be_known)
        except ConnectionLost:
            raise
        except EverstreamError:
            self._asked = None
            self._keep()
            raise

    def _show(self, asked: Asked, may_be_known: bool) -> None:
        begins, started_s = self.branch.position, time.perf_counter()
        first_s: float | None = None
        said: list[str] = []
        thought: list[str] = []
        answer = self.branch.answer(asked, may_be_known)
        with contextlib.suppress(KeyboardInterrupt), answer:  # leaving the block cancels
            for piece in answer:
                if piece.notice:
                    self._say(f"\n{piece.notice}")
                if piece.restarts:
                    self._say("the server has lost the answer and writes it again")
                    said, thought = [], []
                if piece.thought or piece.text:
                    first_s = first_s or time.perf_counter()
                if piece.thought:
                    thought.append(piece.thought)
                    self._console.out(
                        printable(piece.thought), end="", highlight=False, style="dim"
                    )
                if piece.text:
                    said.append(piece.text)
                    self._print("\n\n" + piece.text if thought and not said[1:] else piece.text)
        ends, thoughts = answer.position or begins, "".join(thought)
        self.branch.turns.append(Turn(asked.prompt, "".join(said), begins, ends, thoughts))
        self._asked = None
        num_tokens = answer.num_tokens
        self._say("\n" + self._speed(num_tokens, ends, started_s, first_s or time.perf_counter()))

    def _print(self, text: str) -> None:
        """More of an answer. Rich would print it again later where Ctrl-C interrupts this."""
        self._console.file.write(printable(text))
        self._console.file.flush()

    def _speed(self, num_tokens: int, position: int, started_s: float, first_s: float) -> str:
        """Speed of the answer, and the size of the state compared with a KV cache."""
        now_s, details = time.perf_counter(), self._model["everstream"]
        state_kib = details["state_bytes_per_session"] / 1024
        cache_kib = details["kv_cache_bytes_per_token"] * position / 1024
        return (
            f"{num_tokens / (now_s - started_s):.0f} tokens/s,"
            f" first after {(first_s - started_s) * 1000:.0f} ms,"
            f" position {position},"
            f" state {state_kib:.0f} KiB (a KV cache: {cache_kib:,.0f} KiB)"
        )

    def _opened(self) -> Branch:
        """A new branch without a turn."""
        model = self._model["id"]
        if self._http:
            return ChatBranch(self._http, model, effort=self._effort)
        return TextBranch(self._client, model, self._client.create_session(model))

    # Commands

    def _command(self, words: list[str]) -> None:
        name, *arguments = words
        if name in self._commands:
            self._commands[name](arguments)
        elif name in _SETTINGS:
            self._set(name, arguments)
            settings = ", ".join(f"{option} {value}" for option, value in self._sampling.items())
            self._say(settings or "the server's defaults")
        elif name == "/help":
            self._say((CHAT_HELP if self._http else TEXT_HELP) + HELP)
        else:
            raise Mistaken(f"there is no command {name}; /help lists them")

    def _set(self, name: str, arguments: Sequence[str]) -> None:
        option, read, least, most = _SETTINGS[name]
        if name == "/seed" and not arguments:
            self._sampling.pop("seed", None)
            return
        try:
            (text,) = arguments
            value = read(text)
        except ValueError as error:
            raise Mistaken(f"{name} needs a number") from error
        if not least <= value <= most:
            raise Mistaken(f"{name} must be {least:g} to {most:,}")
        self._sampling[option] = value  # type: ignore[literal-required]

    def _history(self, arguments: Sequence[str]) -> None:
        for number, turn in enumerate(self.branch.turns, start=1):
            said = _shortened(f"{turn.prompt}|{turn.answer}")
            self._say(f"{number:>3}  {turn.begins:>7,} to {turn.ends:<7,} {said}")

    def _undo(self, arguments: Sequence[str]) -> None:
        num_left = len(self.branch.turns) - (_count(arguments[0]) if arguments else 1)
        self._back_to(max(0, num_left))

    def _rewind(self, arguments: Sequence[str]) -> None:
        if len(arguments) != 1:
            raise Mistaken("/rewind needs the number of turns to keep")
        self._back_to(_count(arguments[0]))

    def _rewind_to(self, num_turns: int) -> None:
        """Rewinds the session; if its log does not reach back that far, reads the text again."""
        try:
            self.branch.rewind(num_turns)
        except HistoryGone:
            past, self._branches[self._name] = self.branch, self.branch.reread(num_turns)
            past.delete()

    def _back_to(self, num_turns: int) -> None:
        self._rewind_to(num_turns)
        self._say(f"back after turn {len(self.branch.turns)}, position {self.branch.position}")

    def _again(self, arguments: Sequence[str]) -> None:
        if not self.branch.turns:
            raise Mistaken("there is no turn yet")
        prompt = self.branch.turns[-1].prompt
        self._rewind_to(len(self.branch.turns) - 1)
        self._talk(prompt)

    def _fork(self, arguments: Sequence[str]) -> None:
        if len(arguments) not in (1, 2):
            raise Mistaken("/fork needs a name for the copy, and optionally a number of turns")
        self._check_new(arguments[0])
        num_turns = _count(arguments[1]) if arguments[1:] else None
        try:
            copy = self.branch.fork(num_turns)
        except HistoryGone:
            copy = self.branch.reread(num_turns)
        self._add(arguments[0], copy)

    def _list(self, arguments: Sequence[str]) -> None:
        for name, branch in self._branches.items():
            mark = "*" if name == self._name else " "
            last = branch.turns[-1].answer if branch.turns else ""
            said = f"{_turns(branch)}, position {branch.position:,}"
            self._say(f"{mark} {name}: {said} {_shortened(last)}")

    def _switch(self, arguments: Sequence[str]) -> None:
        if len(arguments) != 1 or arguments[0] not in self._branches:
            raise Mistaken(f"/switch needs one of {', '.join(self._branches)}")
        self._name = arguments[0]
        self._where()

    def _save(self, arguments: Sequence[str]) -> None:
        if len(arguments) != 1:
            raise Mistaken("/save needs the name of a file")
        archive.save(self.branch, Path(arguments[0]).expanduser())
        self._say(f"saved to {arguments[0]}")

    def _load(self, arguments: Sequence[str]) -> None:
        if len(arguments) not in (1, 2):
            raise Mistaken("/load needs the name of a file, and optionally one for the branch")
        path = Path(arguments[0]).expanduser()
        name = arguments[1] if arguments[1:] else path.stem
        self._check_new(name)
        self._add(name, archive.load(self.branch, path))

    def _new(self, arguments: Sequence[str]) -> None:
        self.branch.delete()
        self._branches[self._name] = self._opened()
        self._say("a new session")

    def _think(self, arguments: Sequence[str]) -> None:
        if len(arguments) != 1 or arguments[0] not in EFFORTS:
            raise Mistaken(f"/think needs one of {', '.join(EFFORTS)}")
        self._effort = EFFORTS[arguments[0]]
        for branch in self._branches.values():
            if isinstance(branch, ChatBranch):
                branch.effort = self._effort
        self._say(f"thinking: {self._effort}")

    def _system(self, arguments: Sequence[str]) -> None:
        assert isinstance(self.branch, ChatBranch)
        self.branch.system = " ".join(arguments)
        self._say("the system message is set" if arguments else "no system message")

    def _add(self, name: str, branch: Branch) -> None:
        self._branches[name], self._name = branch, name
        self._where()

    def _check_new(self, name: str) -> None:
        if name in self._branches:
            raise Mistaken(f"branch {name} already exists")

    def _where(self) -> None:
        branch = self.branch
        self._say(f"{self._name}: {_turns(branch)}, position {branch.position:,}")

    def _say(self, text: str) -> None:
        self._console.print(escape(text), style="dim")

    def _complain(self, text: str) -> None:
        self._console.print(escape(text), style="red")


def printable(text: str) -> str:
    """``text`` without control characters, which could change the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _turns(branch: Branch) -> str:
    num_turns = len(branch.turns)
    return f"{num_turns} turn" if num_turns == 1 else f"{num_turns} turns"


def _shortened(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= MAX_SHOWN_CHARS else line[: MAX_SHOWN_CHARS - 3] + "..."


def _count(text: str) -> int:
    if not text.isdecimal():
        raise Mistaken(f"{text} is not a number of turns")
    return int(text)
