"""Reads texts with `rwkv`, `transformers` or llama.cpp: `benchmarks.round_trip` runs this file.

    PYTHON benchmarks/round_trip/peers.py rwkv|transformers|llama FILE JOB RESULT

PYTHON needs numpy and the package (`rwkv` and torch, `transformers` and torch, or `llama_cpp`), and
nothing of Everstream. Everything is computed and kept in float32.
JOB is a JSON file: ``strings``; ``texts``, their token ids after that of the end of text;
``prompts``, token ids; and ``num_tokens``. RESULT gets ``nats``, the sum of -log p of all tokens of
the texts but their first ones; ``greedy``, for each prompt the likeliest ``num_tokens`` tokens
after it; of llama.cpp ``ids``, those of the strings by the tokenizer in its file; and ``version``,
that of the package.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
#: Token ids and whether they begin a text, to the logits after each [T, vocabulary].
Read = Callable[[list[int], bool], Logits]
Tokenize = Callable[[str], list[int]]


def rwkv_package(file: Path, max_tokens: int) -> tuple[Read, Tokenize | None]:
    """The package reads its settings from the environment at import."""
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
    import torch
    from rwkv.model import RWKV

    torch.set_num_threads(1)
    model: Any = RWKV(model=str(file.with_suffix("")), strategy="cpu fp32")
    state: Any = None

    def read(ids: list[int], begins: bool) -> Logits:
        nonlocal state
        logits, state = model.forward(ids, None if begins else state, full_output=True)
        found: Logits = logits.reshape(len(ids), -1).float().numpy()
        return found

    return read, None


def transformers_package(file: Path, max_tokens: int) -> tuple[Read, Tokenize | None]:
    """With a cache, where the folder's config allows it; else all of a text is read again."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
    has_cache = model.config.use_cache
    cache: Any = None
    text: list[int] = []

    @torch.no_grad()
    def read(ids: list[int], begins: bool) -> Logits:
        nonlocal cache, text
        text = ids if begins else text + ids
        past = {} if begins or not has_cache else {cache_name: cache}
        answer = model(torch.tensor([ids if has_cache else text]), use_cache=has_cache, **past)
        cache = getattr(answer, cache_name, None)
        found: Logits = answer.logits[0, -len(ids) :].numpy()
        return found

    return read, None


def llama_cpp(file: Path, max_tokens: int) -> tuple[Read, Tokenize | None]:
    """One sequence in one context."""
    from llama_cpp import GGML_TYPE_F32, Llama

    model: Any = Llama(
        str(file),
        n_ctx=max_tokens,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        verbose=False,
    )

    def read(ids: list[int], begins: bool) -> Logits:
        if begins:
            model.reset()
        model.eval(ids)
        end = model.n_tokens
        found: Logits = np.array(model.scores[end - len(ids) : end])
        return found

    def tokenize(text: str) -> list[int]:
        ids: list[int] = model.tokenize(text.encode(), add_bos=False, special=False)
        return ids

    return read, tokenize


#: The name of the distribution, and what opens a file.
PEERS = {
    "rwkv": ("rwkv", rwkv_package),
    "transformers": ("transformers", transformers_package),
    "llama": ("llama-cpp-python", llama_cpp),
}


def nats(read: Read, texts: list[list[int]]) -> float:
    """The sum of -log p over the texts, in float64."""
    total = 0.0
    for ids in texts:
        logits = read(ids[:-1], True).astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        log_sums = np.log(np.exp(logits).sum(axis=-1))
        total += float((log_sums - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
    return total


def greedy(read: Read, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest tokens after ``prompt``, one by one."""
    found = [int(read(prompt, True)[-1].argmax())]
    while len(found) < num_tokens:
        found.append(int(read(found[-1:], False)[-1].argmax()))
    return found


def main(peer: str, file: str, job_file: str, result_file: str) -> None:
    """See the module's docstring."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    texts, prompts, num_tokens = job["texts"], job["prompts"], job["num_tokens"]
    longest = max(map(len, texts)), max(map(len, prompts)) + num_tokens
    package, open_file = PEERS[peer]
    read, tokenize = open_file(Path(file), max(longest))
    result = {
        "version": f"{package} {version(package)}",
        "ids": [tokenize(string) for string in job["strings"]] if tokenize else None,
        "nats": nats(read, texts),
        "greedy": [greedy(read, prompt, num_tokens) for prompt in prompts],
    }
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
