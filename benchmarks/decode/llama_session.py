"""A context of llama.cpp, through the low-level interface of `llama_cpp`: a token per sequence.

Tokens are chosen ahead, so that no time goes into sampling. Where sequences have a past, the first
is filled by a real prefill of random ids, and its keys and values are copied into the others. The
state of an RWKV-7 does not grow, so its past is a position alone. A model with both cannot be cut
back to a past: it has room for all that is measured.
"""

from __future__ import annotations

import os
import time
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.decode.peers import MAX_FILL_S, PREFILL_TOKENS, Measured, Point, Unavailable
from benchmarks.decode.shapes import Size

#: Tokens that a sequence may grow by before it is cut back.
ROOM = 128
FLASH = {
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


class Batch:
    """A `llama_batch` whose tokens all have logits, or the last one alone."""

    def __init__(self, sequences: NDArray[np.int32], all_logits: bool) -> None:
        n = len(sequences)
        self.raw = llama_cpp.llama_batch_init(n, 0, 1)
        self.raw.n_tokens = n
        self.tokens = np.ctypeslib.as_array(self.raw.token, (n,))
        self.positions = np.ctypeslib.as_array(self.raw.pos, (n,))
        for i, sequence in enumerate(sequences):
            self.raw.n_seq_id[i] = 1
            self.raw.seq_id[i][0] = int(sequence)
            self.raw.logits[i] = all_logits or i == n - 1

    def free(self) -> None:
        llama_cpp.llama_batch_free(self.raw)


class Session:
    """A context of llama.cpp with ``streams`` sequences of ``context`` tokens each."""

    def __init__(
        self,
        model: Any,
        size: Size,
        recurrent: bool,
        point: Point,
        flash: str,
        room: int = ROOM,
    ) -> None:
        self._size, self._recurrent, self.point, self._room = size, recurrent, point, room
        self._draw = np.random.default_rng(0)
        params = llama_cpp.llama_context_default_params()
        length = PREFILL_TOKENS if point.mode == "prefill" else point.context + room
        params.n_ctx = point.streams * -(-length // 256) * 256
        params.n_batch = params.n_ubatch = max(PREFILL_TOKENS, point.streams)
        params.n_seq_max = point.streams
        params.n_threads = params.n_threads_batch = point.threads
        params.flash_attn_type = FLASH[flash]
        params.no_perf = True
        self._raw = llama_cpp.llama_init_from_model(model, params)
        if self._raw is None:
            raise Unavailable("llama.cpp makes no such context")
        self._memory = llama_cpp.llama_get_memory(self._raw)
        prompt = point.mode == "prefill"
        sequences = np.zeros(PREFILL_TOKENS) if prompt else np.arange(point.streams)
        self._batch = Batch(sequences.astype(np.int32), all_logits=not prompt)
        try:
            self._fill()
        except BaseException:
            self.free()
            raise
        self._rewind()

    def run(self, seconds: float) -> Measured:
        """Steps until ``seconds`` of them are over; cutting the sequences back is not counted."""
        num_steps, elapsed = 0, 0.0
        while num_steps == 0 or elapsed < seconds:
            if self._is_full():
                self._rewind()
            start = time.perf_counter()
            self._step()
            elapsed += time.perf_counter() - start
            num_steps += 1
        return Measured(num_steps * self._batch.raw.n_tokens, elapsed)

    def _is_full(self) -> bool:
        if self.point.mode == "prefill":
            return True
        return (
            not self._recurrent and int(self._batch.positions[0]) == self.point.context + self._room
        )

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """A copy of the logits [len(tokens), vocabulary] after one token in each sequence."""
        self._batch.tokens[:] = tokens
        self._decode(self._batch)
        raw = llama_cpp.llama_get_logits(self._raw)
        return np.ctypeslib.as_array(raw, (len(tokens), self._size.vocab_size)).copy()

    def set_threads(self, threads: int) -> None:
        llama_cpp.llama_set_n_threads(self._raw, threads, threads)

    def free(self) -> None:
        self._batch.free()
        llama_cpp.llama_free(self._raw)

    def _step(self) -> None:
        self._decode(self._batch)
        llama_cpp.llama_synchronize(self._raw)
        if self.point.mode == "decode":
            self._batch.positions += 1

    def _decode(self, batch: Batch) -> None:
        code = llama_cpp.llama_decode(self._raw, batch.raw)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _rewind(self) -> None:
        """Back to ``context`` tokens in every sequence."""
        if self.point.mode == "prefill" or self._recurrent:
            llama_cpp.llama_memory_clear(self._memory, False)
        else:
            for sequence in range(self.point.streams):
                context = self.point.context
                if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, context, -1):
                    raise RuntimeError("llama.cpp cannot cut this model's sequences back")
        self._batch.tokens[:] = self._ids(len(self._batch.tokens))
        self._batch.positions[:] = self.point.context
        if self.point.mode == "prefill":
            self._batch.positions[:] = np.arange(PREFILL_TOKENS)

    def _fill(self) -> None:
        if self._recurrent or not self.point.context:
            return
        self.set_threads(os.cpu_count() or 1)
        start = time.perf_counter()
        for first in range(0, self.point.context, PREFILL_TOKENS):
            begun = time.perf_counter()
            self._fill_block(first, min(PREFILL_TOKENS, self.point.context - first))
            now = time.perf_counter()
            # No later block is faster than this one, as each reads all that came before it.
            left = (self.point.context - first) // PREFILL_TOKENS
            if now - start + left * (now - begun) > MAX_FILL_S:
                raise Unavailable(f"to prefill {self.point.context:,} takes over {MAX_FILL_S:g} s")
        for sequence in range(1, self.point.streams):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self.set_threads(self.point.threads)

    def _fill_block(self, first: int, num_tokens: int) -> None:
        batch = Batch(np.zeros(num_tokens, np.int32), all_logits=False)
        batch.tokens[:] = self._ids(num_tokens)
        batch.positions[:] = first + np.arange(num_tokens)
        try:
            self._decode(batch)
            llama_cpp.llama_synchronize(self._raw)
        finally:
            batch.free()

    def _ids(self, num_tokens: int) -> NDArray[np.int64]:
        return self._draw.integers(1, self._size.vocab_size, num_tokens)
