"""The bodies of llama.cpp's routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError

from server.api.chat.messages import Messages, TemplateKwargs, Tools
from server.api.schemas.other_samplers import OTHER_SAMPLERS, PARTS_OF_OTHERS
from server.api.schemas.requests import MAX_BIASES, Biases, Drawing, MaxTokens, Schema, TokenIds
from server.api.schemas.wire import ModelName, Refusal, Wire

#: A text, or its token ids.
LlamaPrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
]


def _paired(given: object) -> object:
    """``[[id, bias], [id, false]]`` as an object by id; false is never."""
    if not isinstance(given, list):
        return given
    if len(given) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"must have at most {MAX_BIASES} token ids")
    found: dict[str, Any] = {}
    for pair in given:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_id(pair[0]):
            raise PydanticCustomError("pairs", "must be pairs of a token id and a number or false")
        found[str(pair[0])] = -100.0 if pair[1] is False else pair[1]
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_NO_LIMITS = "a text ends by its tokens and stops"


class LlamaCompletionBody(Drawing):
    """`POST /completion`.

    ``samplers`` has no effect: there is one order, and each filter has a value that is off.
    """

    hints = frozenset(
        {
            *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse"),
            *("timings_per_token", "return_progress", "samplers", "min_keep", "n_ctx"),
            *("post_sampling_probs", "user", "api_type", "api_server", "truncation_length"),
            "num_ctx",
            *("skip_special_tokens", "include_reasoning"),
            *PARTS_OF_OTHERS,
        }
    )
    other_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "n_predict",
        "max_new_tokens": "n_predict",
        "typical": "typical_p",
        "nsigma": "top_n_sigma",
        "sampler_seed": "seed",
        "stopping_strings": "stop",
        "num_predict": "n_predict",
        "repetition_penalty_range": "repeat_last_n",
        "rep_pen": "repetition_penalty",
        "rep_pen_range": "repeat_last_n",
        "repeat_penalty": "repetition_penalty",
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        **OTHER_SAMPLERS,
        "grammar_lazy": Refusal("GBNF is not read; use json_schema", (False,)),
        "add_bos_token": Refusal("a text gets the start token, token ids do not", (True,)),
        "n_probs": Refusal("use logprobs of POST /v1/completions", (0,)),
        "n_indent": Refusal(_NO_LIMITS, (0,)),
        "t_max_predict_ms": Refusal(_NO_LIMITS, (0, -1)),
        "n": Refusal("use n of POST /v1/completions", (1,)),
        "n_cmpl": Refusal("use n of POST /v1/completions", (1,)),
        "lora": Refusal("the operator chooses them at the start", ([],)),
        "image_data": Refusal("the model reads and writes text alone", ([],)),
        "multimodal_data": Refusal("the model reads and writes text alone", ([],)),
        "response_fields": Refusal("all fields are shown", ([],)),
        "system_prompt": Refusal("is part of prompt", ("",)),
    }

    model: ModelName | None = None
    prompt: LlamaPrompt
    n_predict: MaxTokens | None = None
    stream: bool | None = None
    json_schema: Schema | None = None
    logit_bias: Annotated[Biases, BeforeValidator(_paired)] | None = None
    return_tokens: bool | None = None
    top_logprobs: None = None


class InfillBody(LlamaCompletionBody):
    """`POST /infill`: what comes between two texts, of a model that has learnt that."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **LlamaCompletionBody.refused,
        "input_extra": Refusal("give it in input_prefix", ([],)),
    }

    input_prefix: str
    input_suffix: str
    prompt: str = ""


class RenderBody(Wire):
    """`POST /apply-template`."""

    model: ModelName | None = None
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


#: Names of the tokens before, behind and between, of the vocabularies that have them.
FILLS: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
StopType = Literal["none", "eos", "limit", "word"]
