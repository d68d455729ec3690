"""What may come over the wire, strictly, formats of texts included."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.api.schemas.wire import (
    Epoch,
    IdempotencyKey,
    ModelName,
    PrefixName,
    Refusal,
    RequestId,
    SessionId,
    StateName,
    Wire,
    field_names,
    known_alone,
)
from server.engine.sampling import MAX_DRY_BREAKERS, PENALTY_WINDOW

# -------------------------------------------------------------------------------------------------
# What a text must be, as a client asks for it: OpenAI's ``response_format`` and more.
#
# Only sizes are looked at here; what a schema or a grammar means is found out by
# `server.constraints`, in a process of its own.


MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_LISTED_TEXTS = 1024
MAX_CHOICE_CHARS = 1024
MAX_CHOICES_CHARS = 64 * 1024


#: No object of the protocol has as many fields.
MAX_FIELDS = 64


def few_fields(value: Any) -> Any:
    """``value``; raises for an object of more than `MAX_FIELDS`, before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"must have at most {MAX_FIELDS} fields")
    return value


def finite_numbers(value: dict[str, Any]) -> dict[str, Any]:
    """``value``; raises at the first number that is not finite, and where it is nested deeply."""
    if _depth(value, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise PydanticCustomError("json_depth", "must have at most 64 levels")
    return value


def _schema_of_fair_size(schema: dict[str, Any]) -> dict[str, Any]:
    # Depth first: the serialiser has a bound of its own, and another error for it.
    if _depth(schema, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise PydanticCustomError("schema_depth", "the schema is nested deeper than 64 levels")
    try:
        size = len(orjson.dumps(schema))
    except TypeError:  # an integer of more than 64 bits
        raise PydanticCustomError("schema_value", "the schema has a number out of range") from None
    if size > MAX_SCHEMA_BYTES:
        raise PydanticCustomError("schema_size", "the schema is larger than 64 KiB")
    return schema


def _depth(value: object, limit: int) -> int:
    """Levels of ``value``, at most ``limit + 1``. Raises for a number that is not finite."""
    level, depth = [value], 0
    while level and depth <= limit:
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise PydanticCustomError("schema_value", "has a number that is not finite")
        level, depth = below, depth + 1
    return depth


def _few_chars(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MAX_CHOICES_CHARS:
        raise PydanticCustomError("choices_size", "the choices are longer than 65536 characters")
    return choices


Schema = Annotated[dict[str, Any], AfterValidator(_schema_of_fair_size)]
SchemaName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Choice = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHOICE_CHARS)]
ChoiceList = Annotated[
    list[Choice],
    Field(fail_fast=True, min_length=1, max_length=MAX_LISTED_TEXTS),
    AfterValidator(_few_chars),
]


class FormatPart(BaseModel):
    """Base of all parts of a format: as strict as every message."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_by_name=True,
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _known_alone(cls, value: object) -> object:
        names = field_names(cls) | cls.model_fields.keys()
        if not isinstance(value, dict) or names.issuperset(value):
            return value
        return known_alone(cls, value, {})


class TextFormat(FormatPart):
    """Any text: the default."""

    type: Literal["text"]


class JsonObjectFormat(FormatPart):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(FormatPart):
    """OpenAI's shape of a schema. It is always followed, whatever ``strict`` says."""

    name: SchemaName
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None
    description: str | None = Field(None, max_length=4096)


class JsonSchemaFormat(FormatPart):
    """JSON that a schema admits."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(FormatPart):
    """A text that matches a regular expression from its first character to its last."""

    type: Literal["regex"]
    regex: str = Field(min_length=1, max_length=MAX_REGEX_CHARS)


class GrammarFormat(FormatPart):
    """A text that a grammar in Lark's notation, as llguidance reads it, can derive."""

    type: Literal["grammar"]
    grammar: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)


class ChoiceFormat(FormatPart):
    """One of some texts."""

    type: Literal["choice"]
    choices: ChoiceList


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]


# -------------------------------------------------------------------------------------------------
# What may come over the wire, strictly: no unknown fields, no coercion, no NaN.
#
# They are parsed by `server.api.schemas.wire`. Null is accepted where OpenAI accepts it
# and means the default. The bodies of OpenAI's routes are next to those routes.


MAX_CHOICES = 128
MAX_FORKS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20

#: Their range is checked where the vocabulary is known: see `server.api.prepare`.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
#: Below 0 is off, as in llama.cpp.
TopNSigma = Annotated[float, Field(le=100), AfterValidator(lambda n: max(n, 0.0))]
#: -1 is all that a session keeps, as are numbers above that.
DryLastN = Annotated[
    int,
    Field(ge=-1, le=2**31 - 1),
    AfterValidator(lambda n: PENALTY_WINDOW if n == -1 else min(n, PENALTY_WINDOW)),
]
Breaker = Annotated[str, StringConstraints(min_length=1, max_length=64)]


def _listed(breakers: object) -> object:
    """text-generation-webui takes the list as a text of JSON."""
    if not isinstance(breakers, str):
        return breakers
    try:
        return orjson.loads(breakers)
    except orjson.JSONDecodeError:
        return breakers


Breakers = Annotated[
    list[Breaker], Field(fail_fast=True, max_length=MAX_DRY_BREAKERS), BeforeValidator(_listed)
]


def _whole(value: object) -> object:
    """Some languages write 40 as 40.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


_WHOLE = BeforeValidator(_whole)
#: -1 is off, as in vLLM.
TopK = Annotated[
    int, Field(ge=-1, le=2**31 - 1), AfterValidator(lambda top_k: max(top_k, 0)), _WHOLE
]
#: -1 is drawn by the server, as in llama.cpp.
Seed = Annotated[
    int,
    Field(ge=-1, le=2**63 - 1),
    AfterValidator(lambda seed: None if seed == -1 else seed),
    _WHOLE,
]
#: As many tokens as the server allows, as in llama.cpp.
UNLIMITED = -1
MaxTokens = Annotated[int, Field(ge=UNLIMITED, le=2**53), _WHOLE]


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("zero", "must be at least 1, or -1")
    return value


SomeTokens = Annotated[MaxTokens, AfterValidator(_not_zero)]


def _boolean(value: object) -> object:
    """To Python 0 is equal to false."""
    if value is not None and not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "must be a valid boolean")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_boolean)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_boolean)]


def _few(biases: object) -> object:
    """Before each is looked at, which would be reported one by one."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"must have at most {MAX_BIASES} token ids")
    return biases


Biases = Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_few)]


class Drawing(Wire):
    """How tokens are drawn and what ends a text: the fields that have one name on all routes."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_k: TopK | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    top_n_sigma: TopNSigma | None = None
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, le=PENALTY_WINDOW)
    dry_penalty_last_n: DryLastN | None = None
    dry_sequence_breakers: Breakers | None = None
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31 - 1)
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Biases | None = None
    top_logprobs: TopLogprobs | None = None


class Sampling(Drawing):
    """How to generate; shared by HTTP and WebSocket."""

    max_tokens: SomeTokens | None = None
    response_format: ResponseFormat | None = None


class Once(Wire):
    """The client's own name for a piece of work: under one name it is done once."""

    idempotency_key: IdempotencyKey | None = None


class Continuation(Once):
    """Which model or session to run in, or what a new one begins with, and whether it stays.

    With ``speculation`` off each step draws one of its tokens; the text is the same.
    """

    model: ModelName | None = None
    session: SessionId | None = None
    keep: bool | None = None
    state: StateName | None = None
    speculation: Literal["auto", "off"] | None = None


class Prefixed(Wire):
    """A handle of a prompt that was read before, and whether one of this prompt is wanted."""

    prefix: PrefixName | None = None
    return_prefix: bool | None = None


class StreamOptions(Wire):
    """OpenAI's options of a stream, and vLLM's: with ``continuous_usage_stats`` usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None

    @property
    def asks(self) -> bool:
        """Whether it asks for anything that only a stream has."""
        return bool(self.include_usage or self.continuous_usage_stats)


class CreateSessionBody(Wire):
    """`POST /v1/sessions`: of ``model``, or of the default one; empty, or with ``state``."""

    model: ModelName | None = None
    state: StateName | None = None


class AppendBody(Once):
    """`POST /v1/sessions/{id}/append`: one of text and tokens."""

    text: str | None = None
    tokens: TokenIds | None = None
    logprobs: bool | None = None


class ForkBody(Wire):
    """`POST /v1/sessions/{id}/fork`: copies of the session, as it is or as it was."""

    n: int | None = Field(None, ge=1, le=MAX_FORKS)
    at: int | None = Field(None, ge=0, le=2**53)


class RewindBody(Wire):
    """`POST /v1/sessions/{id}/rewind`: cuts the text back to ``at`` tokens."""

    at: int = Field(ge=0, le=2**53)


class SocketMessage(Wire):
    """Base of what a client sends on `/v1/stream`, under its own ``request_id``."""

    request_id: RequestId


class SessionMessage(SocketMessage):
    """Base of what is about a session."""

    session: SessionId


class Create(CreateSessionBody, SocketMessage):
    """Asks for a kept session of ``model``, or of the default one: empty, or with ``state``."""

    type: Literal["create"]


class Generate(Sampling, Prefixed, Continuation, SocketMessage):
    """Asks for tokens of ``model``, or of the session's, or the default one."""

    type: Literal["generate"]
    prompt: str | TokenIds | None = None


class Append(AppendBody, SessionMessage):
    """Feeds a session without generating."""

    type: Literal["append"]


class Cancel(SocketMessage):
    """Ends a live request of the same socket."""

    type: Literal["cancel"]


class Delete(SessionMessage):
    """Frees a session."""

    type: Literal["delete"]


class Fork(ForkBody, SessionMessage):
    """Copies a session."""

    type: Literal["fork"]


class Rewind(RewindBody, SessionMessage):
    """Cuts a session's text back."""

    type: Literal["rewind"]


class Resume(SessionMessage):
    """Asks for all events of a session after ``last_seq``, and for those to come."""

    type: Literal["resume"]
    last_seq: int = Field(ge=0, le=2**53)
    epoch: Epoch | None = None
    take_over: bool | None = None


class Detach(SocketMessage):
    """Leaves a live request of the same socket to continue by itself."""

    type: Literal["detach"]


Message = Annotated[
    Create | Generate | Append | Cancel | Delete | Fork | Rewind | Resume | Detach,
    Field(discriminator="type"),
]

#: The values of ``type``, in the order of the protocol's page.
MESSAGE_TYPES = (
    *("create", "generate", "append", "cancel", "delete"),
    *("fork", "rewind", "resume", "detach"),
)


def refused(names: Iterable[str], reason: str, *accepted: object) -> dict[str, Refusal]:
    """All of ``names`` are refused for ``reason``, with other values than those ``accepted``."""
    return dict.fromkeys(names, Refusal(reason, accepted))


#: Of llama.cpp, Ollama and text-generation-webui. Clients send them all, most of them off.
OTHER_SAMPLERS = {
    **refused(["mirostat", "mirostat_mode"], "use min_p or top_n_sigma", 0),
    **refused(["dynamic_temperature", "dynatemp_range"], "use top_n_sigma", False, 0),
    **refused(["smoothing_factor", "top_a", "epsilon_cutoff", "eta_cutoff"], "use min_p", 0),
    **refused(["tfs", "tfs_z", "guidance_scale"], "use min_p or typical_p", 1),
    **refused(["penalty_alpha", "negative_prompt"], "the model is run once for each token", 0, ""),
    **refused(["skew", "no_repeat_ngram_size"], "use dry_multiplier or typical_p", 0),
    **refused(["encoder_repetition_penalty"], "use repetition_penalty", 1),
    **refused(["adaptive_target"], "use min_p or top_n_sigma", -1, -0.01),
    **refused(["do_sample"], "a temperature of 0 is greedy", True),
    **refused(["temperature_last"], "the temperature comes before the filters", False),
    **refused(["num_beams"], "there is no beam search", 1),
    **refused(["min_tokens", "min_length"], "use ignore_eos with a limit of tokens", 0),
    **refused(["ban_eos_token"], "use ignore_eos", False),
    **refused(["custom_token_bans", "banned_strings"], "use logit_bias on token ids", "", []),
    **refused(["grammar", "grammar_string"], "GBNF is not read; give a JSON schema", ""),
}

#: What has a meaning only next to those.
PARTS_OF_OTHERS = frozenset(
    {
        *("mirostat_tau", "mirostat_eta", "dynatemp_low", "dynatemp_high", "dynatemp_exponent"),
        *("smoothing_curve", "adaptive_decay", "rep_pen_slope", "max_tokens_second"),
    }
)
