"""The original of the bundled chat model in our own runtime, with a bounded past."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.checkpoints import chat
from benchmarks.checkpoints.contenders import Chat
from benchmarks.decode.peers import PREFILL_TOKENS, Opened, Point, Unavailable
from benchmarks.decode.roofline import Cost
from benchmarks.machine import available_bytes
from model.architectures.hybrid import BoundedConfig, with_past
from model.checkpoint import load_checkpoint
from model.native.runtime import Runtime

#: Of memory that is available, what the keys and values of all streams may take.
MEMORY_PART = 0.4


class Original(Chat):
    """A `decode.peers.Contender`: from the file that llama.cpp reads."""

    max_read_tokens: ClassVar = 8192

    def open(self, point: Point) -> Opened:
        wanted = point.streams * (point.context + chat.ROOM) * chat.position_bytes()
        if wanted > MEMORY_PART * available_bytes():
            raise Unavailable(f"its keys and values would take {wanted / 2**30:.1f} GiB")
        self._loaded = None  # each past has a bound of its own
        return super().open(point)

    def make_runtime(self, point: Point) -> Runtime:
        self._pasts = {}
        loaded = load_checkpoint(chat.file_of(self.folder, point.size, point.dtype))
        assert isinstance(loaded.config, BoundedConfig), loaded.config
        context = max(point.context, PREFILL_TOKENS) + 2 * chat.ROOM
        bounded = with_past(loaded.config, context, "stop")
        return Runtime(bounded, loaded.weights, point.dtype, point.threads)

    def cost(self, item_bytes: float, rows: int, point: Point) -> Cost:
        return chat.original_cost(self._runtime.num_bytes, point)
