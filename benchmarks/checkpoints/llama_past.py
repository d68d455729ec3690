"""A long past in llama.cpp's cache without a long prefill.

One block of random ids is read. Its keys and values are repeated with later positions: speed and
memory depend on how many there are, not on what they are.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

from benchmarks.checkpoints.llama_state import Bytes, repeated
from benchmarks.decode.llama_session import Session
from benchmarks.decode.peers import PREFILL_TOKENS


class LongPast(Session):
    """A context of llama.cpp whose past is one block of `PREFILL_TOKENS`, repeated."""

    def _fill(self) -> None:
        if not self.point.context:
            return
        times, rest = divmod(self.point.context, PREFILL_TOKENS)
        assert rest == 0, self.point
        self._fill_block(0, PREFILL_TOKENS)
        size = llama_cpp.llama_state_seq_get_size(self._raw, 0)
        block = np.empty(size, np.uint8)
        assert llama_cpp.llama_state_seq_get_data(self._raw, _pointer(block), size, 0) == size
        past = repeated(block, times)
        code = llama_cpp.llama_state_seq_set_data(self._raw, _pointer(past), len(past), 0)
        assert code == len(past), "llama.cpp does not read a past of this form"
        for sequence in range(1, self.point.streams):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)


def _pointer(data: Bytes) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * len(data)).from_buffer(data)
