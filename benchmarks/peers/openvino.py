"""OpenVINO GenAI as a contender: its continuous batching, on the same GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode.peers import PREFILL_TOKENS, Point, Unavailable
from benchmarks.peers.batching import KV_CACHE_GB, SUBJECTS, Batching


class OpenVino(Batching):
    """A `decode.peers.Contender`: the `SUBJECTS` called ``name``, from its GGUF file."""

    def __init__(self, models: Path, name: str) -> None:
        super().__init__(models, SUBJECTS[name])

    def load(self, point: Point) -> None:
        import openvino
        import openvino_genai as genai

        self._genai, self._tensor = genai, openvino.Tensor
        settings = genai.SchedulerConfig()
        settings.cache_size = KV_CACHE_GB
        settings.max_num_batched_tokens = PREFILL_TOKENS
        settings.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": point.threads}
        try:
            self._pipeline = genai.ContinuousBatchingPipeline(
                str(self.file(point)), settings, "CPU", properties
            )
        except RuntimeError as error:
            raise Unavailable(str(error).strip().splitlines()[-1]) from error
        self._handles: list[Any] = []

    def submit(self, name: int, ids: list[int], max_tokens: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = max_tokens, True
        tensor = self._tensor(np.array([ids], np.int64))
        self._handles.append(self._pipeline.add_request(name, tensor, config))

    def step(self) -> int:
        self._pipeline.step()
        made = 0
        for handle in [handle for handle in self._handles if handle.can_read()]:
            made += sum(len(output.generated_ids) for output in handle.read().values())
        running = self._genai.GenerationStatus.RUNNING
        self._handles = [handle for handle in self._handles if handle.get_status() == running]
        return made

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        if self._handles:
            self._pipeline.step()
        self._handles = []

    def variant(self) -> str:
        return f"OpenVINO GenAI {self._genai.__version__}, continuous batching"
