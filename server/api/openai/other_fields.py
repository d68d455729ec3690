"""Fields that other servers have: what they mean here, and those that have no effect here.

What would change the answer and is not supported is in `server.api.openai.refused`.
"""

from __future__ import annotations

from typing import Any

from server.api.schemas.other_samplers import PARTS_OF_OTHERS
from server.api.schemas.wire import field_error

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


#: The variable; for templates with another one `server.api.chat.answer_options` translates it.
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


def with_named_schema(value: Any) -> Any:
    """A body in which a schema next to ``json_object``, as in llama.cpp, is OpenAI's."""
    given = value.get("response_format") if isinstance(value, dict) else None
    if not isinstance(given, dict) or given.get("type") != "json_object" or "schema" not in given:
        return value
    schema = {"name": "schema", "schema": given["schema"]}
    rest = {name: item for name, item in given.items() if name not in ("type", "schema")}
    return {**value, "response_format": {**rest, "type": "json_schema", "json_schema": schema}}
