"""The roofline: what a step costs, what the machine allows, and who of the two limits sets it."""

from __future__ import annotations

from benchmarks.decode.models import config_of, step_cost
from benchmarks.decode.roofline import Cost, Limit, matrix_cost
from benchmarks.decode.shapes import SIZES
from model.state import StateLayout


def test_matrices_are_read_once_and_used_for_every_row() -> None:
    tensors = {
        "embedding.weight": (100, 8),
        "norm.weight": (8,),
        "up.weight": (16, 8),
        "head.weight": (100, 8),
    }
    one = matrix_cost(tensors, 2, rows=1, num_logits=1, embedding="embedding")
    # A row of the embedding, the norm in float32, two matrices in 16 bits, logits in float32.
    assert one == Cost(8 * 2 + 8 * 4 + (128 + 800) * 2 + 100 * 4, 2 * (128 + 800))
    many = matrix_cost(tensors, 2, rows=5, num_logits=3, embedding="embedding")
    assert many.num_bytes - one.num_bytes == 4 * 8 * 2 + 2 * 100 * 4
    assert many.operations == 2 * (128 * 5 + 800 * 3)


def test_each_stream_moves_its_state_in_and_out() -> None:
    config = config_of(SIZES["tiny"], "gated")
    one, two = (step_cost(config, 2, streams, streams) for streams in (1, 2))
    row_and_logits = config.hidden_size * 2 + config.vocab_size * 4
    assert two.num_bytes - one.num_bytes == 2 * StateLayout.of(config).num_bytes + row_and_logits


def test_the_slower_of_the_two_sets_the_limit() -> None:
    moving = Limit.of(Cost(num_bytes=100, operations=10), bytes_per_s=50, operations_per_s=50)
    assert (moving.seconds, moving.bound) == (2.0, "bandwidth")
    computing = Limit.of(Cost(num_bytes=10, operations=100), bytes_per_s=50, operations_per_s=25)
    assert (computing.seconds, computing.bound) == (4.0, "arithmetic")
    assert computing.fraction(8.0) == 0.5
