"""What a conversation costs: each turn reads the last answer and the new message, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from model.bundled_models import FOLDER
from model.families.rwkv7.chat import NAME
from tests.server.served import Served, served
from tests.tiny import write_model

pytestmark = pytest.mark.process

NUM_TURNS = 20
#: The words that a template puts around an answer and a question take no more tokens.
AROUND = 60
#: A template whose thinking can be switched, and of which past thinking is no part.
DROPS = """\
{{- bos_token }}
{%- for message in messages %}
{{- '[' + message.role + ']\\n' }}
{%- if message.role == 'assistant' %}
{{- message.content.split('</think>')[-1] | trim }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '\\n[end]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '[assistant]\\n' }}
{%- if enable_thinking %}
{{- '<think>\\nHow hard this is: ' + (reasoning_effort or 'medium') + '.\\n' }}
{%- else %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
MESSAGES = [f"Tell me of the {n}. mill at the river, and who lives there now." for n in range(20)]


def trained(folder: Path) -> Path:
    """The bundled model, with a template that thinks."""
    shutil.copytree(FOLDER / "everstream-stories", folder)
    (folder / "chat_template.jinja").write_text(DROPS, encoding="utf-8")
    return folder


def random_weights(folder: Path) -> Path:
    """A small RWKV-7 that was never trained, with the turns of its family."""
    write_model(folder, attention="rwkv7")
    (folder / "chat_template.jinja").write_text(NAME, encoding="utf-8")
    return folder


CASES = pytest.mark.parametrize(
    ("make", "effort"),
    [
        (trained, "none"),
        (trained, "high"),
        (random_weights, "none"),
        (random_weights, "low"),
    ],
)


async def num_tokens(server: Served, text: str) -> int:
    answer = await server.http.post("/tokenize", json={"prompt": text})
    count: int = answer.json()["count"]
    return count


async def said(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = await server.http.post(path, json={"seed": 5, "temperature": 0.7, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@CASES
async def test_turn_of_a_chat_reads_the_last_answer_and_the_new_message(
    tmp_path: Path, make: Any, effort: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief, and kind to all."}]
    async with served(f"m={make(tmp_path / 'm')}", reasoning="8", store="memory") as server:
        before = await num_tokens(server, messages[0]["content"])
        for text in MESSAGES:
            messages.append({"role": "user", "content": text})
            found = await said(
                server,
                "/v1/chat/completions",
                messages=messages,
                reasoning_effort=effort,
                max_tokens=16,
            )
            usage = found["usage"]
            read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert read <= before + await num_tokens(server, text) + AROUND, usage
            message = found["choices"][0]["message"]
            before = await num_tokens(server, message["content"] or "-")
            messages.append({**message, "content": message["content"] or "-"})
    assert usage["prompt_tokens"] > NUM_TURNS * 30


@CASES
async def test_turn_of_responses_reads_the_last_answer_and_the_new_message(
    tmp_path: Path, make: Any, effort: str
) -> None:
    before, previous = 0, None
    async with served(f"m={make(tmp_path / 'm')}", reasoning="8", store="memory") as server:
        for text in MESSAGES:
            found = await said(
                server,
                "/v1/responses",
                input=text,
                previous_response_id=previous,
                reasoning={"effort": effort},
                max_output_tokens=16,
            )
            usage, previous = found["usage"], found["id"]
            read = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
            assert read <= before + await num_tokens(server, text) + AROUND, usage
            texts = [
                part["text"]
                for item in found["output"]
                if item["type"] == "message"
                for part in item["content"]
            ]
            before = await num_tokens(server, "".join(texts))
    assert usage["input_tokens"] > NUM_TURNS * 30
