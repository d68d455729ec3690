"""llama.cpp on the same GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from benchmarks.checkpoints import chat, hybrids
from benchmarks.checkpoints.folders import config_of, gguf_of
from benchmarks.checkpoints.llama_past import LongPast
from benchmarks.checkpoints.shapes import CONFIGS, file_of
from benchmarks.decode.llama import LlamaCpp
from benchmarks.decode.models import step_cost
from benchmarks.decode.peers import PREFILL_TOKENS, Point
from benchmarks.decode.roofline import ITEM_BYTES, Cost
from benchmarks.decode.shapes import Shapes, Size

DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "Q8_0": "int8",
    "Q4_0": "int4",
    "its own Q4_0": "q4_0",
    "its own Q4_K_M": "q4_k_m",
}


class FromFile(LlamaCpp):
    """A `decode.peers.Contender`, with the number of threads that is fastest."""

    file_types: ClassVar = {dtype: (file_type,) for file_type, dtype in DTYPES.items()}

    def __init__(self, models: Path) -> None:
        super().__init__(models, "rwkv7")

    def size_of(self, point: Point) -> Size:
        config = CONFIGS[point.size]
        return Size(
            point.size,
            config.vocab_size,
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.intermediate_size,
        )

    def file(self, size: Size, file_type: str) -> Path:
        return file_of(self.folder, size.name, DTYPES[file_type])

    def tensors(self, size: Size) -> Shapes:
        return CONFIGS[size.name].weight_shapes()

    def cost(self, size: Size, point: Point) -> Cost:
        rows = PREFILL_TOKENS if point.mode == "prefill" else point.streams
        return step_cost(CONFIGS[point.size], ITEM_BYTES[point.dtype], rows, point.streams)


class HybridFromFile(LlamaCpp):
    """A `decode.peers.Contender`: llama.cpp on the same file, with keys and values of 16 bits."""

    file_types: ClassVar = {dtype: (file_type,) for file_type, dtype in DTYPES.items()}
    room: ClassVar = hybrids.ROOM

    def __init__(self, models: Path) -> None:
        super().__init__(models, "hybrid")

    def size_of(self, point: Point) -> Size:
        config = hybrids.CONFIGS[point.size]
        return Size(
            point.size,
            config.vocab_size,
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.intermediate_size,
            config.head_dim,
        )

    def file(self, size: Size, file_type: str) -> Path:
        return hybrids.file_of(self.folder, size.name, DTYPES[file_type])

    def tensors(self, size: Size) -> Shapes:
        return hybrids.CONFIGS[size.name].weight_shapes()

    def position_bytes(self, size: Size) -> int:
        return 2 * hybrids.position_numbers(hybrids.CONFIGS[size.name])

    def cost(self, size: Size, point: Point) -> Cost:
        return hybrids.step_cost(point, self.position_bytes(size))


class MambaFromFile(LlamaCpp):
    """A `decode.peers.Contender`, with the number of threads that is fastest."""

    file_types: ClassVar = {dtype: (file_type,) for file_type, dtype in DTYPES.items()}

    def __init__(self, models: Path) -> None:
        super().__init__(models, "mamba2")

    def size_of(self, point: Point) -> Size:
        config = config_of(point.size)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return Size(point.size, config.vocab_size, config.hidden_size, layers, heads, 0)

    def file(self, size: Size, file_type: str) -> Path:
        return gguf_of(self.folder, size.name, DTYPES[file_type])

    def tensors(self, size: Size) -> Shapes:
        return config_of(size.name).weight_shapes()

    def cost(self, size: Size, point: Point) -> Cost:
        rows = PREFILL_TOKENS if point.mode == "prefill" else point.streams
        return step_cost(config_of(point.size), ITEM_BYTES[point.dtype], rows, point.streams)


class Chat(LlamaCpp):
    """A `decode.peers.Contender`: the original of the bundled chat model, as its file has it."""

    file_types: ClassVar = dict.fromkeys(("int8", "int4"), ("Q4_1",))
    room: ClassVar = chat.ROOM
    session: ClassVar = LongPast

    def __init__(self, models: Path) -> None:
        super().__init__(models, "llama")

    def size_of(self, point: Point) -> Size:
        config = chat.CONFIG
        return Size(
            point.size,
            config.vocab_size,
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.intermediate_size,
            config.head_dim,
        )

    def file(self, size: Size, file_type: str) -> Path:
        return chat.file_of(self.folder, size.name, file_type)

    def tensors(self, size: Size) -> Shapes:
        return chat.ORIGINAL.weight_shapes()

    def position_bytes(self, size: Size) -> int:
        return chat.position_bytes()

    def cost(self, size: Size, point: Point) -> Cost:
        return chat.original_cost(self.file(size, "Q4_1").stat().st_size, point)
