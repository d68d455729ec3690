"""Random commands in any order: the engine keeps its books, and every session its text.

The model is a stand-in, so that each token is checked against the whole text of
its session, which so must survive sleep, eviction, forks, rewinds, restarts and
other readers. Prompts are cut anywhere, on a grid, or with drafts, or the past is bounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from model.state import StateLayout
from server.engine.drafts import SuffixDrafter
from server.engine.model_drafter import ModelDrafter
from server.engine.runner import CpuStatePool, NativeRunner, Runner
from server.errors import CapacityExhausted, InternalFailure, SessionAttached, SessionBusy
from tests.fakes import OnGrid
from tests.server.engine.drafters import CHEAP, NEVER, HashedDrafter
from tests.server.engine.ledger import rebuilt, settled
from tests.server.engine.machine import RUNNING, Commanded, asked, hashed
from tests.server.engine.reading import ReadingRuntime
from tests.server.engine.remembering import RememberingRuntime
from tests.server.engine.texts import Text
from tests.tiny import BOUNDED, check_books, request, tiny_checkpoint

if TYPE_CHECKING:
    from model.native.runtime import Runtime

GRAMMARS = st.sampled_from([None, "3", "40"])
#: What a request also wants to know: fields of it, and of its sampling.
READINGS = st.fixed_dictionaries(
    {},
    optional={
        "score": st.just(True),
        "num_top": st.integers(0, 2),
        "top_logprobs": st.integers(0, 2),
    },
)


class EngineMachine(Commanded):
    """What clients and a store do to an engine, next to what they may expect."""

    # Requests

    @rule(
        length=st.integers(0, 150),
        max_tokens=st.sampled_from([1, 5, 40, 700]),
        keep=st.booleans(),
        seed=st.integers(0, 9),
        owner=st.sampled_from(["ann", "bob"]),
        stop=st.sampled_from([(), ("e",), ("th", "s ")]),
        grammar=GRAMMARS,
        reading=READINGS,
    )
    def generate(
        self,
        length: int,
        max_tokens: int,
        keep: bool,
        seed: int,
        owner: str,
        stop: tuple[str, ...],
        grammar: str | None,
        reading: dict[str, object],
    ) -> None:
        sampling = {"max_tokens": max_tokens, "seed": seed, "stop": stop, "grammar": grammar}
        made = request(self.name(), [9] * length, None, keep, owner, **sampling)
        self.submit(asked(made, reading))

    @rule(
        length=st.integers(1, 60),
        num_choices=st.integers(2, 3),
        grammar=GRAMMARS,
        reading=READINGS,
    )
    def generate_choices(
        self, length: int, num_choices: int, grammar: str | None, reading: dict[str, object]
    ) -> None:
        made = asked(request(self.name(), [9] * length, grammar=grammar), reading)
        self.submit(replace(made, num_choices=num_choices))

    @rule(
        length=st.integers(0, 150),
        ends=st.lists(st.integers(0, 70), min_size=1, max_size=3),
        num_top=st.integers(0, 2),
    )
    def compare(self, length: int, ends: list[int], num_top: int) -> None:
        tokens = tuple((7,) * end for end in ends)
        made = request(self.name(), [9] * length, generate=False)
        self.submit(replace(made, continuations=tokens, num_top=num_top))

    @rule(length=st.integers(1, 150))
    def embed(self, length: int) -> None:
        self.submit(replace(request(self.name(), [9] * length, generate=False), embed=True))

    @precondition(lambda self: self.kept())
    @rule(
        data=st.data(),
        length=st.one_of(st.just(0), st.integers(0, 70)),
        generate=st.booleans(),
        grammar=GRAMMARS,
        reading=READINGS,
    )
    def go_on(
        self,
        data: st.DataObject,
        length: int,
        generate: bool,
        grammar: str | None,
        reading: dict[str, object],
    ) -> None:
        session = self.any_session(data)
        tokens = [8] * (length if generate else length + 1)
        owner = self.expected.texts[session].owner
        sampling = {"repetition_penalty": 1.1, "grammar": grammar}
        made = request(self.name(), tokens, session, True, owner, generate, **sampling)
        self.submit(asked(made, reading))

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), length=st.integers(0, 2), grammar=GRAMMARS, num_steps=st.integers(1, 20))
    def turn(self, data: st.DataObject, length: int, grammar: str | None, num_steps: int) -> None:
        """Perhaps under the grammar of the turn before, and perhaps to its end."""
        session = self.any_session(data)
        owner = self.expected.texts[session].owner
        self.submit(request(self.name(), [8] * length, session, True, owner, grammar=grammar))
        self.step(num_steps)

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        session = self.any_session(data)
        text = self.expected.texts[session]

        def call() -> None:
            self.engine.cancel_session(session, text.owner)
            if text.running is not None:
                self.expected.works[text.running].cancelled = True

        self.on(session, call)

    @precondition(lambda self: self.expected.works)
    @rule(data=st.data(), verb=st.sampled_from(["park", "unpark", "detach", "cancel"]))
    def nudge(self, data: st.DataObject, verb: str) -> None:
        """What a reader does to its request, which may be asleep in the store."""
        name = data.draw(st.sampled_from(sorted(self.expected.works)))
        work = self.expected.works[name]
        work.has_reader &= verb != "detach"
        work.cancelled |= verb == "cancel" or (verb == "detach" and not work.text.keep)
        getattr(self.engine, verb)(name)

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), take_over=st.booleans())
    def attach(self, data: st.DataObject, take_over: bool) -> None:
        session, name = self.any_session(data), self.name()
        text = self.expected.texts[session]

        def call() -> None:
            info = self.engine.attach(session, text.owner, name, take_over)
            assert (info.position, info.seq) == (len(text.tokens), text.seq)
            assert info.busy == (text.running is not None)
            self.expected.attach(text, name)

        try:
            self.on(session, call)
        except SessionAttached:
            assert text.running is not None
            assert self.expected.works[text.running].has_reader
            assert not take_over

    # Sessions

    @rule(owner=st.sampled_from(["ann", "bob"]))
    def create(self, owner: str) -> None:
        try:
            info = self.engine.kept.create(owner, self.now)
        except CapacityExhausted:
            self.check_full()
        else:
            self.expected.texts[info.session] = Text(self.tokenizer, owner, True)

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        session = self.any_session(data)
        text = self.expected.texts[session]

        def call() -> None:
            self.engine.kept.delete(session, text.owner)
            text.keep = False
            if text.running is not None:
                self.expected.works[text.running].cancelled = True
            else:
                del self.expected.texts[session]

        self.on(session, call)

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), num=st.integers(1, 3), past=st.booleans())
    def fork(self, data: st.DataObject, num: int, past: bool) -> None:
        session = self.any_session(data)
        text = self.expected.texts[session]
        at = self.any_length(data, session)

        def call() -> None:
            then = self.ledger.past(session, at) if past else None
            length = at if past else len(text.tokens)
            for info in self.engine.kept.fork(session, text.owner, num, self.now, then):
                assert (info.position, info.seq, info.epoch) == (length, 0, 0)
                copy = self.expected.texts[info.session] = text.copy(length)
                self.check_constraint(info.session, text if past else None, copy)

        self.on(session, call)

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        session = self.any_session(data)
        text, at = self.expected.texts[session], self.any_length(data, session)

        def call() -> None:
            past = self.ledger.past(session, at)
            info = self.engine.kept.rewind(session, text.owner, past, self.now)
            then = text.copy(at)
            self.check_constraint(session, text, then)
            text.cut(at)
            text.go_on_under(then.constraint)
            text.epoch += 1
            assert (info.position, info.seq, info.epoch) == (at, text.seq, text.epoch)

        try:
            self.on(session, call)
        except SessionBusy:
            assert text.running is not None

    # Time, and what happens to the process

    @rule(num_steps=st.sampled_from([1, 3, 30, 300]), seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def work(self, num_steps: int, seconds: float) -> None:
        self.now += seconds
        self.step(num_steps)

    @rule()
    def restart(self) -> None:
        """All that is kept goes to the store, and comes back when it is wanted."""
        assert self.engine.kept.retire(100) == 0
        self.step(1)
        self.lose_what_is_not_kept()
        self.engine = self.make_engine()

    @rule()
    def die(self) -> None:
        """Nothing is saved; the store has the log."""
        self.lose_what_is_not_kept()
        self.expected.lost.clear()
        self.engine = self.make_engine()

    @rule()
    def lose_store(self) -> None:
        """It has failed, and what the engine has of kept sessions counts no more."""
        for name in [live.request.request_id for live in self.engine._requests]:
            if self.expected.works[name].text.keep:
                self.expected.lost[name] = InternalFailure
                self.expected.works[name].has_reader = False
                self.expected.works[name].started = True
        self.engine.kept.discard(InternalFailure("the store failed"))
        self.step(1)

    @invariant()
    def books_are_right(self) -> None:
        self.commit()
        check_books(self.engine)
        stats = self.engine.stats()
        assert stats.num_running <= RUNNING
        live = stats.num_running + stats.num_waiting
        assert not live or self.engine.has_work()

    @invariant()
    def sessions_can_be_built_again(self) -> None:
        for session in self.engine._sessions:
            if session.keep:
                text = self.expected.texts[session.id]
                value = self.engine.kept.value(session.id, text.owner)
                wanted = settled(value, hashed)
                assert wanted[0] == text.hashed
                assert value.constraint == text.constraint
                pasts = list(self.ledger.pasts(session.id))
                for past in (pasts[0], pasts[-1]):
                    assert settled(rebuilt(past, self.tokenizer), hashed) == wanted

    def teardown(self) -> None:
        """Every request comes to its end, wherever it is."""
        self.step(1)
        for name in sorted(self.expected.works):
            self.engine.unpark(name)
        self.finish()
        for session in self.kept():
            text = self.expected.texts[session]
            while text.running is not None:
                assert self.on(session, lambda s=session, t=text: self.read_on(s, t))  # type: ignore[misc]
                self.finish()
        assert not self.expected.works
        assert not self.expected.lost
        self.engine.expire(self.now + 1e6)
        stats = self.engine.stats()
        assert stats.held_slots == stats.num_sessions == 0


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_engine_machine = EngineMachine.TestCase


class GridMachine(EngineMachine):
    """As on torch."""

    def wrap(self, runner: Runner) -> Runner:
        return OnGrid(runner)


GridMachine.TestCase.settings = EngineMachine.TestCase.settings
test_engine_machine_on_a_grid = GridMachine.TestCase


class DraftingMachine(EngineMachine):
    """With drafts that are right, wrong and both: no client sees a difference."""

    def new_drafter(self) -> HashedDrafter:
        return HashedDrafter(self.tokenizer.vocab_size, self.matchers)


DraftingMachine.TestCase.settings = EngineMachine.TestCase.settings
test_engine_machine_with_drafts = DraftingMachine.TestCase


class ModelDraftingMachine(EngineMachine):
    """With drafts of a model that is right, as long as its states are those of the texts."""

    def new_drafter(self) -> ModelDrafter:
        pool = CpuStatePool(StateLayout.of(tiny_checkpoint().config), 2)
        runner = NativeRunner(cast("Runtime", self.new_runtime()), pool)
        past = SuffixDrafter(NEVER, self.tokenizer.token_bytes)
        return ModelDrafter(past, runner, pool, CHEAP)

    @invariant()
    def its_states_are_those_of_the_texts(self) -> None:
        """The stand-in raises where a token, a slot or a position is wrong."""
        assert isinstance(self.drafter, ModelDrafter)
        assert not self.drafter.is_broken


ModelDraftingMachine.TestCase.settings = EngineMachine.TestCase.settings
test_engine_machine_with_a_draft_model = ModelDraftingMachine.TestCase


class BoundedMachine(EngineMachine):
    """With a past up to a bound, all of which must be there at each step: texts end there."""

    attention = "qwen35-machine"
    longest: int | None = BOUNDED["qwen35-machine"][0]

    def new_runtime(self) -> ReadingRuntime:
        return RememberingRuntime(self.tokenizer.vocab_size, tiny_checkpoint(self.attention).config)


BoundedMachine.TestCase.settings = EngineMachine.TestCase.settings
test_engine_machine_with_a_bounded_past = BoundedMachine.TestCase


class SlidingMachine(BoundedMachine):
    """With a past of which all but the first and the last positions slide out."""

    attention = "qwen35-slide"
    longest = None

    def new_drafter(self) -> HashedDrafter:
        return HashedDrafter(self.tokenizer.vocab_size, self.matchers)


SlidingMachine.TestCase.settings = EngineMachine.TestCase.settings
test_engine_machine_with_a_sliding_past = SlidingMachine.TestCase
