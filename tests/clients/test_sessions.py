"""Kept sessions through the plain client, against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.python import (
    Client,
    Generation,
    HistoryGone,
    InvalidRequest,
    NotFound,
    PrefixNotFound,
    Sampling,
    Session,
    SessionAttached,
    SessionNotFound,
    SessionReset,
    Token,
)
from tests.clients.conftest import WOOD

FOR_EVER = 1_000_000


@pytest.fixture
def client(server_url: str) -> Iterator[Client]:
    with Client(server_url, timeout_s=30) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    session = client.create_session()
    yield session
    session.delete()


def generated(session: Session, max_tokens: int, seed: int = 2) -> list[int]:
    """At a temperature at which the seed matters, whatever the model's default is."""
    options = Sampling(max_tokens=max_tokens, seed=seed, temperature=1.0, ignore_eos=True)
    return tokens_of(session.generate(**options))


def tokens_of(generation: Generation) -> list[int]:
    return [event.token_id for event in generation if isinstance(event, Token)]


def read(generation: Generation, num: int) -> list[int]:
    return [e.token_id for _, e in zip(range(num), generation, strict=False) if is_token(e)]


def is_token(event: object) -> bool:
    return isinstance(event, Token)


def test_session_begins_with_a_named_state(client: Client, session: Session) -> None:
    """However it is begun, it continues as one that has read the text itself."""
    appended = session.append(WOOD)
    wanted = generated(session, 12)
    begun = client.create_session(state="wood")
    assert begun.info().position == appended.position
    assert generated(begun, 12) == wanted
    begun.delete()
    options = Sampling(max_tokens=12, seed=2, temperature=1.0, ignore_eos=True)
    assert tokens_of(client.generate(state="wood", **options)) == wanted
    whole = client.complete(state="wood", **options)
    assert whole.text == client.generate(state="wood", **options).text()


def test_unknown_state_is_not_found(client: Client) -> None:
    for ask in (client.create_session, client.complete):
        with pytest.raises(NotFound, match="nowhere") as refused:
            ask(state="nowhere")
        assert refused.value.code == "state_not_found"


def test_prompt_continues_a_prefix_by_its_handle(client: Client) -> None:
    prompt, more = "There was a wood. " * 8, " Then came the fox."
    options = Sampling(max_tokens=12, seed=2, ignore_eos=True)
    whole = client.generate(prompt + more, **options).text()
    generation = client.generate(prompt, return_prefix=True, **options)
    assert generation.text()
    assert generation.finished is not None
    handle = generation.finished.prefix
    assert handle is not None
    assert client.complete(prompt, return_prefix=True, **options).prefix == handle
    assert client.generate(more, prefix=handle, **options).text() == whole
    answer = client.complete(more, prefix=handle, **options)
    assert (answer.text, answer.prefix) == (whole, None)


def test_unknown_prefix_is_not_found(client: Client) -> None:
    unknown = "prefix_" + "A" * 48
    with pytest.raises(PrefixNotFound, match="send the whole prompt") as refused:
        client.complete(prefix=unknown)
    assert refused.value.code == "prefix_not_found"
    with pytest.raises(PrefixNotFound):
        client.generate(prefix=unknown).text()


def test_forks_continue_as_the_session_would(client: Client, session: Session) -> None:
    session.append("Once upon a time")
    forks = session.fork(3)
    assert len({fork.id for fork in (session, *forks)}) == 4
    assert len({tuple(generated(one, 12)) for one in (session, *forks)}) == 1
    for fork in forks:
        fork.delete()


def test_fork_from_the_past_has_seen_no_more(client: Client, session: Session) -> None:
    session.append([10, 20, 30])
    (early,) = session.fork()
    generated(session, 5)
    (late,) = session.fork(at=3)
    assert late.info().position == 3
    assert generated(early, 8) == generated(late, 8)
    early.delete()
    late.delete()


def test_rewound_session_continues_differently_from_the_same_text(session: Session) -> None:
    session.append([10, 20, 30])
    first, before = generated(session, 6, seed=2), session.info()
    rewound = session.rewind(3)
    assert (rewound.position, rewound.seq) == (3, before.seq)
    assert rewound.epoch == session.info().epoch != before.epoch
    assert generated(session, 6, seed=3) != first
    session.rewind(3)
    assert generated(session, 6, seed=2) == first


def test_position_beyond_the_text_is_refused(session: Session) -> None:
    session.append([10, 20, 30])
    with pytest.raises(InvalidRequest) as caught:
        session.fork(at=4)
    assert caught.value.param == "at"
    with pytest.raises((InvalidRequest, HistoryGone)):
        session.rewind(99)


def test_append_returns_logprobs(session: Session) -> None:
    plain = session.append("Once upon a time")
    assert plain.logprobs is None
    scored = session.append([40, 50, 60], logprobs=True)
    assert scored.logprobs is not None
    assert len(scored.logprobs) == 3
    assert all(logprob < 0 for logprob in scored.logprobs)


def test_append_under_a_key_is_done_once(session: Session) -> None:
    session.append([1, 2])
    first = session.append([40, 50], logprobs=True, idempotency_key=f"{session.id}-a")
    again = session.append([40, 50], logprobs=True, idempotency_key=f"{session.id}-a")
    assert (
        (again.position, again.logprobs) == (first.position, first.logprobs) == (4, first.logprobs)
    )
    assert session.info().position == 4


def test_generation_under_a_key_is_read_again(client: Client, session: Session) -> None:
    key = {"idempotency_key": f"{session.id}-g"}
    first = session.generate([1, 2], max_tokens=5, seed=1, ignore_eos=True, **key)
    tokens = tokens_of(first)
    generated(session, 3)
    again = session.generate([1, 2], max_tokens=5, seed=1, ignore_eos=True, **key)
    assert tokens_of(again) == tokens
    assert (again.resumed is None, again.started) == (False, None)
    assert again.finished is not None
    assert again.finished.seq == 6
    assert session.info().seq == 6 + 4


def test_new_session_under_a_key_is_the_same_one(client: Client) -> None:
    ids = set()
    for _ in range(2):
        generation = client.generate("x", keep=True, max_tokens=1, idempotency_key="only-one")
        generation.text()
        ids.add(generation.session)
    (id,) = ids
    assert id is not None
    client.session(id).delete()


def test_resumed_events_continue_where_the_reader_was(client: Client, session: Session) -> None:
    generation = session.generate([5, 6], max_tokens=20, seed=1, ignore_eos=True)
    head = read(generation, 4)
    generation.detach()
    assert (generation.last_seq, list(generation)) == (4, [])
    assert generation.epoch is not None
    resumed = client.resume(session.id, 4, generation.epoch)
    assert resumed.resumed is not None
    tail = tokens_of(resumed)
    assert resumed.finished is not None
    assert resumed.finished.finish_reason == "length"
    alone = client.generate([5, 6], max_tokens=20, seed=1, ignore_eos=True)
    assert head + tail == tokens_of(alone)


def test_all_events_of_a_session_can_be_read_again(client: Client, session: Session) -> None:
    session.append([1, 2])
    tokens = generated(session, 3) + generated(session, 4)
    resumed = client.resume(session.id, 0)
    events = list(resumed)
    assert [event.seq for event in events] == list(range(1, 10))
    assert [e.token_id for e in events if isinstance(e, Token)] == tokens
    assert list(client.resume(session.id, 9)) == []


def test_second_reader_needs_take_over(server_url: str, session: Session) -> None:
    generation = session.generate([1], max_tokens=FOR_EVER, ignore_eos=True)
    next(generation)
    with Client(server_url, timeout_s=30) as other:
        with pytest.raises(SessionAttached):
            other.resume(session.id, 0)
        taken = other.resume(session.id, 0, take_over=True)
        with pytest.raises(SessionAttached):
            list(generation)
        assert next(taken).seq == 1
        taken.cancel()
    assert not session.info().busy


def test_connection_that_ends_leaves_the_generation_running(server_url: str) -> None:
    with Client(server_url, timeout_s=30) as first:
        session = first.create_session()
        generation = session.generate([1, 2], max_tokens=40, seed=1, ignore_eos=True)
        head = read(generation, 3)
    with Client(server_url, timeout_s=30) as second:
        resumed = second.resume(session.id, 3, generation.epoch, take_over=True)
        alone = second.generate([1, 2], max_tokens=40, seed=1, ignore_eos=True)
        assert head + tokens_of(resumed) == tokens_of(alone)
        second.session(session.id).delete()


def test_stale_epoch_names_the_new_cursor(client: Client, session: Session) -> None:
    generation = session.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    generation.text()
    session.rewind(3)
    assert generation.last_seq is not None
    with pytest.raises(SessionReset, match="rewound") as caught:
        client.resume(session.id, generation.last_seq, generation.epoch)
    reset = caught.value
    more = generated(session, 2)
    assert tokens_of(client.resume(reset.session, reset.last_seq, reset.epoch)) == more


def test_cancel_ends_a_detached_generation(session: Session) -> None:
    generation = session.generate([1], max_tokens=FOR_EVER, ignore_eos=True)
    next(generation)
    generation.detach()
    session.cancel()
    while session.info().busy:  # it ends with the step that is under way
        pass
    assert session.info().position < FOR_EVER


def test_list_has_every_session_at_any_page_size(client: Client) -> None:
    made = [client.create_session() for _ in range(5)]
    made[0].append([1, 2, 3])
    for page_size in (1, 2, 100):
        found = {one.id: one for one in client.sessions(page_size)}
        assert {session.id for session in made} <= found.keys()
        listed = found[made[0].id].listed
        assert listed is not None
        assert listed.position == found[made[0].id].info().position == 3
    for session in client.sessions():
        if session.id in {one.id for one in made}:
            session.delete()
    assert not {session.id for session in made} & {one.id for one in client.sessions()}


def test_exported_session_continues_on_another_server(client: Client, session: Session) -> None:
    session.append("Once upon a time")
    copy = client.import_session(session.export())
    assert copy.id != session.id
    assert generated(copy, 8) == generated(session, 8)
    copy.delete()
    with pytest.raises(InvalidRequest):
        client.import_session(b"no session")


def test_session_that_is_gone_is_not_found(client: Client) -> None:
    session = client.session("sess_unknown")
    for ask in (session.fork, session.export, session.cancel, lambda: session.rewind(0)):
        with pytest.raises(SessionNotFound):
            ask()
    with pytest.raises(SessionNotFound):
        client.resume(session.id, 0)


def test_text_shows_what_was_read_and_generated(session: Session) -> None:
    begun = session.append("Once upon a time")
    generation = session.generate(max_tokens=8, seed=2, ignore_eos=True)
    answer = generation.text()
    text = session.text()
    assert [part.kind for part in text.parts] == ["input", "output"]
    assert text.text == "Once upon a time" + answer
    assert (text.start, text.end, text.position) == (0, begun.position + 8, begun.position + 8)
    assert session.text(begun.position).text == answer
    (copy,) = session.fork(at=begun.position)
    with pytest.raises(HistoryGone):
        copy.text(0)
    copy.delete()
