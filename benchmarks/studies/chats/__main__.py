"""Fixed chats with the bundled chat model and with its original, greedy, by the server's own API.

    python -m benchmarks.studies.chats

The questions (`questions.json`) were written before the model was trained, and no answer is left
out of the result. The original is served with a past that holds whole chats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.process import ServerProcess, exit_on_sigterm
from benchmarks.report import RESULTS, Figures, Result, command_line
from model.bundled_models import bundled_models
from model.hub.base import base_of

QUESTIONS = Path(__file__).parent / "questions.json"
RESULT = RESULTS / "chats.json"
MODEL = "smollm2"
MAX_TOKENS = 160
#: Chats at a time; how many share a batch changes no answer.
STREAMS = 8
TIMEOUT_S = 600.0


def chat(url: str, questions: Sequence[str]) -> list[str]:
    """The answers to a user's messages, each after those before it."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "temperature": 0.0, "max_tokens": MAX_TOKENS}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
    return [message["content"] for message in messages if message["role"] == "assistant"]


def answers(chats: Sequence[Sequence[str]], *flags: str) -> list[list[str]]:
    """Those of a server with these flags, of each chat."""
    with ServerProcess(*flags) as server, ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda questions: chat(server.url, questions), chats))


def main(command: Sequence[str] | None = None) -> None:
    """Asks both models and writes the result."""
    exit_on_sigterm()
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--count", type=int, help="chats, from the first on; default: all")
    options = parser.parse_args(command)
    result = Result("chats", options.output)
    chats: list[list[str]] = json.loads(QUESTIONS.read_text(encoding="utf-8"))[: options.count]
    base = base_of(bundled_models()[MODEL])
    bound = ["--context", "2048", "--past", "slide"]
    given = {
        MODEL: answers(chats, "--model", MODEL, "--dtype", options.dtype),
        base.name: answers(chats, "--model", str(base), "--dtype", options.dtype, *bound),
    }
    rows: list[Figures] = [
        {"questions": questions, "answers": {name: each[i] for name, each in given.items()}}
        for i, questions in enumerate(chats)
    ]
    result.finish({"max_tokens": MAX_TOKENS, "chats": rows})


if __name__ == "__main__":
    main()
