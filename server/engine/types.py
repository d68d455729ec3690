"""What goes into the engine and what comes out: frozen data, no behaviour.

Times are seconds on the caller's monotonic clock. Positions count tokens of a
session from 0. ``owner`` is the tenant that a session belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from server.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]

#: What an id of a prompt takes in memory: with the request, as what its session has not read yet,
#: and as what the prefix cache may keep the states of.
PROMPT_ID_BYTES = 3 * 4

#: The most probable tokens at one place, best first: ids and natural logarithms.
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """That the text is a turn of a chat: thinking between two markers, and an answer.

    ``begin`` and ``end`` are the markers. ``prompted`` says what the prompt has of them: nothing,
    so that the model may begin to think by itself; "open", the begin marker; "closed", both.
    ``lead`` is what the last one lacks, for the model to write. A string of ``stop`` ends the
    text before its answer has begun, as one of `SamplingParams.stop` does after that. The
    thinking is at most ``budget`` tokens long, None for any number; then ``close`` is written,
    which must have the end marker in it. ``gap`` is written between an end marker and an answer
    under a grammar. That applies at once unless the prompt has begun to think.
    """

    begin: str
    end: str
    prompted: Literal["", "open", "closed"] = ""
    lead: str = ""
    stop: tuple[str, ...] = ()
    budget: int | None = None
    close: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Dry:
    """DRY: a penalty of tokens that would continue a repetition (p-e-w 2024, as in llama.cpp).

    Where a token came before after ``length`` tokens that are also the last of the text, its logit
    loses ``multiplier * base ** (length - allowed_length)``, if ``length`` is at least
    ``allowed_length``; the longest such length counts. It is looked for in the last
    ``penalty_last_n`` tokens, at most `server.engine.sampling.PENALTY_WINDOW`, and has none of the
    ids ``breakers`` in it.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    penalty_last_n: int = 256
    breakers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Checked by `server.engine.sampling.check_params`.

    ``temperature`` 0 is greedy, and so is ``top_p`` 0. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off, and so are ``repetition_penalty`` 1 (Keskar et al. 2019, section 4.1),
    ``presence_penalty`` 0 and ``frequency_penalty`` 0 (OpenAI's). Penalties look
    at the last `server.engine.sampling.PENALTY_WINDOW` tokens. The draw at a
    position depends on ``seed`` and that position alone. ``typical_p`` 1 is off
    (Meister et al. 2023), ``top_n_sigma`` 0 (Tang et al. 2024), and ``xtc_probability`` 0: with
    that probability, at each position, all tokens of at least ``xtc_threshold`` are dropped but the
    least likely of them (XTC, p-e-w 2024). ``dry`` None is off.
    ``logit_bias`` is added to the logits of those token ids.
    ``logprob`` asks for the log-probability of each drawn token, before all of
    these; ``top_logprobs`` for that in each event, and for so many of the most
    probable tokens, None for neither. Nothing but what ``grammar`` (in
    llguidance's form, checked before) accepts is drawn. With ``turn`` the text is
    thinking and an answer, to which alone ``stop`` and ``grammar`` apply.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprob: bool = False
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    grammar: str | None = None
    turn: Turn | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry: Dry | None = None

    @property
    def thinks_first(self) -> bool:
        """Whether the text continues with thinking, which no grammar is for."""
        return self.turn is not None and self.turn.prompted == "open"


@dataclass(frozen=True, slots=True)
class Request:
    """Work on one session: feed ``tokens``, then generate if ``sampling`` is given.

    ``request_id`` is unique among live requests. ``session`` None opens a new
    session; ``keep`` says whether it outlives the request (a session that was
    there before always does). With ``start`` an empty session is fed the
    model's start token first, as text is; token ids can be taken as they are.
    ``key`` is the client's own name for this piece of work: what comes twice
    under one key, from one owner, is done once. ``score`` asks for the
    log-probability of each token fed, and ``num_top`` for the most probable ones in
    its place; with ``sampling`` they come in `Scored`. ``num_choices``
    continuations are drawn, with seeds that count up; the prompt is fed once, and
    those after the first have ``/1``, ``/2`` ... behind the request's id. Each of
    ``continuations``, instead of drawing any, is fed to a copy of the session and
    scored; these have the same ids, and the session is not kept. ``embed`` asks
    for the mean of the fed tokens' hidden states. A ``note`` is kept with the key
    for as long as the session is. One that is ``unattended`` does not park where
    it has no reader, and its session may be discarded where there is no store to take it.
    A new session begins with the named state ``state``; `Engine.submit` gets that state itself.
    Later prompts will begin with ``cache_at`` of the ``tokens``: the prefix cache keeps the states
    there. Without ``speculation`` each step draws one of its tokens; a text like ``prediction`` is
    expected, which costs nothing but time where it is not what comes. A new session may also
    continue the prompt that the handle ``prefix`` names. ``return_prefix`` asks for such a handle.
    ``prompt_field`` is the client's field that the ``tokens`` come from: errors name it.
    Ids of whole texts are `server.engine.text.TokenArray` where a client has sent them.
    """

    request_id: str
    owner: str
    tokens: Sequence[int]
    sampling: SamplingParams | None
    session: str | None = None
    keep: bool = False
    start: bool = True
    key: str | None = None
    score: bool = False
    num_choices: int = 1
    num_top: int = 0
    continuations: tuple[Sequence[int], ...] = ()
    embed: bool = False
    note: str | None = None
    unattended: bool = False
    state: str | None = None
    cache_at: tuple[int, ...] = ()
    speculation: bool = True
    prediction: Sequence[int] = ()
    prefix: str | None = None
    return_prefix: bool = False
    prompt_field: str = "prompt"

    @property
    def num_branches(self) -> int:
        """Choices or continuations, or one."""
        return len(self.continuations) or self.num_choices

    @property
    def ids(self) -> tuple[str, ...]:
        """Under which the events of all of them come."""
        others = (f"{self.request_id}/{index}" for index in range(1, self.num_branches))
        return (self.request_id, *others)

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory until it has ended: what clients may make long."""
        num_ids = len(self.tokens) + len(self.prediction) + sum(map(len, self.continuations))
        texts = self.note, None if self.sampling is None else self.sampling.grammar
        return num_ids * PROMPT_ID_BYTES + sum(len(text) for text in texts if text)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens fed and generated by one request.

    ``cached_tokens`` of those fed were cached, ``reasoning_tokens`` of those generated thinking.
    Of the tokens that were drafted ``accepted_tokens`` were right, and are among those generated;
    of a request that was interrupted, those since it was resumed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The request has its session, which has had ``seq`` events.

    Its tokens will be computed from ``position`` on, after ``start``: the start token, if any.
    """

    request_id: str
    session: str
    position: int
    epoch: int = 0
    seq: int = 0
    start: tuple[int, ...] = ()


class TokenEvent(NamedTuple):
    """One generated token; a tuple, because there is one for every token.

    ``seq`` numbers the session's generated events from 1 for as long as the
    session lives. ``text`` is what became safe to show: whole characters, and
    never a part of a stop string; often empty. ``logprob`` and ``top`` are there
    where `SamplingParams.top_logprobs` asked for them: they come before bias,
    penalties, temperature, filters and grammar. ``thought`` is text of the thinking, which
    ``text`` is not; None for a token of the answer.
    """

    request_id: str
    seq: int
    position: int
    token_id: int
    text: str
    logprob: float | None = None
    top: Top = ()
    thought: str | None = None


class Scored(NamedTuple):
    """How likely a prompt was that is generated from: comes before its first token.

    ``token_ids`` are the tokens fed, a start token included. ``logprobs`` and
    ``tops`` have as many entries; the first token of a text has None and ().
    """

    request_id: str
    token_ids: Sequence[int]
    logprobs: tuple[float | None, ...]
    tops: tuple[Top, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request. ``text`` is what was still held back.

    ``session`` is None where it ended with the request. ``finish_reason`` is
    None for a request that only fed tokens. ``seq`` continues from the tokens.
    ``position`` is the session's length after it. ``logprobs`` has the natural
    logarithm of each fed token's probability, where the request asked for it;
    the first token of a text has none; ``tops`` has as many entries, where
    `Request.num_top` asked for any. ``logprob_sum`` adds up those of the generated
    tokens, where `SamplingParams.logprob` asked for them. ``embedding`` is the mean
    over the fed tokens of the hidden state after the last norm. ``grammar_ended``
    says that the text that a grammar asks for is complete. ``thought`` is what was held
    back of the thinking. ``prefix`` is the handle of the prompt, where the request asked for one
    and the prompt's state is kept.
    """

    request_id: str
    session: str | None
    seq: int
    position: int
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    error: str | None = None
    logprobs: tuple[float, ...] | None = None
    logprob_sum: float | None = None
    tops: tuple[Top, ...] | None = None
    embedding: tuple[float, ...] | None = None
    grammar_ended: bool = False
    thought: str = ""
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Migrated:
    """The session was saved here and continues elsewhere; its last event had ``seq``."""

    request_id: str
    session: str
    epoch: int
    seq: int
    position: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over here, without a `Finished`: ``error`` says why."""

    request_id: str
    error: RequestError


Event = Started | Scored | TokenEvent | Finished | Migrated | Failed


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A kept session as its owner may see it."""

    session: str
    position: int
    seq: int
    busy: bool
    idle_s: float
    state_bytes: int
    epoch: int = 0
    parked: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment, and running totals."""

    max_sessions: int
    held_slots: int
    num_sessions: int
    num_running: int
    num_waiting: int
    state_bytes_per_session: int
    prompt_tokens_total: int
    completion_tokens_total: int
    expired_sessions_total: int
    num_asleep: int = 0
    num_parked: int = 0
    evicted_sessions_total: int = 0
    preemptions_total: int = 0
    prefix_entries: int = 0
    prefix_hits_total: int = 0
    prefix_misses_total: int = 0
    prefix_saved_tokens_total: int = 0
    accepted_drafts_total: int = 0
    rejected_drafts_total: int = 0
    accepted_model_drafts_total: int = 0
    rejected_model_drafts_total: int = 0
