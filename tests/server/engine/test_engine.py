from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.checkpoint import Checkpoint
from model.lm import LanguageModel
from server.engine.engine import Engine, EngineConfig
from server.engine.session import Accepted, Past
from server.engine.types import Dry, Finished, SamplingParams, Started, TokenEvent
from server.errors import CapacityExhausted, InvalidRequest, QueueFull, SessionBusy, SessionNotFound
from server.models.backend import open_backend
from tests.fakes import FakeRuntime
from tests.tiny import (
    drain,
    finished,
    request,
    solo,
    started,
    text_of,
    tiny_checkpoint,
    tiny_engine,
    tiny_tokenizer,
    tokens_of,
)
from tests.weights import weights_of

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["torch", "native"])
def runtime(request: pytest.FixtureRequest) -> FakeRuntime | None:
    """Every test runs on both runners, and then free + held = total."""
    return FakeRuntime(tiny_tokenizer().vocab_size) if request.param == "native" else None


def test_events_come_in_order_and_numbered(engine: Engine) -> None:
    events = solo(engine, request(tokens=(10, 20, 30), max_tokens=5))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert [event.seq for event in tokens] == [1, 2, 3, 4, 5]
    assert [event.position for event in tokens] == [4, 5, 6, 7, 8]  # after the start token
    last = finished(events)
    assert (last.seq, last.position, last.finish_reason) == (6, 9, "length")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 5)
    assert last.session is None


def test_greedy_is_what_the_model_says() -> None:
    engine, model = tiny_engine(), tiny_checkpoint().model
    ids = [0, 10, 20, 30]
    for token in tokens_of(solo(engine, request(tokens=(10, 20, 30), temperature=0.0))):
        assert token == int(model.parallel(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)


def test_text_is_the_tokens_decoded(engine: Engine) -> None:
    events = solo(engine, request(max_tokens=60, seed=3))
    assert text_of(events) == tiny_tokenizer().decode(tokens_of(events))


def test_seed_decides_the_tokens(engine: Engine) -> None:
    first, again, other = (
        tokens_of(solo(engine, request(seed=seed, max_tokens=30))) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_session_continues_as_if_never_interrupted(engine: Engine) -> None:
    whole = tokens_of(solo(engine, request(max_tokens=20, seed=5)))
    first = solo(engine, request(max_tokens=12, seed=5, keep=True))
    session = finished(first).session
    second = solo(engine, request(tokens=(), session=session, max_tokens=8, seed=5))
    assert tokens_of(first) + tokens_of(second) == whole
    assert started(second).position == 4 + 12
    assert next(e.seq for e in second if isinstance(e, TokenEvent)) == finished(first).seq + 1
    assert finished(second).usage.prompt_tokens == 0


def test_append_then_generate_equals_one_prompt(engine: Engine) -> None:
    whole = tokens_of(solo(engine, request(tokens=range(10, 30))))
    session = engine.kept.create("me", 0.0).session
    fed = solo(engine, request("a", range(10, 18), session, generate=False))
    assert finished(fed).finish_reason is None
    assert finished(fed).position == 9
    rest = solo(engine, request("b", range(18, 30), session))
    assert tokens_of(rest) == whole


def test_kept_session_is_listed_and_deleted(engine: Engine) -> None:
    session = finished(solo(engine, request(keep=True))).session
    assert session is not None
    info = engine.kept.info(session, "me", 10.0)
    assert (info.position, info.busy, info.idle_s) == (12, False, 10.0)
    engine.kept.delete(session, "me")
    with pytest.raises(SessionNotFound):
        engine.kept.info(session, "me", 10.0)
    assert engine.stats().held_slots == 0


def test_another_owner_sees_no_session(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    past = Past(engine.kept.value(session, "me"))
    for verb in (
        lambda: engine.kept.info(session, "you", 0.0),
        lambda: engine.kept.value(session, "you"),
        lambda: engine.kept.delete(session, "you"),
        lambda: engine.submit(request(session=session, owner="you"), 0.0),
        lambda: engine.attach(session, "you", "r", take_over=True),
        lambda: engine.kept.fork(session, "you", 1, 0.0),
        lambda: engine.kept.rewind(session, "you", past, 0.0),
    ):
        with pytest.raises(SessionNotFound):
            verb()
    engine.kept.info(session, "me", 0.0)


def test_busy_session_refuses_a_second_request(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    engine.submit(request("a", session=session), 0.0)
    with pytest.raises(SessionBusy):
        engine.submit(request("b", session=session), 0.0)
    assert tokens_of(drain(engine)["a"])


def test_full_pool_refuses_at_once_and_recovers(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=2)
    engine.submit(request("a"), 0.0)
    engine.submit(request("b"), 0.0)
    with pytest.raises(CapacityExhausted):
        engine.submit(request("c"), 0.0)
    drain(engine)
    assert tokens_of(solo(engine, request("c")))


def test_full_queue_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1, max_waiting=1)
    engine.submit(request("a"), 0.0)
    engine.submit(request("b"), 0.0)
    with pytest.raises(QueueFull):
        engine.submit(request("c"), 0.0)
    stats = engine.stats()
    assert (stats.num_sessions, stats.held_slots) == (2, 0)  # a slot comes with the turn
    engine.step(0.0)
    assert engine.stats().held_slots == 1


def test_waiting_requests_run_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    for name in "abc":
        engine.submit(request(name, max_tokens=2), 0.0)
    order = [event.request_id for _ in range(30) for event in engine.step(0.0)]
    assert list(dict.fromkeys(order)) == ["a", "b", "c"]


def test_cancel_frees_the_slot_and_keeps_the_rest(engine: Engine) -> None:
    engine.submit(request("a", max_tokens=1000), 0.0)
    engine.submit(request("b", max_tokens=30), 0.0)
    for _ in range(10):
        engine.step(0.0)
    engine.cancel("a")
    events = drain(engine)
    assert finished(events["a"]).finish_reason == "cancelled"
    assert len(tokens_of(events["b"])) > 10
    engine.cancel("a")  # over already: nothing happens
    assert not engine.has_work()


def test_stop_string_ends_and_is_not_shown(engine: Engine) -> None:
    text = text_of(solo(engine, request(max_tokens=60, seed=3)))
    stop = text[20:24]
    events = solo(engine, request(max_tokens=60, seed=3, stop=("not there", stop)))
    assert finished(events).finish_reason == "stop"
    assert text_of(events) == text[: text.index(stop)]


def test_stop_token_ends(engine: Engine) -> None:
    tokens = tokens_of(solo(engine, request(max_tokens=30, seed=3)))
    stop = tokens[10]
    events = solo(engine, request(max_tokens=30, seed=3, stop_token_ids=(stop,)))
    assert finished(events).finish_reason == "stop"
    assert tokens_of(events) == tokens[: tokens.index(stop) + 1]


def test_end_of_text_ends_unless_ignored(engine: Engine) -> None:
    for seed in range(300):
        tokens = tokens_of(solo(engine, request(max_tokens=40, seed=seed, temperature=2.0)))
        if 0 in tokens:
            break
    events = solo(engine, request(max_tokens=40, seed=seed, temperature=2.0, ignore_eos=False))
    assert tokens_of(events) == tokens[: tokens.index(0) + 1]
    assert finished(events).finish_reason == "stop"


def test_cancel_in_a_prompt_keeps_what_was_read(engine: Engine) -> None:
    prompt = tuple(range(1, 290))
    session = engine.kept.create("me", 0.0).session
    engine.submit(request(tokens=prompt, session=session), 0.0)
    engine.step(0.0)
    engine.step(0.0)
    engine.cancel("r")
    read = finished(drain(engine)["r"])
    num_read = read.position
    assert num_read == read.usage.prompt_tokens
    assert num_read in (129, 257)  # two chunks, or as much as two steps read; and a pending token
    rest = solo(engine, request(tokens=prompt[num_read - 1 :], session=session))
    assert tokens_of(rest) == tokens_of(solo(engine, request(tokens=prompt)))


def test_one_token_appended_to_an_empty_session(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    fed = solo(engine, request(tokens=(7,), session=session, generate=False, start=False))
    assert finished(fed).position == finished(fed).usage.prompt_tokens == 1
    wanted = tokens_of(solo(engine, request(tokens=(7,), start=False)))
    assert tokens_of(solo(engine, request(tokens=(), session=session))) == wanted


ENDS = ((5,), (6,))
PARAMS = SamplingParams()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt", {"tokens": ()}),
        ("prompt", {"tokens": (300,)}),
        ("prompt", {"tokens": (-1,)}),
        ("prompt", {"tokens": (1, 2, 10**12)}),
        ("prompt", {"embed": True, "tokens": ()}),
        ("num_top", {"num_top": -1}),
        ("num_top", {"num_top": 21}),
        ("n", {"num_choices": 2, "keep": True}),
        ("n", {"num_choices": 2, "session": "one"}),
        ("grammar", {"sampling": SamplingParams(grammar="30")}),
        ("embed", {"embed": True, "keep": True}),
        ("embed", {"embed": True, "sampling": PARAMS}),
        ("embed", {"embed": True, "score": True}),
        ("embed", {"embed": True, "continuations": ENDS}),
        ("continuations", {"continuations": ENDS, "keep": True}),
        ("continuations", {"continuations": ENDS, "sampling": PARAMS}),
        ("continuations", {"continuations": ENDS, "score": True}),
        ("continuations", {"continuations": ENDS, "num_choices": 2}),
        ("continuations", {"continuations": ((1, 10**6),)}),
    ],
)
def test_what_does_not_go_together_is_named_and_costs_nothing(
    engine: Engine, field: str, changes: dict[str, Any]
) -> None:
    asked = dataclasses.replace(request(generate=False), **changes)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(asked, 0.0)
    assert caught.value.param == field
    assert engine.stats().num_sessions == 0


def test_repetition_penalty_sees_across_requests() -> None:
    engine = tiny_engine()
    options = {"repetition_penalty": 3.0, "temperature": 0.0}
    whole = tokens_of(solo(engine, request(max_tokens=20, **options)))
    assert len(set(whole)) > len(
        set(tokens_of(solo(engine, request(max_tokens=20, temperature=0.0))))
    )
    first = solo(engine, request(max_tokens=11, keep=True, **options))
    rest = solo(
        engine, request(tokens=(), session=finished(first).session, max_tokens=9, **options)
    )
    assert tokens_of(first) + tokens_of(rest) == whole


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("inf")}),
        ("temperature", {"temperature": float("nan")}),
        ("top_k", {"top_k": -1}),
        ("top_k", {"top_k": 10**9}),
        ("top_p", {"top_p": -0.1}),
        ("top_p", {"top_p": float("inf")}),
        ("min_p", {"min_p": 1.5}),
        ("top_n_sigma", {"top_n_sigma": float("nan")}),
        ("xtc_probability", {"xtc_probability": float("nan")}),
        ("dry_base", {"dry": Dry(1.0, base=0.5)}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("presence_penalty", {"presence_penalty": float("nan")}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop", {"stop": ("",)}),
        ("stop_token_ids", {"stop_token_ids": (300,)}),
    ],
)
def test_bad_parameter_is_named_and_costs_nothing(
    engine: Engine, field: str, sampling: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(request(**sampling), 0.0)
    assert caught.value.param == field
    assert engine.stats().held_slots == 0
    assert not engine.has_work()


def test_live_request_ids_are_unique(engine: Engine) -> None:
    engine.submit(request("a"), 0.0)
    with pytest.raises(InvalidRequest):
        engine.submit(request("a"), 0.0)


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    """A vocabulary that is padded in the model, most of it with ids that stand for nothing."""
    known = tiny_tokenizer()
    config = dataclasses.replace(tiny_checkpoint().model.config, vocab_size=known.vocab_size + 2000)
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    checkpoint = Checkpoint(config, weights_of(model), known, digest="padded")
    backend = open_backend(checkpoint, "torch", "float32")
    engine = backend.engine(1, EngineConfig(new_id=lambda: "session"))
    tokens = tokens_of(solo(engine, request(max_tokens=50, temperature=2.0, ignore_eos=True)))
    assert len(tokens) == 50
    assert max(tokens) < known.vocab_size


def test_whole_prompt_is_one_row_where_any_cut_will_do() -> None:
    fake = FakeRuntime(tiny_tokenizer().vocab_size)
    engine = tiny_engine(runtime=fake)
    solo(engine, request(tokens=range(1, 100), max_tokens=3))
    assert fake.calls == [[100], [1], [1]]


def test_row_that_is_not_finite_ends_its_session_without_saving_it() -> None:
    engine = tiny_engine(runtime=FakeRuntime(tiny_tokenizer().vocab_size), save_interval=1)
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("feed", (5, 6), session, generate=False))
    poison(engine, 0)
    engine.take_records()
    last = finished(solo(engine, request(session=session)))
    assert (last.finish_reason, last.error) == ("error", "the model's output is not finite")
    assert [type(entry) for _, entry in engine.take_records()] == [Accepted, Finished]
    with pytest.raises(SessionNotFound):
        engine.kept.info(session, "me", 0.0)


def test_end_of_a_kept_session_goes_by_its_name_after_an_error() -> None:
    """A store may still have it; one that ended with its request has no name."""
    engine = tiny_engine(runtime=FakeRuntime(tiny_tokenizer().vocab_size))
    session = engine.kept.create("me", 0.0).session
    for name, where, wanted in (("kept", session, session), ("not", None, None)):
        engine.submit(request(name, range(1, 300), where), 0.0)
        engine.step(0.0)
        poison(engine, 0)
        assert finished(drain(engine)[name]).session == wanted


def poison(engine: Engine, slot: int) -> None:
    """Makes a state of `FakeRuntime` one that is not finite."""
    engine._pool.blocks[slot].fill(255)
