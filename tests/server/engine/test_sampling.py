"""What a request may ask of the draws; an error names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from server.engine.sampling import MAX_BIASED_IDS, check_params, has_filter, has_penalty
from server.engine.types import Dry, SamplingParams
from server.errors import InvalidRequest

VOCAB_SIZE = 2000


@pytest.mark.parametrize(
    "params",
    [
        *({"temperature": value} for value in (0.0, 5e-324, 1e-5, 0.001, 100.0)),
        *({"top_p": value} for value in (0.0, 1e-9, 1.0)),
        {"typical_p": 1e-9},
        {"typical_p": 1.0},
        *({"top_n_sigma": value} for value in (0.0, 5e-324, 100.0)),
        *({"xtc_probability": value, "xtc_threshold": value} for value in (0.0, 1.0)),
        *({"dry": Dry(*values)} for values in ((0.0, 1.0, 1, 0), (100.0, 100.0, 256, 256))),
        {"dry": Dry(1.0, breakers=(0, VOCAB_SIZE - 1))},
        {"logit_bias": ((0, -100.0), (VOCAB_SIZE - 1, 100.0))},
        {"logit_bias": tuple((id, 0.0) for id in range(MAX_BIASED_IDS))},
        {"top_logprobs": 0},
        {"top_logprobs": 20},
    ],
)
def test_what_is_in_range_is_taken(params: dict[str, Any]) -> None:
    check_params(SamplingParams(**params), VOCAB_SIZE)


@pytest.mark.parametrize(
    "params",
    [
        *({"temperature": value} for value in (-0.01, 100.1, math.nan)),
        *({"top_p": value} for value in (-0.01, 1.01, math.nan)),
        *({"typical_p": value} for value in (0.0, -0.1, 1.0001, math.nan, math.inf)),
        *({"top_n_sigma": value} for value in (-0.1, 100.1, math.nan, math.inf)),
        *({"xtc_probability": value} for value in (-0.1, 1.1, math.nan)),
        *({"xtc_threshold": value} for value in (-0.1, 1.1, math.nan)),
        *({"logit_bias": ((3, value),)} for value in (100.1, -100.1, math.nan, math.inf)),
        *({"logit_bias": ((5, 1.0), (id, 1.0))} for id in (-1, VOCAB_SIZE, 2**40, 5)),
        {"logit_bias": tuple((id, 0.0) for id in range(MAX_BIASED_IDS + 1))},
        *({"top_logprobs": value} for value in (-1, 21, 2**40)),
    ],
)
def test_what_is_out_of_range_is_named(params: dict[str, Any]) -> None:
    (field,) = params
    with pytest.raises(InvalidRequest, match=f"^{field}: must ") as caught:
        check_params(SamplingParams(**params), VOCAB_SIZE)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("dry", "field"),
    [
        *((Dry(value), "dry_multiplier") for value in (-0.1, 100.1, math.nan)),
        *((Dry(1.0, value), "dry_base") for value in (0.9, 100.1, math.nan)),
        *((Dry(1.0, allowed_length=value), "dry_allowed_length") for value in (0, 257)),
        *((Dry(1.0, penalty_last_n=value), "dry_penalty_last_n") for value in (-1, 257)),
        *((Dry(1.0, breakers=(id,)), "dry_sequence_breakers") for id in (-1, VOCAB_SIZE)),
        (Dry(1.0, breakers=(1,) * 65), "dry_sequence_breakers"),
    ],
)
def test_what_is_out_of_range_of_dry_is_named(dry: Dry, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_params(SamplingParams(dry=dry), VOCAB_SIZE)
    assert caught.value.param == field


def test_dry_reads_the_recent_tokens_as_penalties_do() -> None:
    assert has_penalty(SamplingParams(dry=Dry(1.0)))
    assert not has_penalty(SamplingParams())


def test_typical_p_and_top_n_sigma_are_filters_and_bias_is_none() -> None:
    assert has_filter(SamplingParams(typical_p=0.9))
    assert has_filter(SamplingParams(top_n_sigma=1.0))
    assert has_filter(SamplingParams(xtc_probability=1.0))
    assert not has_filter(SamplingParams(typical_p=1.0, logit_bias=((3, 1.0),), top_logprobs=3))
