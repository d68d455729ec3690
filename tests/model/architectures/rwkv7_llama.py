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
num_probs = int(sys.argv[5])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 1024, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
# In float32, where flash attention adds up in 16 bits.
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
asked |= {"return_tokens": True, "verbose": num_probs == 0, "n_probs": num_probs}
asked |= json.loads(sys.argv[6])
answer = xllamacpp.Server(params).handle_completions(asked)
if num_probs == 0:
    said = answer["__verbose"]["tokens"]
else:  # of each token its id, and of each id its probability's logarithm
    places = answer["choices"][0]["logprobs"]["content"]
    said = [
        (place["id"], [(each["id"], each["logprob"]) for each in place["top_logprobs"]])
        for place in places
    ]
with open(out, "w") as file:
    json.dump(said, file)
"""


def run_llama(file: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """``num_tokens`` greedy tokens after ``prompt``."""
    tokens: list[int] = _run(file, prompt, num_tokens, 0)
    return tokens


def llama_logprobs(
    file: Path, prompt: list[int], num_tokens: int, vocab_size: int
) -> tuple[list[int], list[list[float]]]:
    """The same, and before each of them the logarithm of every id's probability."""
    tokens, rows = [], []
    for token, logprobs in _run(file, prompt, num_tokens, vocab_size):
        row = [float("nan")] * vocab_size
        for i, logprob in logprobs:
            row[i] = logprob
        tokens.append(token)
        rows.append(row)
    assert len(tokens) == num_tokens
    return tokens, rows


def logprobs_after(file: Path, prompt: list[int], vocab_size: int) -> list[float]:
    """The logarithm of every id's probability after ``prompt``; NaN where it is below -87.

    What is drawn is `LETTER`: llama.cpp says nothing of tokens that are no whole characters.
    """
    bias = {"logit_bias": [[LETTER, 1e4]]}  # which changes no probability that it says
    [(_, logprobs)] = _run(file, prompt, 1, vocab_size, bias)
    row = [float("nan")] * vocab_size
    for i, logprob in logprobs:
        if logprob > -87.0:
            row[i] = logprob
    return row


def _run(
    file: Path,
    prompt: list[int],
    num_tokens: int,
    num_probs: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The greedy tokens, or with ``num_probs`` pairs of a token and its place's (id, logarithm)."""
    out = file.with_suffix(".json")
    arguments = [str(file), json.dumps(prompt), str(num_tokens), str(out), str(num_probs)]
    arguments.append(json.dumps(dict(more)))
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text(encoding="utf-8"))
