"""The commands ``everstream tokenizer``, ``train`` and ``eval``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from model.architectures import Config, ConfigError, config_class
from model.evaluation import Evaluation, Half, Mode

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.tokenizer import Tokenizer


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    app.command("tokenizer")(tokenizer_command)
    app.command("train")(train_command)
    app.command("eval")(eval_command)


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """What the user can fix becomes one line on stderr and exit status 2."""
    from model.checkpoint import CheckpointError
    from model.ops.cpu.runtime import NativeError
    from model.tokenizer import TokenizerError
    from model.training.config import TrainingError
    from model.training.data import DataError

    try:
        yield
    except (
        CheckpointError,
        ConfigError,
        DataError,
        NativeError,
        TokenizerError,
        TrainingError,
        UnicodeDecodeError,
        json.JSONDecodeError,
    ) as error:
        typer.echo(f"everstream: {error}", err=True)
        raise typer.Exit(2) from error


Texts = Annotated[
    list[Path], typer.Option("--data", help="UTF-8 text; repeat for more.", exists=True)
]


def tokenizer_command(
    data: Texts,
    out: Annotated[Path, typer.Option(help="Where to write tokenizer.json.")],
    vocab_size: Annotated[
        int, typer.Option(help="Ids, the 256 bytes and specials included.")
    ] = 4096,
) -> None:
    """Learn a byte-level BPE from texts."""
    from model.tokenizer import train_tokenizer

    with errors_as_lines():
        tokenizer = train_tokenizer(data, vocab_size)
    out.open("ab").close()  # the library's error does not name the file
    tokenizer.save(out)
    typer.echo(f"{out}: {tokenizer.vocab_size} ids")


def train_command(
    out: Annotated[Path, typer.Option(help="Folder of the run; its model comes into OUT/model.")],
    data: Annotated[
        list[str],
        typer.Option(help="FILE or FILE:WEIGHT, read WEIGHT times as often; repeat for more."),
    ],
    final_data: Annotated[
        list[str] | None,
        typer.Option(help="Like --data, while the learning rate falls; without it --data."),
    ] = None,
    valid: Annotated[
        list[Path] | None, typer.Option(help="Validation text; repeat for more.", exists=True)
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Checkpoint to start from; it gives shape and tokenizer.", exists=True),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json or RWKV vocabulary; without it one is learnt from the data."
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Ids of a tokenizer learnt here.")] = 4096,
    architecture: Annotated[str, typer.Option(help="everstream or rwkv7.")] = "everstream",
    attention: Annotated[
        str | None,
        typer.Option(help="A mechanism of docs/mechanisms.md; without it delta, of rwkv7 its own."),
    ] = None,
    attention_options: Annotated[
        str | None, typer.Option(help="JSON object of its options; of rwkv7 the ranks.")
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Blocks.")] = 6,
    heads: Annotated[
        int | None,
        typer.Option(help="Attention heads per block; without it 4, of rwkv7 width / head_dim."),
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    intermediate_size: Annotated[
        int | None,
        typer.Option(help="Width inside the MLP; without it 704, of rwkv7 4 times the width."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps of the whole run.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Streams read side by side.")] = 16,
    window: Annotated[int, typer.Option(help="Tokens per stream and step.")] = 512,
    stream_windows: Annotated[
        int, typer.Option(help="Windows that a stream reads on before it starts elsewhere.")
    ] = 16,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    learning_rate: Annotated[float, typer.Option(help="Peak, after the warm-up.")] = 8e-3,
    embedding_learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak for embedding, norms and vectors; without it twice --learning-rate,"
            " with adamw that itself."
        ),
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Of matrices inside the blocks.")] = 0.1,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    decay: Annotated[
        float, typer.Option(help="Part of the run over which the learning rate falls to 0.")
    ] = 0.5,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the data.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads; all cores if left out.", min=1)
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between validations.")] = 250,
    save_every_s: Annotated[float, typer.Option(help="Seconds between resumable saves.")] = 120.0,
    sample_every: Annotated[int, typer.Option(help="Steps between samples.")] = 1000,
    stop_at_step: Annotated[int | None, typer.Option(help="End early; go on later.")] = None,
) -> None:
    """Train a model on text. The same command again continues where it was interrupted."""
    from model.checkpoint import load_checkpoint
    from model.memory import keep_freed_memory
    from model.tokenizer import Tokenizer, train_tokenizer
    from model.training.config import TrainConfig
    from model.training.data import Source
    from model.training.loop import train

    keep_freed_memory()
    with errors_as_lines():
        texts = tuple(Source.parse(text) for text in data)
        final_texts = tuple(Source.parse(text) for text in final_data or ())
        out.mkdir(parents=True, exist_ok=True)
        if init_from is not None:
            checkpoint = load_checkpoint(init_from)
            model_config, ids = checkpoint.config, checkpoint.tokenizer
        else:
            learnt = out / "tokenizer.json"
            if tokenizer is None and not learnt.is_file():
                paths = dict.fromkeys(source.path for source in (*texts, *final_texts))
                train_tokenizer(list(paths), vocab_size).save(learnt)
            ids = Tokenizer.load(tokenizer or learnt)
            model_config = _new_model(
                architecture,
                ids,
                hidden_size=hidden_size,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                head_dim=head_dim,
                intermediate_size=intermediate_size,
                attention=attention,
                attention_options=None
                if attention_options is None
                else json.loads(attention_options),
            )
        config = TrainConfig(
            data=texts,
            out=out,
            final_data=final_texts,
            valid=tuple(valid or ()),
            initial=init_from,
            stream_windows=stream_windows,
            embedding_learning_rate=default_embedding_rate(optimizer, learning_rate)
            if embedding_learning_rate is None
            else embedding_learning_rate,
            decay=decay,
            num_steps=steps,
            batch_size=batch_size,
            window=window,
            optimizer=optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            clip=clip,
            seed=seed,
            device=device,
            precision=precision,
            threads=threads,
            eval_every=eval_every,
            save_every_s=save_every_s,
            sample_every=sample_every,
            stop_at_step=stop_at_step,
        )
        folder = train(config, model_config, ids)
    typer.echo(_outcome(out, folder, steps))


def default_embedding_rate(optimizer: str, learning_rate: float) -> float:
    """The peak rate of what is not a matrix; twice the others' was better together with Muon."""
    return 2 * learning_rate if optimizer == "muon" else learning_rate


def _new_model(architecture: str, tokenizer: Tokenizer, **sizes: Any) -> Config:
    """The config of a new model; a size that is None is up to the family."""
    chosen = {name: value for name, value in sizes.items() if value is not None}
    family = config_class(architecture)
    return family.for_training(tokenizer.vocab_size, tokenizer.eos_token_id, chosen)


def _outcome(out: Path, model: Path, num_steps: int) -> str:
    """What there is now; an interrupted run may not have exported a model yet."""
    step = json.loads((out / "progress" / "progress.json").read_text(encoding="utf-8"))["step"]
    exported = model.is_dir()
    if step >= num_steps and exported:
        return f"the model is in {model}"
    best = f"the best model so far is in {model}" if exported else "no model is exported yet"
    return f"stopped at step {step} of {num_steps}; {best}; the same command again goes on"


def eval_command(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, bundled model or hub id.")],
    data: Texts,
    mode: Annotated[
        Mode,
        typer.Option(help="What a token may look back on; see model/training/evaluate.py."),
    ] = "windows",
    window: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    max_bytes: Annotated[int | None, typer.Option(help="Of each document.")] = None,
    half: Annotated[
        Half | None,
        typer.Option(help="Score a half of each text: select on the first, report the second."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads.", min=1)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8"],
        typer.Option(help="Of weights; on torch of activations too, and not int8."),
    ] = "float32",
    backend: Annotated[
        Literal["auto", "native", "torch"],
        typer.Option(help="What runs the model; auto is native where that is built and can."),
    ] = "auto",
) -> None:
    """Bits per byte and perplexity of a checkpoint."""
    from model.checkpoint import load_checkpoint

    with errors_as_lines():
        checkpoint = load_checkpoint(model)
        ran_on, evaluate = _evaluator(checkpoint, backend, dtype, threads)
        results = [(path, evaluate(path, mode, window, max_bytes, half)) for path in data]
    for path, result in results:
        values: dict[str, Any] = {
            "data": path.name,
            **({"half": half} if half else {}),
            "mode": mode,
            "window": window,
            "backend": ran_on,
            "dtype": dtype,
            "bits_per_byte": round(result.bits_per_byte, 4),
            "perplexity": round(result.perplexity, 3),
            "tokens": result.num_tokens,
            "bytes": result.num_bytes,
        }
        typer.echo(json.dumps(values))


def _evaluator(
    checkpoint: Checkpoint, backend: str, dtype: str, threads: int | None
) -> tuple[str, Callable[[Path, Mode, int, int | None, Half | None], Evaluation]]:
    """What runs the model, by name, and how it scores a text.

    Raises `NativeError` where the native runtime is needed and cannot run it.
    """
    from model.ops.cpu.runtime import NativeError, Runtime, num_cores

    if dtype == "int8" and backend == "torch":
        raise NativeError("--dtype int8 needs the native runtime, not --backend torch")
    if backend != "torch":
        from model.quantization import evaluate as native

        try:
            weights, cores = checkpoint.weights, threads or num_cores()
            runtime = Runtime(checkpoint.config, weights, dtype, cores)
            return "native", partial(native.evaluate, runtime, checkpoint.tokenizer)
        except NativeError:
            if backend == "native" or dtype == "int8":
                raise
    import torch

    from model.training import evaluate as on_torch

    if threads:
        torch.set_num_threads(threads)
    network = checkpoint.model.to(getattr(torch, dtype))
    return "torch", partial(on_torch.evaluate, network, checkpoint.tokenizer)


if __name__ == "__main__":
    _app = typer.Typer()
    register(_app)
    _app()
