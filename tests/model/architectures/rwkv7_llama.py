"""Runs llama.cpp on a GGUF file, in a process of its own: it logs in plain text and keeps threads.

The package is `xllamacpp`, a build of llama.cpp's server as a library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: A token of `tests.tiny.tiny_tokenizer` that is a letter.
LETTER = 53

CODE = """
import json, sys
import xllamacpp
path, prompt, count, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 1024, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
asked |= {"return_tokens": True, "verbose": True, "n_probs": int(sys.argv[5])}
asked |= json.loads(sys.argv[6])
answer = xllamacpp.Server(params).handle_completions(asked)
with open(out, "w") as file:
    json.dump(answer, file)
"""


def run_llama(file: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """``num_tokens`` greedy tokens after ``prompt``."""
    tokens: list[int] = _run(file, prompt, num_tokens, 0)["__verbose"]["tokens"]
    return tokens


def llama_logprobs(
    file: Path, prompt: list[int], num_tokens: int, vocab_size: int
) -> tuple[list[int], list[list[float]]]:
    """The same, and before each of them the logarithm of every id's probability."""
    answer = _run(file, prompt, num_tokens, vocab_size)["__verbose"]
    rows = []
    for place in answer["completion_probabilities"]:
        row = [float("nan")] * vocab_size
        for found in place["top_logprobs"]:
            row[found["id"]] = found["logprob"]
        rows.append(row)
    return answer["tokens"], rows


def logprobs_after(file: Path, prompt: list[int], vocab_size: int) -> list[float]:
    """The logarithm of every id's probability after ``prompt``; NaN where it is below -87.

    What is drawn is `LETTER`: llama.cpp says nothing of tokens that are no whole characters.
    """
    bias = {"logit_bias": [[LETTER, 1e4]]}  # which changes no probability that it says
    answer = _run(file, prompt, 1, vocab_size, bias)["__verbose"]
    row = [float("nan")] * vocab_size
    for found in answer["completion_probabilities"][0]["top_logprobs"]:
        if found["logprob"] > -87.0:
            row[found["id"]] = found["logprob"]
    return row


def _run(
    file: Path,
    prompt: list[int],
    num_tokens: int,
    num_probs: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    out = file.with_suffix(".json")
    arguments = [str(file), json.dumps(prompt), str(num_tokens), str(out), str(num_probs)]
    arguments.append(json.dumps(dict(more)))
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return answer
