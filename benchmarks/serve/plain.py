"""A plain server to compare with: FastAPI, transformers' `generate`, and a thread for each answer.

It has a Llama of random weights of a measured size. Run as ``python -m benchmarks.serve.plain``.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TextIteratorStreamer

from benchmarks.decode.models import config_of
from benchmarks.decode.shapes import SIZES
from benchmarks.decode.softmax import llama_config


class Body(BaseModel):
    """What of OpenAI's completions it understands; streams always."""

    prompt: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 40


def app_of(model: Any, tokenizer: Any) -> FastAPI:
    """The routes around a model."""
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions")
    def completions(body: Body) -> StreamingResponse:
        return StreamingResponse(events(model, tokenizer, body), media_type="text/event-stream")

    return app


def events(model: Any, tokenizer: Any, body: Body) -> Iterator[str]:
    """The server-sent events of one answer."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    prompt = torch.tensor([body.prompt])
    settings = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "streamer": streamer,
        "max_new_tokens": body.max_tokens,
        "min_new_tokens": body.max_tokens,
        "do_sample": True,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "pad_token_id": 0,
    }
    threading.Thread(target=model.generate, kwargs=settings, daemon=True).start()
    for text in streamer:
        yield f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': None}]})}\n\n"
    yield f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': 'length'}]})}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="S1")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = SIZES[options.size]
    config = llama_config(config_of(size, "elu"), size.intermediate_size)
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(options.tokenizer))
    app = app_of(model, tokenizer)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
