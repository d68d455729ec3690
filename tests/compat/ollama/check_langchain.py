"""LangChain's classes for Ollama."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from ollama import ResponseError
from pydantic import BaseModel, Field
from served import KEY, MODEL, SERVER, knows_tools

ABOUT = {"base_url": SERVER, "client_kwargs": {"headers": KEY}, "model": MODEL}


class Pet(BaseModel):
    """A pet."""

    age: int = Field(ge=0, le=20)


def chat(**options: object) -> ChatOllama:
    return ChatOllama(**ABOUT, num_predict=24, seed=5, validate_model_on_init=True, **options)


def test_chat_whole_and_streamed_are_one_text() -> None:
    said = chat().invoke("Tell me of the old mill.")
    assert said.content
    assert said.usage_metadata and said.usage_metadata["output_tokens"] > 0
    parts = chat().stream("Tell me of the old mill.")
    assert "".join(str(part.content) for part in parts) == said.content


def test_output_follows_a_schema() -> None:
    said = chat().with_structured_output(Pet, method="json_schema").invoke("How old?")
    assert isinstance(said, Pet)


def test_tools_and_their_results_are_read() -> None:
    def weather(place: str) -> str:
        """The weather at a place."""
        return f"warm at {place}"

    call = {"name": "weather", "args": {"place": "Rome"}, "id": "1", "type": "tool_call"}
    messages = [
        HumanMessage("hi"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("warm", tool_call_id="1"),
    ]
    model = chat().bind_tools([weather])
    if not knows_tools():
        with pytest.raises(ResponseError, match="chat template"):
            model.invoke(messages)
        return
    assert model.invoke(messages).response_metadata["done"]


def test_prompts_and_vectors() -> None:
    assert OllamaLLM(**ABOUT, num_predict=8).invoke("Once upon a time")
    vectors = OllamaEmbeddings(**ABOUT).embed_documents(["a mill", "a river"])
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1])
