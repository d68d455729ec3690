"""``everstream generate``: a text in the terminal, without a server."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.command_line import LoraAlpha, LoraFiles, lora_of
from server.cli.options import (
    BackendName,
    Context,
    Dtype,
    Model,
    PastMode,
    StateDtype,
    Threads,
    TokenizerFile,
    clear_errors,
    fail,
)
from server.engine.sampling import DEFAULTS

if TYPE_CHECKING:
    from server.engine.types import SamplingParams
    from server.models.backend import Backend


def _sampled(name: str, help: str) -> Any:
    """An option of sampling, which models have their own defaults of; most have these."""
    usual = f"the model's, else {getattr(DEFAULTS, name):g}"
    return typer.Option(help=help, show_default=usual)


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; - or no argument reads standard input.", show_default=False
        ),
    ] = None,
    model: Model = None,
    tokenizer: TokenizerFile = None,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.")] = 256,
    temperature: Annotated[
        float | None, _sampled("temperature", "Sampling temperature; 0 is greedy.")
    ] = None,
    top_k: Annotated[
        int | None, _sampled("top_k", "Sample from the k most likely tokens; 0 is off.")
    ] = None,
    top_p: Annotated[
        float | None, _sampled("top_p", "Sample from this probability mass; 1 is off.")
    ] = None,
    min_p: Annotated[
        float | None, _sampled("min_p", "Minimum probability relative to the likeliest; 0 is off.")
    ] = None,
    top_n_sigma: Annotated[
        float | None,
        _sampled("top_n_sigma", "Standard deviations of the logits below the largest; 0 is off."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampled("repetition_penalty", "Penalty of repeated tokens; 1 is off.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling; the same seed gives the same text.")
    ] = None,
    backend: BackendName = "auto",
    threads: Threads = None,
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "float32",
    context: Context = None,
    past: PastMode = "stop",
) -> None:
    """Generate text in the terminal, without a server."""
    from model.bounds import Bound, bounded
    from server.engine.sampling import with_defaults
    from server.models.backend import open_backend
    from server.models.build import load_model

    changes = lora_of(lora, lora_alpha)
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "top_n_sigma": top_n_sigma,
        "repetition_penalty": repetition_penalty,
        "seed": secrets.randbits(32) if seed is None else seed,
        "max_tokens": max_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        with clear_errors():
            checkpoint = load_model(model, tokenizer, changes).with_state_dtype(state_dtype)
            checkpoint = bounded(checkpoint, Bound(context, past), num_sessions=1)
            opened = open_backend(checkpoint, backend, dtype, threads)
            sampling = with_defaults(**{**checkpoint.sampling, **given})
            summary = generate_text(opened, _prompt(prompt), sampling, write)
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo(f"\n\n{summary}", err=True)


def generate_text(
    backend: Backend, prompt: str, sampling: SamplingParams, write: Callable[[str], None]
) -> str:
    """Writes the text as it comes; returns a line about speed and memory.

    Raises `InvalidRequest` for parameters out of range.
    """
    from server.engine.engine import EngineConfig
    from server.engine.types import Finished, Request, TokenEvent

    engine = backend.engine(1, EngineConfig(new_id=lambda: "terminal"))
    tokens = tuple(backend.tokenizer.encode(prompt))
    started = time.perf_counter()
    engine.submit(Request("terminal", "terminal", tokens, sampling), now=0.0)
    write(prompt)
    num_tokens = 0
    while engine.has_work():
        for event in engine.step(now=0.0):
            if isinstance(event, TokenEvent | Finished):
                write(event.text)
            if isinstance(event, Finished):
                num_tokens = event.usage.completion_tokens
    elapsed = time.perf_counter() - started
    state_bytes = engine.stats().state_bytes_per_session
    return (
        f"{num_tokens} tokens, {num_tokens / elapsed:.0f} tokens/s,"
        f" {state_bytes:,} bytes of state, seed {sampling.seed}"
    )


def _prompt(given: str | None) -> str:
    """The argument, or standard input if it is not a terminal; a final line end is dropped."""
    try:
        if given == "-" or (given is None and not sys.stdin.isatty()):
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        (given or "").encode("utf-8")
    except UnicodeError as error:
        raise fail("the prompt is not UTF-8") from error
    return given or ""
