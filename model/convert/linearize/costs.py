"""What a conversion takes, from the sizes of the model: memory, and hours at measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from model.convert.linearize.chats import MAX_CHAT, ROWS
from model.convert.linearize.plan import LlamaShape, Plan
from model.convert.linearize.source import matrix_sizes
from model.convert.linearize.student import MAX_BLOCK

#: Bytes of a trained number: itself, its gradient, two moments of Adam and the average.
TRAINED_BYTES = 20
#: How often the backward pass needs features of a head.
FEATURE_COPIES = {"none": 0, "relative": 4, "delta": 8}
#: Next to what the backward pass needs, as measured with SmolLM2-135M.
TEMPORARY = 1.15
#: Of Python, torch and the texts.
PROGRAM_BYTES = 400 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes that the training takes, by part. Chats are written before it."""

    source: int
    trained: int
    step: int
    chats: int

    @property
    def most(self) -> int:
        """What is needed at once."""
        training = self.trained + self.step
        return PROGRAM_BYTES + self.source + max(training, self.chats)


def num_weights(shape: LlamaShape) -> int:
    """Numbers of the source's matrices, its embedding once."""
    layer = sum(rows * columns for rows, columns in matrix_sizes(shape).values())
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    return shape.num_layers * layer + tables


def num_trained(shape: LlamaShape, plan: Plan, ranks: dict[str, int]) -> int:
    """Numbers that are trained."""
    sizes = matrix_sizes(shape)
    updates = sum(
        rank * sum(sizes[name]) if rank else sizes[name][0] * sizes[name][1]
        for name, rank in ranks.items()
    )
    width = shape.head_dim
    maps = sum(
        (shape.num_heads + shape.num_kv_heads) * width * layer.features // 2
        for layer in plan.layers
    )
    return shape.num_layers * updates + maps


def memory(
    shape: LlamaShape, plan: Plan, ranks: dict[str, int], length: int, matrix_bytes: int
) -> Memory:
    """That of training on sequences of up to ``length`` tokens, one at a time."""
    numbers, weights = 0.0, num_weights(shape)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    for layer in plan.layers:
        # What the backward pass needs of a token: the inputs of all products, q, k and v before
        # and after their rotation, the share of each key that it sees, and the features.
        numbers += 4 * shape.hidden_size + 4 * heads * shape.head_dim + 3 * shape.intermediate_size
        # As far as tokens have more before them than the window.
        part = max(0.0, 1.0 - layer.window / length)
        seen = layer.window + min(layer.window, MAX_BLOCK) + plan.sinks
        far = FEATURE_COPIES[layer.far] * heads * layer.features
        numbers += part * (shape.num_heads * seen + far)
    past = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (MAX_CHAT + 1)
    return Memory(
        source=weights * matrix_bytes,
        trained=num_trained(shape, plan, ranks) * TRAINED_BYTES,
        step=int(TEMPORARY * 4 * numbers * length),
        chats=2 * weights + 4 * ROWS * past,
    )


@dataclass(frozen=True)
class Rates:
    """Tokens per second of each stage, for a model of one weight."""

    chats: float
    match: float
    train: float


def _rates(chats: float, match: float, train: float) -> Rates:
    """From tokens per second of SmolLM2-135M."""
    weights = num_weights(SMOLLM2_135M)
    return Rates(chats * weights, match * weights, train * weights)


def hours(shape: LlamaShape, rates: Rates, chats: int, match: int, train: int) -> float:
    """Hours of so many tokens of each stage, in proportion to the weights that a token meets."""
    seconds = chats / rates.chats + match / rates.match + train / rates.train
    return num_weights(shape) * seconds / 3600


SMOLLM2_135M = LlamaShape(49152, 576, 30, 9, 3, 64, 1536, 1e5, 1e-5)
#: Measured in float32, in tokens per second of a core: 170 of chats, 170 of matching, 64 of KL.
TWO_CORES = _rates(2 * 170, 2 * 170, 2 * 64)
#: Not measured: a GPU that reaches 20 TFLOP/s is 290 such cores. Chats are written by 16 cores.
GPU = _rates(16 * 170, 290 * 170, 290 * 64)
#: Models whose costs the documentation has: their shapes from the published configs.
EXAMPLES = {
    "SmolLM2-135M": SMOLLM2_135M,
    "SmolLM2-360M": LlamaShape(49152, 960, 32, 15, 5, 64, 2560, 1e5, 1e-5),
    "Llama 3.2 1B": LlamaShape(128256, 2048, 16, 32, 8, 64, 8192, 5e5, 1e-5),
    "Qwen3 0.6B": LlamaShape(151936, 1024, 28, 16, 8, 128, 3072, 1e6, 1e-6, qk_norm=True),
}
