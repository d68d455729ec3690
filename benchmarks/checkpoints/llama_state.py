"""A saved sequence of llama.cpp with a longer past, without a long prefill.

Its form is that of `llama_kv_cache::state_write` in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def repeated(state: Bytes, times: int) -> Bytes:
    """A saved sequence with all that it has ``times`` over, each time at later positions."""
    reader = _Reader(state)
    reader.copy(12)  # what it is, the sequence, and the number of streams; it is in the first
    length = reader.number()
    reader.parts.append(np.array([length * times], np.uint32).view(np.uint8))
    cells = reader.take(length * 12).view(np.int32).reshape(length, 3)  # position, 1, sequence
    later = np.tile(cells, (times, 1))
    later[:, 0] = np.arange(length * times)
    reader.parts.append(later.reshape(-1).view(np.uint8))
    transposed = reader.copy(4).view(np.uint32)[0]
    num_layers = reader.copy(4).view(np.uint32)[0]
    for kind in ("k", "v"):
        for _ in range(num_layers):
            reader.copy(4)  # type
            if kind == "v" and transposed:
                size, rows = reader.copy(8).view(np.uint32)
                values = reader.take(int(rows) * length * int(size)).reshape(int(rows), -1)
                reader.parts.append(np.tile(values, (1, times)).reshape(-1))
            else:
                row_bytes = int(reader.copy(8).view(np.uint64)[0])
                reader.parts.append(np.tile(reader.take(length * row_bytes), times))
    reader.copy(len(state) - reader.at)  # other streams, which are empty
    return np.concatenate(reader.parts)


class _Reader:
    """What was read of ``state``, and the ``parts`` of another one."""

    def __init__(self, state: Bytes) -> None:
        self._state, self.at = state, 0
        self.parts: list[Bytes] = []

    def take(self, num_bytes: int) -> Bytes:
        self.at += num_bytes
        assert self.at <= len(self._state), (self.at, len(self._state))
        return self._state[self.at - num_bytes : self.at].copy()

    def number(self) -> int:
        return int(self.take(4).view(np.uint32)[0])

    def copy(self, num_bytes: int) -> Bytes:
        self.parts.append(self.take(num_bytes))
        return self.parts[-1]
