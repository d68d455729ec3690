"""From any saved value, and the log's entries after it, to the present: at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.session import Past, Saved, StateBlock
from server.engine.types import Request, SamplingParams
from server.errors import InvalidRequest
from tests.fakes import STATE_BYTES, STORY, FakeEngine, state_after
from tests.server.engine.ledger import Ledger, rebuilt, settled, unseen

PROMPT = "Gehen wir ans Meer, heißt es, über die Brücke. ".encode() * 6

#: A piece of work: of its prompt, how many tokens to generate, and after how many steps it is
#: cancelled, if it is.
WORKS = st.tuples(st.integers(0, 250), st.integers(0, 40), st.none() | st.integers(0, 8))


def digest(state: StateBlock | None, tokens: Sequence[int]) -> bytes:
    start = bytes(STATE_BYTES) if state is None else state.data.tobytes()
    return state_after(tokens, start)


class Story:
    """One kept session of an engine, and the ledger that its records go to."""

    def __init__(self, save_interval: int = 10**6) -> None:
        self.engine = FakeEngine(save_interval=save_interval, can_evict=True)
        self.tokenizer = self.engine.tokenizer
        self.ledger = Ledger()
        self.session = self.engine.kept.create("me", 0.0).session
        self.commit()

    def commit(self) -> None:
        self.ledger.take(self.engine.take_records())

    def do(self, length: int, max_tokens: int, cancel_after: int | None = None) -> None:
        """One piece of work to its end; all ways lead to each moment of it."""
        params = SamplingParams(max_tokens=max(1, max_tokens), seed=length)
        prompt = tuple(PROMPT[: length if max_tokens else max(1, length)])
        sampling = params if max_tokens else None
        self.engine.submit(Request("r", "me", prompt, sampling, self.session), 0.0)
        for num_steps in count():
            self.commit()
            self.check_all_ways_lead_here()
            if not self.engine.has_work():
                break
            if num_steps == cancel_after:
                self.engine.cancel("r")
            self.engine.step(0.0)

    def rewind(self, at: int) -> None:
        self.engine.kept.rewind(self.session, "me", self.ledger.past(self.session, at), 0.0)
        self.commit()

    def check_all_ways_lead_here(self) -> None:
        value = self.engine.kept.value(self.session, "me")
        wanted = settled(value, digest)
        for past in self.ledger.pasts(self.session):
            assert settled(rebuilt(past, self.tokenizer), digest) == wanted

    def text(self) -> list[int]:
        """All tokens, from the log alone."""
        (first, *_) = self.ledger.pasts(self.session)
        return list(unseen(rebuilt(first, self.tokenizer)))


@given(st.lists(WORKS, min_size=1, max_size=4), st.data())
@settings(max_examples=30, deadline=None)
def test_past_of_any_length_is_the_text_s_beginning(
    works: list[tuple[int, int, int | None]], data: st.DataObject
) -> None:
    story = Story(save_interval=30)
    for work in works:
        story.do(*work)
        text = story.text()
        at = data.draw(st.integers(0, len(text)))
        for past in story.ledger.pasts(story.session, at):
            value = rebuilt(past, story.tokenizer)
            assert digest(value.state, unseen(value)) == state_after(text[:at])
            assert value.progress is None
        story.rewind(at)
        story.check_all_ways_lead_here()
        assert story.text() == text[:at]


def test_prompt_is_cut_where_its_cancel_left_it() -> None:
    story = Story()
    story.do(250, 5, cancel_after=1)  # of 250 tokens 128 were fed, and one is pending
    assert len(story.text()) == 129
    story.do(3, 2)
    assert len(story.text()) == 134


def test_rewind_into_a_prompt_that_was_only_read() -> None:
    """Its end in the log is behind the place where the text is cut."""
    story = Story()
    story.do(100, 0)
    story.rewind(30)
    assert story.text() == list(PROMPT[:30])


def test_length_that_the_text_never_had_is_refused() -> None:
    story = Story()
    story.do(10, 5)
    first = next(story.ledger.pasts(story.session))
    with pytest.raises(InvalidRequest, match="only 15 tokens"):
        story.engine.kept.rewind(story.session, "me", Past(first.value, first.entries, 16), 0.0)
    story.check_all_ways_lead_here()


def test_unfinished_character_and_withheld_text_come_back() -> None:
    story = Story(save_interval=1)
    seed = next(
        n for n in range(1000) if STORY[(n * 7 + 1) % len(STORY) :].startswith("“Wh".encode())
    )
    params = SamplingParams(max_tokens=5, stop=("“Where does",), seed=seed)
    story.engine.submit(Request("r", "me", (120,), params, story.session), 0.0)
    undecoded, withheld = [], []
    while story.engine.has_work():
        story.engine.step(0.0)
        story.commit()
        value = rebuilt(story.ledger.past(story.session), story.tokenizer)
        undecoded.append(value.undecoded)
        withheld.append(value.progress.withheld if value.progress else None)
        story.check_all_ways_lead_here()
    assert undecoded == [b"\xe2", b"\xe2\x80", b"", b"", b""]
    assert withheld == ["", "", "“", "“W", None]


def test_saved_value_matches_the_log_position() -> None:
    """The ledger compares the counts; here is something for it to compare."""
    story = Story(save_interval=20)
    story.do(50, 30)
    saved = [e.value for e in story.ledger.entries[story.session] if isinstance(e, Saved)]
    assert [value.position for value in saved] == [50, 70]
    assert [value.log_index for value in saved] == [2, 22]
