"""Bodies that cannot be: each is a 400 that names its field, and the engine does nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.talk import field_of
from tests.server.harness import Running

HI = {"role": "user", "content": "hi"}

#: What a body has where only one field is at fault.
REST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/responses": {"input": "hi"},
}

#: What a client notes down for itself.
LABELS = [
    (name, value)
    for name in ("user", "safety_identifier", "prompt_cache_key")
    for value in (5, "x" * 257, {})
]
#: Fields, each with a value that it cannot have.
VALUES: dict[str, list[tuple[str, Any]]] = {
    "/v1/completions": [
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("min_tokens", 1),
        ("grammar", "root ::= [a-z]"),
        ("suffix", "after"),
        ("mirostat", 2),
        ("n_predict", -2),
        ("n_predict", "5"),
        ("repeat_penalty", 11),
        ("seed", -2),
        ("top_k", 40.5),
        ("max_tokens", 2.0**60),
        ("prompt", []),
        ("prompt", ["hi", ""]),
        ("prompt", [[104], []]),
        ("prompt", ["hi", 5]),
        ("prompt", ["hi", [5]]),
        ("prompt", [[5], "hi"]),
        ("prompt", [[5], [257]]),
        ("prompt", [[5], [-1]]),
        ("prompt", [[5], [True]]),
        ("prompt", [[[5]]]),
        ("prompt", ["hi"] * 257),
        *LABELS,
    ],
    "/v1/chat/completions": [
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("prediction", "x"),
        ("web_search_options", {}),
        ("reasoning_effort", "low"),
        ("enable_thinking", "yes"),
        ("thinking", True),
        ("thinking", {"type": "much"}),
        ("thinking", {"type": "enabled", "budget_tokens": 5}),
        ("thinking", {"type": "enabled", "mood": "glad"}),
        ("response_format", {"type": "json_object", "schema": 5}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("session", 5),
        ("chat_template", "x"),
        ("echo", True),
        ("nonsense", 1),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("top_k", -2),
        ("reasoning", {"effort": "low"}),
        ("reasoning", {"effort": "none", "mood": "glad"}),
        ("stream_options", {"include_usage": True}),
        ("max_tokens", 0),
        ("n", 0),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {}}),
        ("tools", [{"type": "Custom!", "custom": {"name": "x"}}]),
        ("tools", [{"type": "custom"}, {"type": "function"}]),
        ("tools", [5]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("chat_template_kwargs", {"messages": []}),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "function", "content": "x", "name": "f"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": []}]),
        ("messages", [{"role": "user", "content": "x", "name": "<|im_end|>"}]),
        ("messages", [{"role": "assistant"}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
        *LABELS,
    ],
    "/v1/responses": [
        ("conversation", "c"),
        ("prompt", {"id": "p"}),
        ("reasoning", {"effort": "high"}),
        ("max_tool_calls", 1),
        ("context_management", [{"type": "compaction"}]),
        ("max_tokens", 5),
        ("messages", []),
        ("moderation", {"model": "m"}),
        ("n_predict", 5),
        ("include", ["nonsense"]),
        ("tools", [{"type": ""}]),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("input", [{"type": "item_reference", "id": "i"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]),
        ("input", ""),
        ("input", []),
        ("text", {"verbosity": "low", "mood": "glad"}),
        ("top_logprobs", 21),
        ("max_output_tokens", 0),
        ("temperature", 3),
        ("metadata", {"a" * 65: "b"}),
        ("nonsense", 1),
        ("top_logprobs", 2),
    ],
}

#: Whole bodies, or fields that do not go together.
BODIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "/v1/completions": [
        ("top_logprobs", {"logprobs": 1, "top_logprobs": 2}),
        ("repeat_last_n", {"repeat_last_n": 64, "repetition_penalty": 1.1}),
        ("repeat_last_n", {"repeat_last_n": 0, "presence_penalty": 0.5}),
        ("n", {"max_tokens": 0, "n": 2}),
        ("best_of", {"max_tokens": 0, "best_of": 2}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("best_of", {"n": 1, "best_of": 2, "stream": True}),
        ("idempotency_key", {"logprobs": 1, "keep": True, "idempotency_key": "k"}),
        ("prompt", {"prompt": ["hi", "you"], "keep": True}),
        ("idempotency_key", {"prompt": ["hi", "you"], "idempotency_key": "k"}),
        ("n", {"prompt": ["hi"] * 100, "n": 11}),
    ],
    "/v1/chat/completions": [
        ("max_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
        ("n_predict", {"max_tokens": 3, "n_predict": 4}),
        ("num_predict", {"n_predict": 3, "num_predict": 4}),
        (
            "enable_thinking",
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("thinking", {"enable_thinking": True, "thinking": {"type": "disabled"}}),
    ],
    "/v1/responses": [
        ("stream_options", {"stream_options": {"include_obfuscation": True}, "stream": True}),
        ("stream_options", {"stream_options": {"include_obfuscation": 0}, "stream": True}),
        ("background", {"background": True, "store": False}),
        ("idempotency_key", {"idempotency_key": "k", "store": False}),
    ],
    "/v1/score": [
        ("prompt", {"continuations": ["a"]}),
        ("continuations", {"prompt": "a"}),
        ("continuations", {"prompt": "a", "continuations": []}),
        ("continuations", {"prompt": "a", "continuations": [""]}),
        ("continuations", {"prompt": "a", "continuations": [[]]}),
        ("continuations", {"prompt": "a", "continuations": [[257]]}),
        ("continuations", {"prompt": "a", "continuations": "b"}),
        ("continuations", {"prompt": "a", "continuations": [5]}),
        ("continuations", {"prompt": "a", "continuations": ["b"] * 257}),
        ("prompt", {"prompt": [], "continuations": ["b"]}),
        ("prompt", {"prompt": ["a"], "continuations": ["b"]}),
        ("top", {"prompt": "a", "continuations": ["b"], "top": 21}),
        ("other", {"prompt": "a", "continuations": ["b"], "other": 1}),
    ],
    "/v1/embeddings": [
        ("input", {}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": ["hi", ""]}),
        ("input", {"input": [[]]}),
        ("input", {"input": [257]}),
        ("input", {"input": 5}),
        ("input", {"input": ["a"] * 2049}),
        ("encoding_format", {"input": "a", "encoding_format": "int8"}),
        ("dimensions", {"input": "a", "dimensions": 2}),
        ("other", {"input": "a", "other": 2}),
    ],
    "/tokenize": [
        ("prompt", {}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": ["a"]}),
        ("add_special_tokens", {"prompt": "a", "add_special_tokens": 1}),
        ("other", {"prompt": "a", "other": 1}),
        ("prompt", {"prompt": "a", "messages": [HI]}),
        ("messages", {"messages": []}),
        ("add_special_tokens", {"messages": [HI], "add_special_tokens": True}),
        ("tools", {"prompt": "a", "tools": []}),
    ],
    "/detokenize": [
        ("tokens", {}),
        ("tokens", {"tokens": "a"}),
        ("tokens", {"tokens": [257]}),
        ("tokens", {"tokens": [-1]}),
        ("tokens", {"tokens": [True]}),
    ],
}


@pytest.mark.process
@pytest.mark.parametrize("path", BODIES)
async def test_body_is_refused_by_the_field_at_fault(server: Running, path: str) -> None:
    fields = [(param, {param: value}) for param, value in VALUES.get(path, ())]
    for param, body in (*fields, *BODIES[path]):
        response = await server.http.post(path, json=REST.get(path, {}) | body)
        error = response.json()["error"]
        assert (response.status_code, field_of(error["param"])) == (400, param), (body, error)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
        assert param in error["message"]
    stats = await server.stats()
    assert (stats.prompt_tokens_total, stats.held_slots) == (0, 0)


@pytest.mark.process
async def test_part_that_is_no_text_is_named(server: Running) -> None:
    said = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    answer = await server.http.post("/v1/chat/completions", json={"messages": [said]})
    assert "'image_url'" in answer.json()["error"]["message"]
