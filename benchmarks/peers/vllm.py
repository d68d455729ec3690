"""vLLM as a contender: its engine in this process, in bfloat16, compiled, with its prefix cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.decode.peers import PREFILL_TOKENS, Point
from benchmarks.peers.batching import KV_CACHE_GB, ROOM, SUBJECTS, Batching
from benchmarks.process import ROOT, make_once

MAX_STREAMS = 64
LONGEST_PAST = 32768
DTYPE = "bfloat16"


class Vllm(Batching):
    """A `decode.peers.Contender`: the `SUBJECTS` called ``name``, as a folder of its weights."""

    def __init__(self, models: Path, name: str) -> None:
        super().__init__(models, SUBJECTS[name])

    def load(self, point: Point) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{point.threads - 1}",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=str(self._model(point)),
                skip_tokenizer_init=True,
                dtype=DTYPE,
                max_model_len=LONGEST_PAST + 4 * ROOM,
                max_num_seqs=MAX_STREAMS,
                max_num_batched_tokens=PREFILL_TOKENS,
                enable_prefix_caching=True,
                disable_log_stats=True,
            )
        )
        self._running: set[str] = set()

    def submit(self, name: int, ids: list[int], max_tokens: int) -> None:
        sampling: Any = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(name), {"prompt_token_ids": ids}, sampling)
        self._running.add(str(name))

    def step(self) -> int:
        outputs = self._engine.step()
        self._running -= {output.request_id for output in outputs if output.finished}
        return len(outputs)

    def cancel(self) -> None:
        if self._running:
            self._engine.abort_request(list(self._running))
            self._engine.step()
        self._running = set()

    def variant(self) -> str:
        return f"vLLM {self._vllm.__version__}, compiled, bfloat16"

    def _model(self, point: Point) -> Path:
        """The weights as a folder in its publisher's form, made where it is missing."""
        path = self.folder / f"{point.size}-{DTYPE}-hf"

        def write(part: Path) -> None:
            command = ["server.cli.main", "export", str(self.file(point)), str(part)]
            options = ["--format", "hf", "--dtype", DTYPE]
            subprocess.run([sys.executable, "-m", *command, *options], cwd=ROOT, check=True)

        return make_once(path, write)
