"""llama.cpp for the process of `benchmarks.oracle`.

    python -m benchmarks.oracle_llama_cpp '{"file": "MODEL.gguf", "prompts": [[1, 2]], "count": 9}'

Prints a line of JSON: for each prompt its greedy tokens, each as its id and the likeliest ids with
the logarithms of their probabilities.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp

#: Ids of each token that are listed.
NUM_LISTED = 100

Place = tuple[int, list[tuple[int, float]]]


def main() -> None:
    """Reads the argument, and prints."""
    asked = json.loads(sys.argv[1])
    prompts, count = asked["prompts"], asked["count"]
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.warmup = asked["file"], 1, False
    params.n_ctx = max(map(len, prompts)) + count
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(json.dumps([written(server, prompt, count) for prompt in prompts]))


def written(server: Any, prompt: list[int], count: int) -> list[Place]:
    """``count`` tokens after ``prompt``."""
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "n_probs": NUM_LISTED}
    answer = server.handle_completions(body | {"ignore_eos": True})
    places = answer["choices"][0]["logprobs"]["content"]
    return [
        (place["id"], [(each["id"], each["logprob"]) for each in place["top_logprobs"]])
        for place in places
    ]


if __name__ == "__main__":
    main()
