"""Runs llama.cpp on a GGUF file, in a process of its own: it logs in plain text and keeps threads.

The package is `xllamacpp`, a build of llama.cpp's server as a library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import json, sys
import xllamacpp
path, prompt, count, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 1024, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
asked |= {"return_tokens": True, "verbose": True}
answer = xllamacpp.Server(params).handle_completions(asked)
with open(out, "w") as file:
    json.dump(answer, file)
"""


def run_llama(file: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """``num_tokens`` greedy tokens after ``prompt``."""
    out = file.with_suffix(".json")
    arguments = [str(file), json.dumps(prompt), str(num_tokens), str(out)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens: list[int] = json.loads(out.read_text(encoding="utf-8"))["__verbose"]["tokens"]
    return tokens
