"""Bodies of OpenAI's routes: what may come to those for text and tokens, and others' fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from server.api.chat.messages import NO_MEDIA, Messages, TemplateKwargs, Tools
from server.api.schemas.requests import (
    MAX_CHOICES,
    OTHER_SAMPLERS,
    PARTS_OF_OTHERS,
    Continuation,
    MaxTokens,
    Prefixed,
    Sampling,
    StreamOptions,
    TokenIds,
    TopLogprobs,
    refused,
)
from server.api.schemas.wire import Label, ModelName, Refusal, Wire, field_error
from server.errors import invalid

# -------------------------------------------------------------------------------------------------
# Fields that OpenAI's API or other servers have, and this one calls otherwise, ignores or refuses.
#
# A value that asks for nothing (null, or the default) is accepted. A field that a body declares
# itself is never looked up here.

#: What other servers call fields of ours. Some clients send all names at once.
OTHER_NAMES = {
    # llama.cpp, Ollama, text-generation-webui
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "nsigma": "top_n_sigma",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
    "repetition_penalty_range": "repeat_last_n",
    # KoboldAI
    "rep_pen": "repetition_penalty",
    "rep_pen_range": "repeat_last_n",
}

#: Without effect: what is only about how other servers work, or is stored, billed or scheduled
#: there. The answer's text is the same with them.
HARMLESS = frozenset(
    {
        # OpenAI
        *("store", "metadata", "service_tier", "verbosity", "client_metadata"),
        *("prompt_cache_options", "prompt_cache_retention"),
        # vLLM
        *("priority", "request_id"),
        # llama.cpp: the prefix cache and the slots are the server's own affair here
        *("cache_prompt", "id_slot", "slot_id", "n_cache_reuse", "timings_per_token"),
        *("return_progress", "return_tokens", "parse_tool_calls"),
        # Ollama and others: a session has no length that could be set
        *("keep_alive", "num_ctx", "n_ctx", "truncation_length"),
        *PARTS_OF_OTHERS,
        # SillyTavern's notes for itself
        *("api_type", "api_server", "include_reasoning"),
    }
)


def with_usual_thinking(value: Any) -> Any:
    """A chat's body in which other servers' switches of thinking are the template's variable.

    These are ``enable_thinking`` on the top level, of Qwen's and others' servers, and ``thinking``
    as an object with a ``type``, of DeepSeek's and others'.
    """
    if not isinstance(value, dict) or value.keys().isdisjoint(("enable_thinking", "thinking")):
        return value
    rest = {name: item for name, item in value.items() if name not in _SWITCHES}
    kwargs = rest.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        return rest  # which is refused
    wanted = dict(kwargs or {})
    for name, read in _SWITCHES.items():
        is_on = None if value.get(name) is None else read(value[name])
        if is_on is None:
            continue
        if wanted.get(SWITCH, is_on) is not is_on:
            raise field_error(name, "contradicts another field that switches the thinking")
        wanted[SWITCH] = is_on
    return {**rest, "chat_template_kwargs": wanted} if wanted else rest


#: The variable; for templates with another one `server.api.chat.prepare` translates it.
SWITCH = "enable_thinking"


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise field_error("enable_thinking", "must be a valid boolean")
    return value


def _typed(value: object) -> bool | None:
    kinds = {"enabled": True, "disabled": False, "auto": None, "adaptive": None}
    kind = value.get("type", "auto") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in kinds:
        message = "must be an object whose type is enabled, disabled, auto or adaptive"
        raise field_error("thinking", message)
    for other in value.keys() - {"type"}:
        raise field_error("thinking", f"has no field {other[:64]} here; give reasoning_effort")
    return kinds[kind]


_SWITCHES = {"enable_thinking": _flag, "thinking": _typed}


def _with_named_schema(value: Any) -> Any:
    """A body in which a schema next to ``json_object``, as in llama.cpp, is OpenAI's."""
    given = value.get("response_format") if isinstance(value, dict) else None
    if not isinstance(given, dict) or given.get("type") != "json_object" or "schema" not in given:
        return value
    schema = {"name": "schema", "schema": given["schema"]}
    rest = {name: item for name, item in given.items() if name not in ("type", "schema")}
    return {**value, "response_format": {**rest, "type": "json_schema", "json_schema": schema}}


_HOSTED = {
    **refused(
        ["cache_salt"],
        "the prefix cache needs no key: it knows each tenant's own prefixes at any token",
    ),
    **refused(["moderation"], "this server moderates nothing"),
}

#: Of vLLM's, llama.cpp's, text-generation-webui's and others' sampling.
_SAMPLING = {
    **refused(["use_beam_search"], "there is no beam search; use best_of", False),
    **refused(["length_penalty"], "is for beam search, which there is not", 1.0),
    **refused(["early_stopping"], "is for beam search, which there is not", False),
    **OTHER_SAMPLERS,
    **refused(["json_schema"], "use response_format", {}),
    **refused(["min_keep"], "filters leave one token at least", 0, 1),
    **refused(["samplers", "sampler_priority"], "filters have one order", []),
    **refused(["add_bos_token"], "a text gets the start token, token ids are as given", True),
    **refused(["n_probs"], "use logprobs", 0),
    **refused(["reasoning_format"], "the thinking is in reasoning_content", "auto", "deepseek"),
    **refused(["bad_words"], "is not supported; use logit_bias on token ids", []),
    **refused(["allowed_token_ids"], "is not supported; use logit_bias or response_format"),
    **refused(["include_stop_str_in_output"], "a stop string is never shown", False),
    **refused(["skip_special_tokens"], "special tokens have no text here", True),
    **refused(["spaces_between_special_tokens"], "special tokens have no text here", True),
    **refused(["detokenize"], "text is always made", True),
    **refused(
        ["truncate_prompt_tokens", "truncation_prompt_tokens", "truncation_side"],
        "a prompt is never cut: the state has no length limit",
        -1,
    ),
    **refused(["add_special_tokens"], "a text gets the start token, token ids are as given", True),
    **refused(["logits_processors"], "the server runs no code of its clients"),
    **refused(["return_tokens_as_token_ids"], "is not supported", False),
    **refused(["kv_transfer_params", "vllm_xargs"], "is not supported"),
    **refused(
        [
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
            "structured_outputs",
        ],
        "is not supported; use response_format",
    ),
}

#: `POST /v1/completions`.
COMPLETIONS = {
    **_HOSTED,
    **_SAMPLING,
    **refused(["suffix"], "the model cannot fill in: it reads from left to right", ""),
    **refused(["max_completion_tokens"], "is called max_tokens here"),
    **refused(["tools", "tool_choice", "messages"], "is for /v1/chat/completions"),
    **refused(["logprob_start_len", "return_logprob"], "is not supported; use logprobs and echo"),
}

#: `POST /v1/chat/completions`.
CHAT = {
    **_HOSTED,
    **_SAMPLING,
    **refused(["audio"], NO_MEDIA),
    **refused(["modalities"], NO_MEDIA, ["text"]),
    **refused(["web_search_options"], "the server reaches no network"),
    **refused(["reasoning"], "is called reasoning_effort here", {}, {"effort": "none"}),
    **refused(["functions"], "is not supported; use tools", []),
    **refused(["function_call"], "is not supported; use tool_choice", "none"),
    **refused(["prompt_logprobs", "echo"], "is for /v1/completions", False),
    **refused(["chat_template"], "the template comes from the model alone"),
    **refused(["documents"], "is not supported; chat_template_kwargs may have them", []),
    **refused(["prompt"], "is for /v1/completions; give messages"),
    **refused(["allowed_tools"], "is part of tool_choice"),
    **refused(["best_of"], "is for /v1/completions", 1),
    **refused(["mm_processor_kwargs", "media_io_kwargs"], NO_MEDIA),
}

#: `POST /v1/responses`.
RESPONSES = {
    **_HOSTED,
    **refused(["conversation"], "there are no conversation objects; use previous_response_id"),
    **refused(["max_tool_calls"], "there are no built-in tools"),
    **refused(["prompt"], "there are no stored prompts"),
    **refused(["context_management"], "the state has a constant size: nothing needs to be cut"),
    **refused(["messages"], "is for /v1/chat/completions; give input"),
    **refused(["max_tokens", "max_completion_tokens"], "is called max_output_tokens here"),
}

#: What a response says of its thinking.
REASONING = {
    **refused(
        ["summary", "generate_summary"],
        "there are no summaries: the output has all that is thought",
        "auto",
    ),
}

#: `POST /v1/embeddings`.
EMBEDDINGS = {
    **refused(["dimensions"], "the vector has the model's hidden size, and is not cut"),
    **refused(["truncate_prompt_tokens"], "an input is never cut"),
    **refused(["messages"], "is not supported; give input"),
    **refused(["priority"], "all requests have the same priority", 0),
    **refused(["normalize"], "the vector always has the length 1", True),
}


# -------------------------------------------------------------------------------------------------
# What may come to the routes for text and tokens: completions, embeddings, scores, tokens.

#: Prompts of one request, and continuations of one context.
MAX_PROMPTS = 256
#: Inputs of one request for embeddings, as many as OpenAI takes.
MAX_INPUTS = 2048


class Labels(Wire):
    """What a client may note down for itself; nothing here depends on it."""

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, value: object, info: ValidationInfo) -> object:
        """They are among the fields without effect that the head of the answer lists."""
        if isinstance(value, dict) and isinstance(info.context, set):
            given = (name for name in Labels.model_fields if value.get(name) is not None)
            info.context.update(given)
        return value


Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]


def kind_of_prompt(value: object) -> str:
    """Which of OpenAI's four kinds a prompt is of, by its first item."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    if isinstance(first, str):
        return "texts"
    return "batch" if isinstance(first, list) else "ids"


#: A text, several, token ids, or several lists of them.
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[IdLists, Tag("batch")],
    Discriminator(kind_of_prompt),
]


#: The same, for embeddings.
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("batch")],
    Discriminator(kind_of_prompt),
]


def prompts_in(prompt: Sequence[object] | str) -> list[str | list[int]]:
    """Each of them by itself."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [cast("str | list[int]", prompt)]
    return list(cast("Sequence[str | list[int]]", prompt))


#: One text, or its token ids.
OnePrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
]


class GenerationBody(Sampling, Continuation, Labels):
    """What the bodies of completions and of chats share."""

    hints = HARMLESS
    other_names = OTHER_NAMES

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _usual_format(cls, value: object) -> object:
        return _with_named_schema(value)

    def check(self, shows_logprobs: bool) -> None:
        """Raises `InvalidRequest` for fields that do not go together."""
        if self.stream_options is not None and self.stream_options.asks and not self.stream:
            raise invalid("stream_options", "needs stream to be true")
        if self.idempotency_key is not None and shows_logprobs:
            raise invalid("idempotency_key", "cannot be combined with logprobs, which are not kept")
        if self.idempotency_key is not None and self.return_token_ids:
            raise invalid("idempotency_key", "cannot be combined with return_token_ids")


class CompletionBody(GenerationBody, Prefixed):
    """`POST /v1/completions`."""

    refused: ClassVar[Mapping[str, Refusal]] = COMPLETIONS

    prompt: Prompt | None = None
    max_tokens: MaxTokens | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)


class EmbeddingsBody(Wire):
    """`POST /v1/embeddings`."""

    refused: ClassVar[Mapping[str, Refusal]] = EMBEDDINGS

    model: ModelName | None = None
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    user: Label | None = None


class ScoreBody(Wire):
    """`POST /v1/score`: how likely each of ``continuations`` is after ``prompt``."""

    model: ModelName | None = None
    prompt: OnePrompt
    continuations: Annotated[
        list[OnePrompt], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
    ]
    top: TopLogprobs | None = None
    user: Label | None = None


class TokenizeBody(Wire):
    """`POST /tokenize`: a text, or messages as `POST /v1/chat/completions` renders them."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    allow_special: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Wire):
    """`POST /detokenize`."""

    model: ModelName | None = None
    tokens: TokenIds
