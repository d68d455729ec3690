"""The commands ``everstream tokenizer``, ``train``, ``average`` and ``eval``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from model import command_line
from model.architectures import Config, config_class
from model.command_line import LoraAlpha, LoraFiles, lora_of
from model.config import ConfigError
from model.evaluation import Evaluation, Half, Mode, evaluate, evaluate_native

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.tokenizer import Tokenizer


def register(app: typer.Typer) -> None:
    """Adds the commands to ``app``."""
    app.command("tokenizer")(tokenizer_command)
    app.command("train")(train_command)
    app.command("average")(average_command)
    app.command("eval")(eval_command)


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Errors of the commands here that the user can fix become one line and exit status 2."""
    from model.evaluation import DataError
    from model.native.runtime import NativeError
    from model.training import TrainingError

    more = (DataError, NativeError, TrainingError, json.JSONDecodeError)
    with command_line.errors_as_lines(*more):
        yield


Texts = Annotated[
    list[Path], typer.Option("--data", help="UTF-8 text; repeat for several.", exists=True)
]


def tokenizer_command(
    data: Texts,
    out: Annotated[Path, typer.Option(help="File to write, such as tokenizer.json.")],
    vocab_size: Annotated[
        int, typer.Option(help="Number of ids, including the 256 bytes and the special tokens.")
    ] = 4096,
) -> None:
    """Train a byte-level BPE tokenizer on texts."""
    from model.tokenizer import train_tokenizer

    with errors_as_lines():
        tokenizer = train_tokenizer(data, vocab_size)
    out.open("ab").close()  # the library's error does not name the file
    tokenizer.save(out)
    typer.echo(f"{out}: {tokenizer.vocab_size} ids")


def train_command(
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the model is written to OUT/model.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            help="Training text: FILE, or FILE:WEIGHT, read WEIGHT times as often; repeatable."
        ),
    ],
    final_data: Annotated[
        list[str] | None,
        typer.Option(help="Training text while the learning rate decays; default: that of --data."),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text for validation; repeat for several.", exists=True),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Checkpoint to start from, with its shape and tokenizer.", exists=True),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json or RWKV vocabulary; default: train one on the data."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Number of ids of a tokenizer trained by this run.")
    ] = 4096,
    architecture: Annotated[
        str,
        typer.Option(
            help="Architecture: everstream, rwkv7, mamba2, mamba, arwkv7, qwen35, lfm2, lfm3,"
            " mamba2_hybrid, jamba, or gated_deltanet, which is everstream with --attention delta."
        ),
    ] = "everstream",
    attention: Annotated[
        str | None,
        typer.Option(
            help="Attention mechanism of docs/background/mechanisms.md; default: delta."
            " Only for everstream."
        ),
    ] = None,
    attention_options: Annotated[
        str | None,
        typer.Option(help="Options of the mechanism, as a JSON object; elsewhere sizes."),
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 6,
    heads: Annotated[
        int | None,
        typer.Option(
            help="Number of attention heads per block; default: 4, for rwkv7 width / head_dim."
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    intermediate_size: Annotated[
        int | None,
        typer.Option(help="Width inside the MLP; default: 704, for rwkv7 4 times the width."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of optimizer steps of the whole run.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Number of streams read in parallel.")] = 16,
    window: Annotated[int, typer.Option(help="Number of tokens per stream and step.")] = 512,
    stream_windows: Annotated[
        int,
        typer.Option(help="Number of windows a stream reads before it starts at another place."),
    ] = 16,
    optimizer: Annotated[str, typer.Option(help="Optimizer: muon or adamw.")] = "muon",
    learning_rate: Annotated[
        float, typer.Option(help="Peak learning rate, after the warm-up.")
    ] = 8e-3,
    embedding_learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate of embedding, norms and vectors;"
            " default: twice --learning-rate, with adamw --learning-rate."
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of matrices inside the blocks.")
    ] = 0.1,
    dropout: Annotated[
        float, typer.Option(help="Share of what each layer adds that a step of training drops.")
    ] = 0.0,
    warmup_steps: Annotated[int, typer.Option(help="Number of steps of linear warm-up.")] = 100,
    decay: Annotated[
        float, typer.Option(help="Fraction of the run over which the learning rate decays to 0.")
    ] = 0.5,
    clip: Annotated[float, typer.Option(help="Maximum norm of the gradient.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Seed of the weights and of the order of the data.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="Precision: auto, float32 or bfloat16.")] = "auto",
    compile_layers: Annotated[
        bool, typer.Option("--compile-layers", help="Compile the layers first; with --device cuda.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Number of threads; default: all cores.", min=1)
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Number of steps between validations.")] = 250,
    save_every_s: Annotated[
        float, typer.Option(help="Seconds between resumable checkpoints.")
    ] = 120.0,
    sample_every: Annotated[int, typer.Option(help="Number of steps between samples.")] = 1000,
    stop_at_step: Annotated[
        int | None, typer.Option(help="Stop at this step; the run can be continued later.")
    ] = None,
) -> None:
    """Train a model on text. Run the same command again to continue an interrupted run."""
    from model.checkpoint import load_checkpoint
    from model.memory import keep_freed_memory
    from model.tokenizer import Tokenizer, train_tokenizer
    from model.training.data import Source
    from model.training.loop import TrainConfig, train

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
            dropout=dropout,
            warmup_steps=warmup_steps,
            clip=clip,
            seed=seed,
            device=device,
            precision=precision,
            compile_layers=compile_layers,
            threads=threads,
            eval_every=eval_every,
            save_every_s=save_every_s,
            sample_every=sample_every,
            stop_at_step=stop_at_step,
        )
        folder = train(config, model_config, ids)
    typer.echo(_outcome(out, folder, steps))


def default_embedding_rate(optimizer: str, learning_rate: float) -> float:
    """The peak rate of what is not a matrix; with Muon, twice the rate of matrices was better."""
    return 2 * learning_rate if optimizer == "muon" else learning_rate


#: What others call our own blocks with a certain mechanism.
OF_OUR_BLOCKS = {"gated_deltanet": "delta"}


def _new_model(architecture: str, tokenizer: Tokenizer, **sizes: Any) -> Config:
    """The config of a new model; a size of None is the family's default."""
    chosen = {name: value for name, value in sizes.items() if value is not None}
    if architecture in OF_OUR_BLOCKS:
        mechanism = OF_OUR_BLOCKS[architecture]
        if chosen.setdefault("attention", mechanism) != mechanism:
            raise ConfigError(
                f"attention must be {mechanism!r} for {architecture}, not {chosen['attention']!r}"
            )
        architecture = "everstream"
    family = config_class(architecture)
    return family.for_training(tokenizer.vocab_size, tokenizer.eos_token_id, chosen)


def _outcome(out: Path, model: Path, num_steps: int) -> str:
    """The message at the end; an interrupted run may not have exported a model yet."""
    step = json.loads((out / "progress" / "progress.json").read_text(encoding="utf-8"))["step"]
    exported = model.is_dir()
    if step >= num_steps and exported:
        return f"the model is in {model}"
    best = f"the best model so far is in {model}" if exported else "no model is exported yet"
    return (
        f"stopped at step {step} of {num_steps}; {best}; the same command again continues the run"
    )


#: Of the state that a text is read into, where no bound is given.
EVAL_STATE_BYTES = 1 << 30


def average_command(
    models: Annotated[list[Path], typer.Argument(help="Folders of models of one shape.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
) -> None:
    """Write the mean of several models' weights."""
    with errors_as_lines():
        average(models, out)
    typer.echo(f"{out}: the mean of {len(models)} models")


def average(models: Sequence[str | Path], out: Path) -> None:
    """Writes the mean of ``models``, folders or names, to the folder ``out``.

    Models that continued from the same weights lie near one another, and between them the loss is
    often lower than at either (Wortsman et al. 2022, "Model soups"). Sums are in float64. Raises
    `TrainingError` where shapes or tokenizers differ, and what `load_checkpoint` raises.
    """
    import torch

    from model.checkpoint import load_checkpoint, save_checkpoint
    from model.training import TrainingError

    first, *others = (load_checkpoint(model) for model in models)
    total = {name: tensor.double() for name, tensor in first.model.state_dict().items()}
    for model, other in zip(models[1:], others, strict=True):
        if other.config != first.config or other.tokenizer.digest != first.tokenizer.digest:
            raise TrainingError(f"{model} has another shape or tokenizer than {models[0]}")
        for name, tensor in other.model.state_dict().items():
            total[name] += tensor.double()
    network = first.model
    network.load_state_dict({name: (t / len(models)).float() for name, t in total.items()})
    save_checkpoint(out, network, first.tokenizer, torch.float32)


def eval_command(
    model: Annotated[
        str, typer.Argument(help="Model to evaluate: checkpoint folder, bundled model or hub id.")
    ],
    data: Texts,
    lora: LoraFiles = None,
    lora_alpha: LoraAlpha = None,
    mode: Annotated[
        Mode,
        typer.Option(help="Context of a scored token; see model/evaluation.py."),
    ] = "windows",
    window: Annotated[int, typer.Option(help="Number of tokens per window.")] = 512,
    max_bytes: Annotated[int | None, typer.Option(help="Maximum bytes of each document.")] = None,
    half: Annotated[
        Half | None,
        typer.Option(help="Half of each text to score: select on the first, report the second."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads.", min=1)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8", "int4"],
        typer.Option(
            help="Type of the weights, on torch of activations too; int8 and int4 are native only."
        ),
    ] = "float32",
    backend: Annotated[
        Literal["auto", "native", "torch"],
        typer.Option(
            help="Runtime of the model; auto is native if it is built and supports the model."
        ),
    ] = "auto",
    state_dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Type of the sums in a state; bfloat16 is native only."),
    ] = "float32",
    context: Annotated[
        int | None,
        typer.Option(
            min=32, help="Tokens of the past that attention layers keep, for models with some."
        ),
    ] = None,
    past: Annotated[
        Literal["stop", "slide"],
        typer.Option(help="At that bound texts stop, or old tokens slide out."),
    ] = "stop",
) -> None:
    """Measure bits per byte and perplexity of a checkpoint."""
    from model.bounds import Bound, bounded
    from model.checkpoint import load_checkpoint

    changes = lora_of(lora, lora_alpha)
    with errors_as_lines():
        checkpoint = load_checkpoint(model, lora=changes).with_state_dtype(state_dtype)
        checkpoint = bounded(checkpoint, Bound(context, past), EVAL_STATE_BYTES, num_sessions=1)
        ran_on, score = _evaluator(checkpoint, backend, dtype, threads)
        results = [(path, score(path, mode, window, max_bytes, half)) for path in data]
    for path, result in results:
        values: dict[str, Any] = {
            "data": path.name,
            **({"half": half} if half else {}),
            "mode": mode,
            "window": window,
            "backend": ran_on,
            "dtype": dtype,
            **({"state_dtype": state_dtype} if state_dtype != "float32" else {}),
            "bits_per_byte": round(result.bits_per_byte, 4),
            "perplexity": round(result.perplexity, 3),
            "tokens": result.num_tokens,
            "bytes": result.num_bytes,
        }
        typer.echo(json.dumps(values))


def _evaluator(
    checkpoint: Checkpoint, backend: str, dtype: str, threads: int | None
) -> tuple[str, Callable[[Path, Mode, int, int | None, Half | None], Evaluation]]:
    """The name of the runtime, and the function that scores a text.

    Raises `NativeError` if the native runtime is required and cannot run the model.
    """
    from model.native.runtime import NATIVE_DTYPES, NativeError, Runtime, num_cores

    if dtype in NATIVE_DTYPES and backend == "torch":
        raise NativeError(f"--dtype {dtype} needs the native runtime, not --backend torch")
    rounds = checkpoint.config.state_dtype != "float32"
    if rounds and backend == "torch":
        raise NativeError("--state-dtype bfloat16 needs the native runtime, not --backend torch")
    if backend != "torch":
        try:
            weights, cores = checkpoint.weights, threads or num_cores()
            runtime = Runtime(checkpoint.config, weights, dtype, cores)
            return "native", partial(evaluate_native, runtime, checkpoint.tokenizer)
        except NativeError:
            if backend == "native" or dtype in NATIVE_DTYPES or rounds:
                raise
    import torch

    if threads:
        torch.set_num_threads(threads)
    network = checkpoint.model.to(getattr(torch, dtype))
    return "torch", partial(evaluate, network, checkpoint.tokenizer)


if __name__ == "__main__":
    _app = typer.Typer()
    register(_app)
    _app()
