"""LlamaIndex's class for Ollama."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from ollama import AsyncClient, Client
from pydantic import BaseModel, Field
from served import KEY, MODEL, SERVER

OPTIONS = {"num_predict": 24, "seed": 5}


class Pet(BaseModel):
    """A pet."""

    age: int = Field(ge=0, le=20)


def model(**options: Any) -> Ollama:
    return Ollama(
        model=MODEL,
        base_url=SERVER,
        client=Client(host=SERVER, headers=KEY),
        async_client=AsyncClient(host=SERVER, headers=KEY),
        additional_kwargs=OPTIONS,
        **options,
    )


def test_chat_whole_and_streamed_are_one_text() -> None:
    question = [ChatMessage(role="user", content="Tell me of the old mill.")]
    said = model().chat(question).message.content
    assert said
    assert [*model().stream_chat(question)][-1].message.content == said


def test_prompt_is_completed() -> None:
    assert model().complete("Once upon a time").text


def test_output_follows_a_schema() -> None:
    from llama_index.core.prompts import PromptTemplate

    said = model().structured_predict(Pet, PromptTemplate("How old is it?"))
    assert isinstance(said, Pet)


def test_length_of_the_context_is_known() -> None:
    assert model(context_window=-1).get_context_window() > 0
