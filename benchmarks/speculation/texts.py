"""Texts that a model of any weights is made to write: some repeat little, some much.

The prose is what the bundled model draws, the others are made of it: acceptance is that of these
texts, whatever the weights that are timed would have drawn.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

from model.bundled_models import DEFAULT_MODEL
from model.checkpoint import load_checkpoint
from model.tokenizer import Tokenizer
from server.engine.engine import EngineConfig
from server.engine.types import Request, SamplingParams, TokenEvent
from server.models.backend import open_backend

PROMPT = "Once upon a time there was a little girl called Lily"
STORY_TOKENS, NUM_RECORDS = 320, 12

#: Of each record of the JSON text.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "quantity": {"type": "integer"},
        "available": {"type": "boolean"},
        "description": {"type": "string"},
    },
    "required": ["name", "quantity", "available", "description"],
    "additionalProperties": False,
}
FORMAT = {"type": "array", "items": SCHEMA}


class Text(NamedTuple):
    """Ids of a prompt and of its answer; ``schema`` the answer conforms to, if to any."""

    name: str
    prompt: list[int]
    answer: list[int]
    schema: dict[str, Any] | None = None


@cache
def story() -> str:
    """What the bundled model draws at temperature 1."""
    backend = open_backend(load_checkpoint(DEFAULT_MODEL), threads=1)
    engine = backend.engine(1, EngineConfig(new_id=lambda: "story"))
    params = SamplingParams(seed=1, top_p=0.95, max_tokens=STORY_TOKENS, ignore_eos=True)
    ids = tuple(backend.tokenizer.encode(PROMPT))
    engine.submit(Request("story", "benchmark", ids, params), 0.0)
    parts = [PROMPT]
    while engine.has_work():
        parts += [event.text for event in engine.step(0.0) if isinstance(event, TokenEvent)]
    return "".join(parts)


def records() -> str:
    """Compact JSON: keys repeat, the descriptions are sentences of the story."""
    sentences = [part.strip() for part in story().replace("\n", " ").split(".") if part.strip()]
    rows = []
    for number in range(NUM_RECORDS):
        words = sentences[number % len(sentences)].replace('"', "").split()
        name, quantity = " ".join(words[:2]), 7 * number + 3
        text = " ".join(words[:6])
        row = {"name": name, "quantity": quantity, "available": number % 3 > 0}
        rows.append({**row, "description": text})
    return json.dumps(rows, separators=(",", ":"))


def texts(tokenizer: Tokenizer, num_tokens: int) -> list[Text]:
    """In the ids of ``tokenizer``, answers of up to ``num_tokens``."""
    ids = list(tokenizer.encode(story()))
    renamed = story().replace("Lily", "Anna")
    asked = tokenizer.encode(story() + "\n\nThe same story, about Anna:\n\n")
    begun = tokenizer.encode("A list of what is in the shop, as JSON:\n\n")
    return [
        Text("plain text", ids[:24], ids[24:][:num_tokens]),
        Text("rewritten text", list(asked), list(tokenizer.encode(renamed))[:num_tokens]),
        Text(
            "JSON under a schema",
            list(begun),
            list(tokenizer.encode(records()))[:num_tokens],
            FORMAT,
        ),
    ]
