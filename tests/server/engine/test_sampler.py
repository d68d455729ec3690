from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from server.engine.runner import NOT_FINITE
from server.engine.torch_runner import Draw, sample, scores_of, uniform
from server.engine.types import Dry, SamplingParams
from tests.draws import (
    KINDS,
    REPETITIONS,
    SIGMA,
    SIGMA_OF,
    TYPICAL,
    TYPICAL_OF,
    XTC,
    XTC_OF,
    Params,
    allowed,
    mask_of,
    random_logits,
    random_mask,
    random_params,
    random_recent,
)


def draw(position: int = 0, recent: tuple[int, ...] = (), **params: object) -> Draw:
    return Draw(SamplingParams(**params), position, recent)  # type: ignore[arg-type]


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).log()


def frequencies(
    logits: Tensor, num: int = 4000, recent: tuple[int, ...] = (), **params: object
) -> dict[int, float]:
    draws = [draw(position=i, recent=recent, **params) for i in range(num)]
    counts = Counter(sample(logits.expand(num, -1), draws))
    return {token: count / num for token, count in counts.items()}


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 5e-324}, {"temperature": 9e-6}, {"top_p": 0.0}]
)
def test_least_temperature_and_top_p_are_greedy(params: dict[str, float]) -> None:
    """Also of two tokens whose probabilities are one in float32, and of large logits."""
    assert sample(logits_of(0.2, 0.5, 0.3).unsqueeze(0), [draw(**params)]) == [1]
    near = torch.tensor([[1.0, 1.0 + 2**-23], [3e38, -3e38]])
    assert sample(near, [draw(seed=5, **params), draw(**params)]) == [1, 0]


def test_low_temperature_is_nearly_greedy() -> None:
    found = frequencies(torch.tensor([0.0, 2e-5, -1.0]), temperature=1e-5)
    wanted = 1 / (1 + math.exp(-2))
    assert found[1] == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 4000))
    assert 2 not in found


def test_frequencies_follow_the_probabilities() -> None:
    found = frequencies(logits_of(0.2, 0.5, 0.3), seed=4)
    for token, wanted in enumerate((0.2, 0.5, 0.3)):
        assert found[token] == pytest.approx(
            wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 4000)
        )


def test_temperature_sharpens() -> None:
    found = frequencies(logits_of(0.2, 0.8), temperature=0.5)
    wanted = 0.8**2 / (0.8**2 + 0.2**2)
    assert found[1] == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.51}, {1, 2}),
        ({"min_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.75, "min_p": 0.1}, {1, 2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep(params: dict[str, object], kept: set[int]) -> None:
    assert frequencies(logits_of(0.15, 0.5, 0.3, 0.05), **params).keys() == kept


@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.2),
    temperature=st.floats(0.3, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_plain_definition(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Against all tokens sorted and filtered one by one, and walked in the order of their ids."""
    logits = 3 * torch.randn(400, generator=torch.Generator().manual_seed(seed))
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    p, order = torch.softmax(logits / temperature, dim=-1).double().sort(descending=True)
    kept, mass = 0, 0.0
    for index, value in enumerate(p.tolist()):
        if (top_k and index >= top_k) or mass >= top_p or value < min_p * float(p[0]):
            break
        kept, mass = index + 1, mass + value
    weights = dict(zip(order[:kept].tolist(), p[:kept].tolist(), strict=True))
    u = uniform(seed, 5)
    (token,) = sample(logits.unsqueeze(0), [draw(5, seed=seed, **params)])
    below = sum(weight for id, weight in weights.items() if id < token) / mass
    assert below - 1e-5 <= u <= below + weights[token] / mass + 1e-5


@pytest.mark.parametrize("vocab_size", [1, 17, 32, 300, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_equal_their_definition(vocab_size: int, kind: str) -> None:
    """All parameters at once, in float64; rows of one batch."""
    chance, num = np.random.default_rng(vocab_size), 60
    logits = [random_logits(chance, kind, vocab_size) for _ in range(num)]
    params = [random_params(chance, vocab_size) for _ in range(num)]
    masks = [random_mask(chance, vocab_size) for _ in range(num)]
    recents = [random_recent(chance, vocab_size) for _ in range(num)]
    draws = [Draw(SamplingParams(**vars(params[i])), i, recents[i], masks[i]) for i in range(num)]
    found = sample(torch.from_numpy(np.stack(logits)), draws)
    wanted = [allowed(logits[i], params[i], i, recents[i], masks[i]) for i in range(num)]
    assert all(token in each for token, each in zip(found, wanted, strict=True))
    assert sum(len(each) == 1 for each in wanted) >= 0.8 * num


@pytest.mark.slow
@pytest.mark.parametrize(("params", "kept"), TYPICAL)
def test_typical_keeps_what_is_nearest_to_the_entropy(params: Params, kept: set[int]) -> None:
    assert frequencies(logits_of(*TYPICAL_OF), **vars(params)).keys() == kept


@pytest.mark.parametrize(("params", "kept"), SIGMA)
def test_top_n_sigma_keeps_what_is_near_the_largest(params: Params, kept: set[int]) -> None:
    assert frequencies(torch.tensor(SIGMA_OF), num=300, **vars(params)).keys() == kept


@pytest.mark.parametrize(("params", "kept"), XTC)
def test_xtc_drops_all_top_choices_but_the_last(params: Params, kept: set[int]) -> None:
    assert frequencies(logits_of(*XTC_OF), num=300, **vars(params)).keys() == kept


@pytest.mark.parametrize(("text", "dry", "taken"), REPETITIONS)
def test_dry_takes_from_what_continues_a_repetition(
    text: tuple[int, ...], dry: Dry, taken: dict[int, float]
) -> None:
    """A token is likeliest until as much as it loses, and a little more, is its lead."""
    params = SamplingParams(temperature=0.0, dry=dry)
    for token in range(10):
        for lead, wins in ((-0.01, False), (0.01, True)):
            logits = torch.full((1, 11), -2000.0)
            logits[0, token], logits[0, 10] = taken.get(token, 0.0) + lead, 0.0
            assert (sample(logits, [Draw(params, 0, text)]) == [token]) is wins


def test_top_n_sigma_measures_what_is_allowed() -> None:
    """The deviation of 5, 1, 1 and 1 is 1.73, and that of all of them more than 400."""
    logits = torch.tensor([5.0, 1.0, -999.0, 1.0, 1.0]).expand(100, -1)
    params = SamplingParams(top_n_sigma=2.0, temperature=100.0)
    some = [Draw(params, i, (), mask_of([0, 1, 3, 4], 1)) for i in range(100)]
    assert set(sample(logits, some)) == {0}
    assert set(sample(logits, [Draw(params, i, ()) for i in range(100)])) == {0, 1, 3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65])
def test_only_allowed_token_is_drawn(size: int, temperature: float) -> None:
    """However unlikely; a bit beyond the last id counts for nothing."""
    logits = torch.linspace(40.0, -40.0, size)
    params = SamplingParams(temperature=temperature)
    for token in {0, size // 2, size - 1}:
        given = Draw(params, 5, (), mask_of([token, size], size // 32 + 1))
        free = Draw(params, 5, ())
        assert sample(logits.expand(2, -1), [given, free])[0] == token
        assert sample(logits.expand(2, -1), [given, free])[1] == sample(logits[None], [free])[0]


def test_bias_is_added_before_the_penalties() -> None:
    """So that they divide what it has made positive."""
    logits = torch.tensor([[-1.0, 1.0, 1.8]])
    given = {"temperature": 0.0, "repetition_penalty": 2.0, "logit_bias": ((0, 4.0), (7, 9.0))}
    assert sample(logits, [draw(**given)]) == [0]
    assert sample(logits, [draw(recent=(0,), **given)]) == [2]
    assert torch.equal(logits, torch.tensor([[-1.0, 1.0, 1.8]]))


def test_repetition_penalty_divides_and_multiplies() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.5]])
    params = {"temperature": 0.0, "repetition_penalty": 1.1}
    assert sample(logits, [draw(recent=(0,), **params)]) == [1]
    assert sample(logits, [draw(recent=(2, 3), **params)]) == [0]
    assert torch.equal(logits, torch.tensor([[2.0, 1.9, -1.0, -1.5]]))


@pytest.mark.parametrize(
    ("penalties", "recent", "wanted"),
    [
        ({"presence_penalty": 0.2}, (0, 0, 0), 1),
        ({"presence_penalty": 0.05}, (0, 0, 0), 0),
        ({"frequency_penalty": 0.05}, (0,), 0),
        ({"frequency_penalty": 0.05}, (0, 0, 0), 1),
        ({"presence_penalty": -2.0}, (3,), 3),
        ({"frequency_penalty": -1.5}, (2, 3, 3, 2, 2), 2),
        ({"repetition_penalty": 1.1, "presence_penalty": -0.1}, (0,), 0),
        ({"repetition_penalty": 1.1, "frequency_penalty": -0.05}, (0,), 1),
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, (), 0),
    ],
)
def test_presence_and_frequency_are_taken_off(
    penalties: dict[str, float], recent: tuple[int, ...], wanted: int
) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.5]])
    assert sample(logits, [draw(recent=recent, temperature=0.0, **penalties)]) == [wanted]


def test_penalties_come_before_the_temperature() -> None:
    found = frequencies(logits_of(0.5, 0.5), temperature=0.5, presence_penalty=0.5, recent=(0,))
    assert found[0] == pytest.approx(1 / (1 + math.exp(0.5 / 0.5)), abs=0.03)


def test_row_that_is_not_finite_is_reported_alone() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = math.nan
    first, second, third = sample(logits, [draw(0), draw(0), draw(0, temperature=0.0)])
    assert second == NOT_FINITE
    assert first >= 0
    assert third == 0


def test_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    draws = [draw(position=i, seed=i, top_p=0.9) for i in range(8)]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(8)]
    assert together == alone


def test_uniform_is_uniform_and_fixed() -> None:
    values = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)
    assert len(set(values)) == len(values)
    # A stored session must draw the same numbers from every later version.
    assert uniform(1, 2) == 0.7376992526901169


@pytest.mark.parametrize("vocab_size", [7, 301, 1009, 40_003])
def test_company_changes_no_bit(vocab_size: int) -> None:
    logits = 3 * torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(1))
    given = {"temperature": 1.3, "typical_p": 0.9, "top_p": 0.95}
    given |= {"xtc_probability": 0.5, "xtc_threshold": 0.01}
    dries = itertools.cycle((None, Dry(3.0, allowed_length=1), Dry(1.0)))
    params = [SamplingParams(seed=i, top_n_sigma=i % 3, dry=next(dries), **given) for i in range(9)]
    draws = [Draw(each, 5, (1, 2, 3, 1, 2)) for each in params]
    tokens = [i % vocab_size for i in range(9)]
    alone = [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(9)]
    scores = [scores_of(logits[i : i + 1].clone(), tokens[i : i + 1], [3])[0] for i in range(9)]
    assert sample(logits, draws) == alone
    assert scores_of(logits, tokens, [3] * 9) == scores
