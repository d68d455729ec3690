"""The child that tries formats out: `python -m server.constraints.worker`.

It reads frames (`server.workers.frames`) from its input and answers each with
one: first the vocabulary, then formats, until the input ends. What it tries may hurt
it: it has a bound on memory, one on processor time for each format, and a small
stack, and its parent kills it after a time. It knows nothing of the server.
"""

from __future__ import annotations

import base64
import math
import resource
import sys
import threading
from collections.abc import Mapping
from typing import Any

from server.constraints.grammar import Vocabulary, grammar_text, with_costs
from server.constraints.schema import FormatRefused
from server.workers.frames import read_frame, write_frame

#: The server's threads have 8 MiB: what fits here fits there.
STACK_BYTES = 2 << 20


def main() -> None:
    """Serves until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    _limit(resource.RLIMIT_AS, setup["max_memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    tokens = [base64.b85decode(text) for text in setup["tokens"]]
    vocabulary = Vocabulary(tokens, setup["eos_token_id"])
    write_frame(answers, {"ready": True})
    while (format := read_frame(requests)) is not None:
        _limit_cpu(setup["max_cpu_s"])
        write_frame(answers, answer(format, vocabulary))


def setup_request(
    vocabulary: Vocabulary, max_memory_bytes: int, max_cpu_s: float
) -> dict[str, Any]:
    """What a worker needs before all else."""
    return {
        "tokens": [base64.b85encode(text).decode() for text in vocabulary.token_bytes],
        "eos_token_id": vocabulary.eos_token_id,
        "max_memory_bytes": max_memory_bytes,
        "max_cpu_s": max_cpu_s,
    }


def answer(format: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, str]:
    """``grammar``, or ``refused`` with the reason."""
    try:
        functions = [function["name"] for function in format.get("functions", ())]
        return {"grammar": with_costs(grammar_text(format), vocabulary, functions)}
    except FormatRefused as refusal:
        return {"refused": str(refusal)}
    except RecursionError:
        return {"refused": "is nested too deeply"}
    except MemoryError:
        return {"refused": "takes too much memory"}


def _limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _limit_cpu(more_s: float) -> None:
    """Ends this process when it has computed so much longer, even without a parent."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + more_s))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=main)
    serving.start()
    serving.join()
