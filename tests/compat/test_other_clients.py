"""What clients send that are too large to install, field by field as their sources build it.

- SillyTavern: `public/scripts/textgen-settings.js`, `createTextGenGenerationData`.
- Dify: its OpenAI-compatible provider sends ``enable_thinking`` on the top level.
- Codex: `codex-rs`, tools of the types function, custom, local_shell, web_search and namespace.
- Home Assistant: `homeassistant/components/ollama/entity.py`.
- Continue: `core/llm/llms/Ollama.ts` and `LlamaCpp.ts`.
- Open WebUI's connection to Ollama: `backend/open_webui/routers/ollama.py`.
- Zed and other agents look for a llama.cpp server with `GET /props` and `meta` in `/v1/models`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import sse
from tests.compat.conftest import serving
from tests.compat.replayed import Json, chunks, post
from tests.reliability.servers import ServerProcess

MODEL = "everstream-stories"
SYSTEM, USER = {"role": "system", "content": "You help."}, {"role": "user", "content": "hi"}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "HassTurnOn",
        "description": "Turns on a device",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "area": {"type": "string"}},
            "required": [],
        },
    },
}
#: Of its defaults what is not left out; all kinds of servers get these.
SILLY_TAVERN: Json = {
    "prompt": "Once upon a time",
    "model": MODEL,
    "max_new_tokens": 24,
    "max_tokens": 24,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "top_k": 40,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_penalty_last_n": 0,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "max_tokens_second": 0,
    "stopping_strings": ["\nYou:"],
    "stop": ["\nYou:"],
    "truncation_length": 2048,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "rep_pen": 1.2,
    "rep_pen_range": -1,
    "repetition_penalty_range": -1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.2,
    "repeat_last_n": -1,
    "n_predict": 24,
    "num_predict": 24,
    "num_ctx": 2048,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
    "stream": True,
    "api_type": "generic",
    "api_server": "http://x/",
}
#: What is different for llama.cpp.
OF_LLAMA_CPP: Json = {
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
    "n": 1,
    "logit_bias": [[5, -1.5], [6, False]],
    "grammar": "",
    "cache_prompt": True,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "api_type": "llamacpp",
}


@pytest.fixture
def url(environment: dict[str, str]) -> str:
    return environment["EVERSTREAM_URL"]


def get(url: str) -> Any:
    answer = httpx.get(url, headers={"Authorization": "Bearer usual"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refuses_tools(url: str, answer: httpx.Response) -> bool:
    """Whether the model is one whose chat template does not teach it to call; then it is said."""
    if "tools" in post(f"{url}/api/show", {"model": MODEL}).json()["capabilities"]:
        return False
    assert (answer.status_code, "chat template" in answer.text) == (400, True), answer.text
    return True


def lines(answer: httpx.Response) -> list[Json]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_silly_tavern_completes_with_a_generic_server(url: str) -> None:
    found = chunks(post(f"{url}/v1/completions", SILLY_TAVERN))
    assert "".join(chunk["choices"][0]["text"] for chunk in found)


def test_silly_tavern_completes_with_text_generation_webui(url: str) -> None:
    more = {
        "min_length": 0,
        "num_beams": 1,
        "length_penalty": 1,
        "early_stopping": False,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "encoder_repetition_penalty": 1,
        "no_repeat_ngram_size": 0,
        "penalty_alpha": 0,
        "temperature_last": False,
        "do_sample": True,
    }
    found = chunks(post(f"{url}/v1/completions", SILLY_TAVERN | more))
    assert "".join(chunk["choices"][0]["text"] for chunk in found)


def test_silly_tavern_completes_with_llama_cpp(url: str) -> None:
    """It reads the length of the context from `/props`."""
    assert get(f"{url}/props")["default_generation_settings"]["n_ctx"] > 0
    answer = post(f"{url}/completion", SILLY_TAVERN | OF_LLAMA_CPP)
    assert answer.status_code == 200, answer.text
    *pieces, last = [event.value for event in sse.events_of(answer.content)]
    assert "".join(piece["content"] for piece in pieces)
    assert last["stop"] and last["timings"]["predicted_n"] == 24
    found = post(f"{url}/tokenize", {"content": "Once"}).json()["tokens"]
    assert post(f"{url}/detokenize", {"tokens": found}).json()["content"] == "Once"


def test_dify_chats(url: str) -> None:
    body = {"model": MODEL, "messages": [SYSTEM, USER], "enable_thinking": False, "user": "u-1"}
    answer = post(f"{url}/v1/chat/completions", body | {"stream": True, "max_tokens": 8})
    assert chunks(answer)
    assert answer.headers["x-everstream-ignored"] == "user"


def test_codex_s_functions_work_next_to_its_other_tools(url: str) -> None:
    function = {
        "type": "function",
        "name": "shell",
        "description": "Runs a command",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    body = {
        "model": MODEL,
        "instructions": "You are Codex.",
        "store": False,
        "stream": True,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "prompt_cache_key": "thread-1",
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "client_metadata": {"originator": "codex_cli"},
        "max_output_tokens": 16,
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}],
            }
        ],
        "tools": [
            function,
            {"type": "custom", "name": "apply_patch", "description": "x", "format": grammar},
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp__files", "description": "x", "tools": [function]},
        ],
    }
    answer = post(f"{url}/v1/responses", body)
    if refuses_tools(url, answer):
        return
    assert answer.status_code == 200, answer.text
    events = sse.values_of(answer.text)
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert [tool["name"] for tool in events[-1]["response"]["tools"]] == ["shell"]
    ignored = answer.headers["x-everstream-ignored"].split(", ")
    for kind in ("custom", "local_shell", "web_search", "namespace"):
        assert f"tools.{kind}" in ignored


def test_home_assistant_converses_over_ollama_s_api(url: str) -> None:
    """A tool's message of its has no name; the second request has the call and its result."""
    assert get(f"{url}/api/tags")["models"][0]["model"] == f"{MODEL}:latest"
    call = {"function": {"name": "HassTurnOn", "arguments": {"name": "lamp"}}}
    turns = [
        [SYSTEM, USER],
        [
            *(SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": [call]}),
            {"role": "tool", "content": '{"data":{"success":true},"error":null}'},
        ],
    ]
    for messages in turns:
        body = {
            "model": f"{MODEL}:latest",
            "messages": messages,
            "tools": [TOOL],
            "stream": True,
            "keep_alive": -1,
            "think": False,
            "options": {"num_ctx": 8192},
        }
        answer = post(f"{url}/api/chat", body)
        if not refuses_tools(url, answer):
            assert lines(answer)[-1]["done"]


def test_continue_chats_and_completes_over_ollama_s_api(url: str) -> None:
    shown = post(f"{url}/api/show", {"name": MODEL}).json()
    assert all(len(line.split(" ")) == 2 for line in shown["parameters"].split("\n"))
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "num_predict": 16,
        "stop": ["\n\n"],
        "num_ctx": 8192,
        "num_thread": 4,
        "use_mmap": True,
        "min_p": 0.05,
    }
    body = {"model": MODEL, "options": options, "keep_alive": 1800, "stream": True}
    *texts, last = lines(post(f"{url}/api/chat", body | {"messages": [SYSTEM, USER]}))
    assert last["done"] and all("error" not in line for line in texts)
    raw = body | {"prompt": "def mean(x):", "raw": True}
    assert lines(post(f"{url}/api/generate", raw))[-1]["done"]
    filled = post(f"{url}/api/generate", raw | {"suffix": "return total"})
    assert filled.status_code == 400 and "suffix" in filled.json()["error"]


def test_continue_completes_with_llama_cpp(url: str) -> None:
    body = {
        "prompt": "Once",
        "stream": True,
        "n_predict": 8,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "min_p": 0.05,
        "mirostat": 0,
        "stop": ["\n\n"],
        "top_k": 40,
        "top_p": 0.9,
        "temperature": 0.5,
    }
    answer = post(f"{url}/completion", body)
    assert "".join(event.value["content"] for event in sse.events_of(answer.content))


def test_open_webui_chats_over_ollama_s_api(url: str) -> None:
    assert get(f"{url}/api/version")["version"]
    assert get(f"{url}/api/ps")["models"]
    options = {"temperature": 0.8, "num_ctx": 4096, "num_predict": 8, "repeat_penalty": 1.1}
    body = {"model": f"{MODEL}:latest", "messages": [USER], "options": options, "stream": True}
    assert lines(post(f"{url}/api/chat", body))[-1]["eval_count"] == 8
    inputs = {"model": MODEL, "input": ["a", "b"], "truncate": True}
    assert len(post(f"{url}/api/embed", inputs).json()["embeddings"]) == 2


def test_agents_find_the_length_of_the_context(url: str) -> None:
    props = get(f"{url}/props")
    assert props["model_path"] and isinstance(props["chat_template"], str)
    (model,) = get(f"{url}/v1/models")["data"]
    assert model["meta"]["n_ctx"] == props["default_generation_settings"]["n_ctx"]
    assert get(f"{url}/models")["data"] == [model]


def read_until_killed(server: ServerProcess, body: Json, headers: dict[str, str]) -> None:
    """Reads a stream until some of it has come and the server is killed, and then to its end."""
    url = f"{server.url}/completion"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 40:
                server.restart()


def test_completion_of_llama_cpp_goes_on_over_a_kill(tmp_path: Path) -> None:
    """The same request under the same key has the text of one that nothing has disturbed."""
    body = {"prompt": "Once", "n_predict": 3000, "seed": 5, "ignore_eos": True, "stream": True}
    key = {"Idempotency-Key": "once"}
    with serving(tmp_path) as server:
        with pytest.raises(httpx.HTTPError):
            read_until_killed(server, body, key | {"Authorization": "Bearer usual"})
        again = post(f"{server.url}/completion", body, key)
        text = "".join(event.value["content"] for event in sse.events_of(again.content))
        whole = post(f"{server.url}/completion", body | {"stream": False}).json()
    assert whole["tokens_predicted"] == 3000
    assert text == whole["content"]
