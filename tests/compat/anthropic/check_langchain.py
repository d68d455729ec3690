"""LangChain's class for Anthropic."""

from __future__ import annotations

from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from pydantic import BaseModel
from served import MODEL, SERVER


def chat(**options: object) -> ChatAnthropic:
    return ChatAnthropic(
        model_name=MODEL, base_url=SERVER, api_key="usual", max_retries=0, **options
    )


class Mill(BaseModel):
    """A mill."""

    kind: Literal["wind", "water"]


@tool
def visit(hour: int) -> str:
    """Visit the mill at an hour."""
    return f"It is {hour}."


def test_answer_and_its_usage() -> None:
    answer = chat(max_tokens=8).invoke("Tell me of the old mill.")
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8


def test_stream_is_in_pieces() -> None:
    parts = [part.content for part in chat(max_tokens=12).stream("Tell me of the old mill.")]
    assert len(parts) > 3


def test_bound_tool_is_called() -> None:
    answer = chat(max_tokens=200).bind_tools([visit], tool_choice="any").invoke("When?")
    assert [call["name"] for call in answer.tool_calls] == ["visit"]
    assert isinstance(answer.tool_calls[0]["args"]["hour"], int)


def test_structured_output_is_an_object() -> None:
    for method in ("function_calling", "json_schema"):
        found = chat(max_tokens=200).with_structured_output(Mill, method=method).invoke("Age?")
        assert isinstance(found, Mill)
