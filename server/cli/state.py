"""``everstream state``: make an initial state for sessions, and inspect the file of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from model.command_line import LoraAlpha, LoraFiles, lora_of
from model.files import open_file
from model.foreign.tuned_states import describe_tuned_state
from model.weights import CheckpointError
from server.cli.inspect import format_bytes
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
from server.config import state_file
from server.engine.engine import EngineConfig
from server.engine.types import Finished, Request
from server.errors import InternalFailure, InvalidRequest, RequestError
from server.models.backend import Backend, open_backend
from server.store.base import Identity
from server.store.states import NamedState, about_of, export_state, named_state, read_any_identity

#: Characters of a prompt that are shown.
MAX_SHOWN = 200


def make_command(
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    model: Model = None,
    tokenizer: TokenizerFile = None,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
    prompt: Annotated[str | None, typer.Option(help="Text for the state to read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file with that text.")] = None,
    tuned: Annotated[
        str | None,
        typer.Option(
            help="Tuned state to start from, as FILE or transposed:FILE; the text is optional then."
        ),
    ] = None,
    backend: BackendName = "auto",
    threads: Threads = None,
    dtype: Dtype = "auto",
    state_dtype: StateDtype = "float32",
    context: Context = None,
    past: PastMode = "stop",
) -> None:
    """Read a prompt and write the state after it to a file.

    ``everstream serve --state`` loads it, on the same backend and with the same dtypes.
    """
    from model.bounds import Bound, bounded
    from server.models.build import load_model, read_state
    from server.models.storage import identity_of

    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is not a folder", param_hint="--out")
    text = _text(prompt, prompt_file)
    if text is None and tuned is None:
        raise typer.BadParameter("give --prompt, --prompt-file or --tuned")
    state, changes = None, lora_of(lora, lora_alpha)
    with clear_errors():
        checkpoint = load_model(model, tokenizer, changes).with_state_dtype(state_dtype)
        checkpoint = bounded(checkpoint, Bound(context, past), num_sessions=1)
        opened = open_backend(checkpoint, backend, dtype, threads)
        identity = identity_of(checkpoint, opened)
        if tuned is not None:
            path, transposed = state_file(tuned)
            state = read_state(path, identity, checkpoint.config, transposed)
        if text is not None:
            state = read_prompt(opened, text, state)
    assert state is not None
    write_state(out, state, identity)
    num_bytes = identity.used_bytes(state.value.position)
    typer.echo(
        f"{out}: {state.num_tokens:,} tokens, {format_bytes(num_bytes)},"
        f" state {state.digest[:16]} of model {identity.model[:16]}"
    )


def inspect_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="State file, made by state make or tuned.")
    ],
) -> None:
    """Show the model, tokens and text of a state file."""
    with open_file(file) as opened:
        data = opened.read()
    try:
        rows = describe_tuned_state(file) if about_of(data) is None else _rows(data)
    except CheckpointError as error:
        raise fail(error) from error
    except RequestError as error:
        raise fail(f"{file}: {error.message}") from error
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")


def _rows(data: bytes) -> dict[str, str]:
    """Of a file of ours, checked. Raises `ImportRefused`."""
    state, identity = read_any_identity(data)
    return {
        "state": state.digest,
        "tokens": f"{state.num_tokens:,}",
        "bytes": f"{identity.used_bytes(state.value.position):,}",
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "backend": identity.backend,
        "dtype": identity.dtype,
        "state dtype": identity.state_dtype,
        "text": _shown(state),
    }


def _shown(state: NamedState) -> str:
    """The end of the text, which is where it is new, on one line."""
    if not state.prompt:
        return "not known"
    text = state.prompt if len(state.prompt) <= MAX_SHOWN else f"...{state.prompt[-MAX_SHOWN:]}"
    return repr(text)


def _text(prompt: str | None, file: Path | None) -> str | None:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    if file is None:
        return prompt
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not UTF-8", param_hint="--prompt-file") from error


_OWNER = "state"


def read_prompt(backend: Backend, prompt: str, start: NamedState | None = None) -> NamedState:
    """The state after ``prompt``, which comes after that of ``start``; without one, begins a text.

    The bits are those of a session that reads the same text. Raises `InvalidRequest`.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty", "prompt")
    engine = backend.engine(1, EngineConfig(new_id=lambda: _OWNER))
    if start is None:
        session = engine.kept.create(_OWNER, 0.0)
    else:
        session = engine.kept.adopt(start.value, _OWNER, 0.0)
    tokenizer = backend.tokenizer
    encode = tokenizer.encode_continuation if session.position else tokenizer.encode
    tokens = tuple(encode(prompt))
    engine.submit(Request("read", _OWNER, tokens, None, session=session.session), 0.0)
    while engine.has_work():
        for event in engine.step(0.0):
            if isinstance(event, Finished) and event.error is not None:
                raise InternalFailure(event.error)
    before = "" if start is None else start.prompt
    return named_state(engine.kept.value(session.session, _OWNER), before + prompt)


def write_state(path: Path, state: NamedState, identity: Identity) -> None:
    """Writes the file, whole or not at all, with the usual rights. Raises `OSError`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.writelines(export_state(state, identity))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
