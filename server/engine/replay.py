"""From a session's last saved value and the log's entries after it to the present.

Nothing is computed: the entries become text that the state has not been fed. The engine
feeds it, cut as it was the first time, before anything new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from server.engine.detokenizer import StopStrings
from server.engine.live import turn_of
from server.engine.session import Session
from server.engine.turn_text import TurnText
from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Entry, Progress, Rewound


def replay(
    session: Session, progress: Progress | None, entries: Sequence[Entry], at: int | None = None
) -> Progress | None:
    """Brings ``session`` forward by ``entries``; returns the request that had not finished.

    With ``at`` only to where its text has that many tokens, with no request; its
    ``seq``, ``epoch`` and ``log_index`` are still those of all entries.
    """
    past: list[Entry] = []
    length = session.length
    for entry in entries:
        if isinstance(entry, Rewound):
            past = [*_until(past, entry.value.length), entry]
            length = min(length, entry.value.length)
            session.epoch = entry.value.epoch
        else:
            past.append(entry)
            session.log_index += isinstance(entry, Accepted | TokenEvent | Finished)
    if at is not None:
        past = _until(past, at)
        length = min(length, at)
    session.cut_prompt(length)
    progress = _apply(session, progress, past)
    if at is not None:
        session.cut(min(at, session.length))
    seqs = [e.seq for e in entries if isinstance(e, TokenEvent | Finished)]
    session.seq = max([session.seq, *seqs])
    ended = at is not None or any(isinstance(entry, Rewound) for entry in entries[-1:])
    return None if ended else progress


def _apply(
    session: Session, progress: Progress | None, entries: Iterable[Entry]
) -> Progress | None:
    stops, turn = _requests(progress)
    num_generated = 0 if progress is None else progress.num_generated
    for entry in entries:
        if isinstance(entry, TokenEvent):
            exact = session.constraint is not None
            text = session.detokenizer.push(entry.token_id, exact)
            if stops is not None:
                stops.push(text)
            session.hold(entry.token_id)
            if session.constraint is not None:
                session.constraint.tokens.append(entry.token_id)
            if turn is not None and progress is not None:
                turn.push(text)
                session.end_thinking(progress.request, turn)
            num_generated += 1
        elif isinstance(entry, Accepted):
            progress, num_generated = Progress(entry.request, entry.length), 0
            stops, turn = _requests(progress)
            session.begin(entry.request, entry.tokens)
        elif isinstance(entry, Finished):
            session.cut(entry.position)  # shorter where it was cancelled within its prompt
            progress = stops = turn = None
            if entry.grammar_ended:
                session.constraint = None
        elif isinstance(entry, Rewound):
            session.write_on(entry.value)
    if progress is None:
        return None
    withheld = stops.withheld if stops is not None else ""
    state = turn.state if turn is not None else None
    return Progress(progress.request, progress.length, num_generated, withheld, turn=state)


def _requests(progress: Progress | None) -> tuple[StopStrings | None, TurnText | None]:
    """What reads the text of a request: its stop strings, or a chat's turn."""
    if progress is None or progress.request.sampling is None:
        return None, None
    if (turn := turn_of(progress)) is not None:
        return None, turn
    stops = StopStrings(progress.request.sampling.stop)
    stops.restore(progress.withheld)
    return stops, None


def _until(entries: Sequence[Entry], length: int) -> list[Entry]:
    """The entries that make the first ``length`` tokens of the text."""
    kept: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Accepted):
            if entry.length >= length:
                break
            kept.append(_cut(entry, length - entry.length))
        elif isinstance(entry, TokenEvent):
            if entry.position >= length:
                break
            kept.append(entry)
        elif isinstance(entry, Finished):
            kept.append(replace(entry, position=min(entry.position, length)))
        elif isinstance(entry, Rewound):
            kept.append(entry)
    return kept


def _cut(entry: Accepted, num_tokens: int) -> Accepted:
    """Within its prompt nothing was to be generated yet, and so under no grammar."""
    if num_tokens >= len(entry.tokens):
        return entry
    request = replace(entry.request, sampling=None)
    return entry._replace(request=request, tokens=entry.tokens[:num_tokens])
