"""The training loop and its options: one process, resumable at any moment, bit for bit.

Models with a constant state are trained on streams whose state is carried
from window to window (truncated backpropagation through time, the state
detached), because that is how they are served; a row starts from the empty
state with each new piece of text (`model.training.data`). The softmax baseline
starts every window from scratch, and reads the same tokens in the same order.

On a CPU a batch is computed in shares, one thread each. On a CUDA device a step is one graph, the
update of the weights included (`model.training.passes`).

What an interrupted run needs to continue is in safetensors and JSON. A folder is written next to
the old one and renamed over it, so that a kill at any moment leaves one whole state. It continues
only with options that change no weight (`identity`, `changes`). SIGINT and SIGTERM end a run
between two steps instead of inside one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.architectures import Config
from model.architectures.network import ModelState, Network, network_class
from model.checkpoint import load_checkpoint, save_checkpoint
from model.evaluation import evaluate
from model.lm import Block, LanguageModel
from model.tokenizer import Tokenizer
from model.training import TrainingError
from model.training.data import Source, StreamBatches, tokenize_file
from model.training.optimizer import (
    gradients,
    learning_rate_factor,
    make_optimizers,
    prepare_step,
    set_rates,
)
from model.training.passes import (
    Captured,
    ResidualDropout,
    Shares,
    add_gradients,
    linear_cross_entropy,
)
from model.training.report import Report, sample_text

#: Bytes of each validation document that an evaluation during training scores.
VALID_BYTES = 100_000


@dataclass(frozen=True)
class TrainConfig:
    """One run. Everything that decides the weights is here and in the model's `Config`."""

    data: tuple[Source, ...]
    out: Path
    final_data: tuple[Source, ...] = ()
    valid: tuple[Path, ...] = ()
    initial: Path | None = None
    num_steps: int = 2000
    batch_size: int = 16
    window: int = 512
    stream_windows: int = 16
    optimizer: str = "muon"
    learning_rate: float = 8e-3
    embedding_learning_rate: float | None = None
    weight_decay: float = 0.1
    dropout: float = 0.0
    warmup_steps: int = 100
    decay: float = 0.5
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile_layers: bool = False
    threads: int | None = None
    eval_every: int = 250
    save_every_s: float = 120.0
    sample_every: int = 1000
    stop_at_step: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise TrainingError(
                    f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}"
                )
        for name in ("learning_rate", "embedding_learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise TrainingError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "save_every_s", "seed"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise TrainingError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise TrainingError(f"dropout must be in [0, 1), not {self.dropout}")
        if not 0.0 <= self.decay <= 1.0:
            raise TrainingError(f"decay must be in [0, 1], not {self.decay}")

    @property
    def decay_steps(self) -> int:
        """The last steps, over which the learning rate falls to 0."""
        return round(self.decay * (self.num_steps - min(self.warmup_steps, self.num_steps)))


_COUNTS = ("num_steps", "batch_size", "window", "stream_windows", "eval_every", "sample_every")
_CHOICES = {
    "optimizer": ("muon", "adamw"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "float32", "bfloat16"),
}

#: What may differ between a run and its continuation without changing any weight.
_INDIFFERENT = {"out", "eval_every", "save_every_s", "sample_every", "stop_at_step", "threads"}

#: What may differ until the learning rate begins to fall.
_PLAN = ("num_steps", "decay", "final_data")


def identity(config: TrainConfig, model: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the weights of a run, for JSON: a run continues only where it is the same."""
    run = {k: v for k, v in dataclasses.asdict(config).items() if k not in _INDIFFERENT}
    for name in ("data", "final_data"):
        run[name] = [[source.path.name, source.weight] for source in getattr(config, name)]
    run["valid"] = [path.name for path in config.valid]
    run["initial"] = None if config.initial is None else load_checkpoint(config.initial).digest
    run["decays_from"] = config.num_steps - config.decay_steps
    values = {**run, "model": model.to_dict(), "tokenizer": tokenizer.digest}
    found: dict[str, Any] = json.loads(json.dumps(values))  # lists where a config has tuples
    return found


def changes(before: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """The options that make ``now`` another run than ``before``, which was saved at ``step``."""
    rate = "embedding_learning_rate"  # that of the matrices where a run names none
    if before.get(rate) is None and now[rate] == before["learning_rate"]:
        before = {**before, rate: now[rate]}
    before = {"dropout": 0.0, "compile_layers": False, **before}  # a run of before there were any
    changed = {name for name in now | before if now.get(name) != before.get(name)}
    if step <= min(now["decays_from"], before.get("decays_from", 0)):
        changed -= {*_PLAN, "decays_from"}
    return sorted(changed)


def train(config: TrainConfig, model_config: Config, tokenizer: Tokenizer) -> Path:
    """Trains, or continues with the run in ``config.out``; returns the folder of the best model.

    SIGINT and SIGTERM end the run after the current step with its state saved.
    """
    if config.device != "cuda":
        torch.set_num_threads(1)  # here too: torch's own threads would take cores from the shares
    run = Run(config, model_config, tokenizer)
    try:
        with signals_remembered() as stop:
            _loop(run, stop)
    finally:
        run.close()
    return config.out / "model"


def _loop(run: Run, stop: Callable[[], bool]) -> None:
    config, last_saved = run.config, time.monotonic()
    last_step = config.num_steps
    if config.stop_at_step is not None:
        last_step = min(last_step, config.stop_at_step)
    while run.step < last_step and not stop():
        run.train_step()
        if run.step % config.sample_every == 0:
            run.report.sample(run.step, sample_text(run.model, run.tokenizer, seed=run.step))
        if run.step % config.eval_every == 0 or run.step == config.num_steps:
            run.evaluate()
        if time.monotonic() - last_saved > config.save_every_s:
            run.save()
            last_saved = time.monotonic()
    run.save()


class Run:
    """A run between two steps: weights, optimisers, carried state, and how far it got."""

    def __init__(self, config: TrainConfig, model_config: Config, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.device = device_of(config.device)
        self.autocast_dtype = autocast_dtype(config.precision, self.device)
        self.carries_state = model_config.constant_state
        self.batches = _batches(config, tokenizer)
        self.model: Network = network_class(model_config)(model_config)
        self.model.init_weights(torch.Generator().manual_seed(config.seed))
        if config.initial is not None:
            self.model.load_state_dict(_initial_weights(config.initial, model_config))
        self.model.to(self.device)
        if config.compile_layers:
            _compile_layers(self.model, self.device)
        self.parameters = list(self.model.parameters())
        self.optimizers = make_optimizers(
            self.model,
            config.optimizer,
            config.learning_rate,
            config.weight_decay,
            config.embedding_learning_rate,
        )
        self.shares = Shares(self.model, config.batch_size, self.device, config.threads)
        self.dropout = _dropout(self.model, config)
        self.state = self.model.exact_state(config.batch_size)
        self.position = torch.zeros(config.batch_size, dtype=torch.int64, device=self.device)
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self._resume()
        self._captured: Captured[tuple[Tensor, Tensor]] | None = None
        self.report = Report(config.out, self.step, config.num_steps, config.valid)

    @property
    def num_tokens(self) -> int:
        return self.step * self.config.batch_size * self.config.window

    def train_step(self) -> None:
        """One batch: forward, backward, clip, update.

        Raises `TrainingError` where loss or gradient is not finite; the weights are untouched
        then, but for a CUDA device, where they are lost to the last save.
        """
        started = time.monotonic()
        config = self.config
        factor = learning_rate_factor(
            self.step, config.num_steps, config.warmup_steps, config.decay_steps
        )
        loss, norm = (self._device_step if self.device.type == "cuda" else self._step)(factor)
        self.step += 1
        elapsed = time.monotonic() - started
        self.seconds += elapsed
        rate = config.batch_size * config.window / elapsed
        self.report.step(self.step, self.num_tokens, self.seconds, loss, factor, norm, rate)

    def _step(self, factor: float) -> tuple[float, float]:
        """The loss of a batch and the norm of its gradient, after the update."""
        prepare_step(self.optimizers, factor)
        loss = self._backward()
        self._check(loss, "loss")
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip))
        self._check(norm, "norm of the gradient")
        self.shares.map(lambda optimizer: optimizer.step(), self.optimizers)
        return loss, norm

    def _device_step(self, factor: float) -> tuple[float, float]:
        """`_step` as a graph."""
        set_rates(self.optimizers, factor)
        batch = self._batch()
        if self._captured is None:
            self._fixed = batch
            self._captured = Captured(self._recorded_step, self._changed)
        for tensor, value in zip(self._fixed, batch, strict=True):
            tensor.copy_(value)
        self.dropout.start(self.step, 0, self.device)
        loss, norm = (float(value) for value in self._captured())
        self._check(loss, "loss")
        self._check(norm, "norm of the gradient")
        return loss, norm

    def _recorded_step(self) -> tuple[Tensor, Tensor]:
        inputs, targets, keep = self._fixed
        before, position = _masked(self.state, keep), self.position * keep
        loss, after = self._loss(inputs, targets, before, position)
        for parameter, grad in zip(self.parameters, gradients(loss, self.parameters), strict=True):
            parameter.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        for layer, layer_after in zip(self.state, after, strict=True):
            for name, tensor in layer.items():
                tensor.copy_(layer_after[name])
        self.position.copy_(position + self.config.window)
        return loss.detach(), norm

    def _changed(self) -> Iterator[Tensor]:
        """All that a step changes."""
        yield from self.parameters
        yield from self.model.buffers()
        yield self.position
        for layer in self.state:
            yield from layer.values()
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                yield from values.values()

    def _batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets [B, T] of this step, and the rows [B] whose state is kept."""
        inputs, targets = (t.to(self.device) for t in self.batches.batch(self.step))
        return inputs, targets, ~self.batches.resets(self.step).to(self.device)

    def _check(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise TrainingError(f"the {what} is {value} at step {self.step}")

    def _backward(self) -> float:
        """The loss of a batch; its gradients are added to the parameters."""
        inputs, targets, keep = self._batch()
        state, position = _masked(self.state, keep), self.position * keep

        def share(rows: slice) -> tuple[float, list[Tensor], ModelState]:
            self.dropout.start(self.step, rows.start, self.device)
            part = tuple({n: t[rows] for n, t in layer.items()} for layer in state)
            loss, after = self._loss(inputs[rows], targets[rows], part, position[rows])
            loss = loss * (len(inputs[rows]) / len(inputs))
            return loss.item(), gradients(loss, self.parameters), after

        results = self.shares.map(share, self.shares.rows)
        add_gradients(self.parameters, [grads for _, grads, _ in results])
        self.state, self.position = _joined([s for _, _, s in results]), position + inputs.shape[1]
        return sum(loss for loss, _, _ in results)

    def _loss(
        self, inputs: Tensor, targets: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """The mean loss over rows [B, T] and the state after them."""
        losses: list[Tensor] = []
        with self._autocast():
            if self.carries_state:
                x, state = self.model.hidden_chunk(inputs, state, position, losses)
            else:
                x = self.model.hidden_parallel(inputs, losses)
        dtype = self.autocast_dtype or torch.float32
        nll = linear_cross_entropy(
            x.float().flatten(0, 1), self.model.head_weight, targets.flatten(), dtype
        )
        detached = tuple({n: t.detach() for n, t in layer.items()} for layer in state)
        return torch.stack([nll, *losses]).sum(), detached

    def evaluate(self) -> None:
        """Bits per byte on the first halves of the validation texts.

        The model of the best mean so far is exported. The other halves are left to report on.
        """
        if not self.config.valid:
            save_checkpoint(self.config.out / "model", self.model, self.tokenizer)
            return
        self.model.eval()
        bits = self.shares.map(self._bits_per_byte, self.config.valid)
        self.model.train()
        self.report.evaluation(self.step, bits)
        if sum(bits) / len(bits) < self.best:
            self.best = sum(bits) / len(bits)
            save_checkpoint(self.config.out / "model", self.model, self.tokenizer)

    def _bits_per_byte(self, path: Path) -> float:
        with self._autocast():
            result = evaluate(
                self.model,
                self.tokenizer,
                path,
                "windows",
                self.config.window,
                VALID_BYTES,
                "first",
            )
        return result.bits_per_byte

    def close(self) -> None:
        self.report.close()
        self.shares.close()

    def save(self) -> None:
        """Everything that the next process needs."""
        self.report.flush()
        progress = {
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best if math.isfinite(self.best) else None,
            "position": self.position.tolist(),
            "identity": identity(self.config, self.model.config, self.tokenizer),
        }
        save_progress(
            self.config.out / "progress", self.model, self.optimizers, self.state, progress
        )

    def _resume(self) -> None:
        loaded = load_progress(self.config.out / "progress")
        if loaded is None:
            return
        tensors, progress = loaded
        now = identity(self.config, self.model.config, self.tokenizer)
        if changed := changes(progress["identity"], now, progress["step"]):
            raise TrainingError(
                f"{self.config.out} holds a run with another {', '.join(changed)}:"
                " use the same options, or another --out"
            )
        self.state = restore(tensors, self.model, self.optimizers, self.state)
        self.step, self.seconds = progress["step"], progress["seconds"]
        self.best = math.inf if progress["best"] is None else progress["best"]
        self.position = torch.tensor(progress["position"], dtype=torch.int64, device=self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)


def _batches(config: TrainConfig, tokenizer: Tokenizer) -> StreamBatches:
    """Every text of ``data`` and ``final_data``; one that a list does not name weighs nothing."""
    first = {source.path: source.weight for source in config.data}
    final = {source.path: source.weight for source in config.final_data or config.data}
    paths = [*first, *(path for path in final if path not in first)]
    return StreamBatches(
        [tokenize_file(path, tokenizer, config.out / "cache") for path in paths],
        tokenizer.eos_token_id,
        config.batch_size,
        config.window,
        config.stream_windows,
        config.seed,
        [first.get(path, 0.0) for path in paths],
        [final.get(path, 0.0) for path in paths],
        config.num_steps - config.decay_steps,
    )


def _initial_weights(folder: Path, config: Config) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(folder)
    if checkpoint.config != config:
        raise TrainingError(f"the model in {folder} has another shape than this run's")
    return checkpoint.model.state_dict()


def _compile_layers(model: Network, device: torch.device) -> None:
    """Fuses what a layer's chunk form does, all layers by one compilation."""
    if device.type != "cuda":
        raise TrainingError("compile_layers is for device cuda: a CPU has kernels of its own")
    if not isinstance(model, LanguageModel):
        raise TrainingError("compile_layers is of the model_type 'everstream' alone")
    for block in model.blocks:
        assert isinstance(block, Block)
        block.chunk = torch.compile(  # type: ignore[method-assign]
            block.chunk, fullgraph=True, dynamic=False
        )


def _dropout(model: Network, config: TrainConfig) -> ResidualDropout:
    try:
        return ResidualDropout(model, config.dropout, config.seed)
    except ValueError as error:
        raise TrainingError(str(error)) from error


def _joined(shares: list[ModelState]) -> ModelState:
    """The state of a batch from those of its shares."""
    return tuple(
        {name: torch.cat([share[name] for share in layer]) for name in layer[0]}
        for layer in zip(*shares, strict=True)
    )


def _masked(state: ModelState, keep: Tensor) -> ModelState:
    """The state with the rows outside ``keep`` [B] set to zero, which is the empty state."""
    return tuple(
        {n: t * keep.view(-1, *(1,) * (t.dim() - 1)).to(t.dtype) for n, t in layer.items()}
        for layer in state
    )


def device_of(name: str) -> torch.device:
    """That of ``--device``. Raises `TrainingError` where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device cuda: this torch finds no CUDA device; use --device cpu")
    return torch.device(name)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 where the hardware multiplies it natively, else None for float32."""
    if precision == "auto":
        native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()
        )
        precision = "bfloat16" if native else "float32"
    return {"bfloat16": torch.bfloat16, "float32": None}[precision]


def save_progress(
    folder: Path,
    model: Network,
    optimizers: list[torch.optim.Optimizer],
    state: ModelState,
    progress: dict[str, Any],
) -> None:
    """Replaces ``folder``. ``progress`` is JSON: step, tokens, seconds, best, configuration."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for key, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{key}.{name}": value for name, value in values.items()}
    for layer, parts in enumerate(state):
        tensors |= {f"state.{layer}.{name}": part for name, part in parts.items()}
    write_progress(folder, tensors, progress)


def write_progress(folder: Path, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
    """Replaces ``folder`` by one with these tensors and JSON values; `load_progress` reads it."""
    partial, old = folder.with_suffix(".partial"), folder.with_suffix(".old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial / "tensors.safetensors")
    (partial / "progress.json").write_text(json.dumps(progress, indent=2), encoding="utf-8")
    shutil.copymode(partial / "progress.json", partial / "tensors.safetensors")
    if folder.exists():
        # Only now may the older one go: until here a kill may have left nothing else.
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_progress(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The last complete state, or None."""
    for candidate in (folder, folder.with_suffix(".old")):
        if (candidate / "progress.json").is_file():
            progress = json.loads((candidate / "progress.json").read_text(encoding="utf-8"))
            return load_file(candidate / "tensors.safetensors"), progress
    return None


def restore(
    tensors: dict[str, Tensor],
    model: Network,
    optimizers: list[torch.optim.Optimizer],
    state: ModelState,
) -> ModelState:
    """Puts the tensors back into model and optimisers; returns the carried state."""
    device = model.head_weight.device
    model.load_state_dict(_below(tensors, "model."))
    for i, optimizer in enumerate(optimizers):
        values: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below(tensors, f"optimizer.{i}.").items():
            key, _, field = name.partition(".")
            values.setdefault(int(key), {})[field] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": values})
    return tuple(
        {name: tensors[f"state.{layer}.{name}"].to(device) for name in parts}
        for layer, parts in enumerate(state)
    )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


@contextmanager
def signals_remembered() -> Iterator[Callable[[], bool]]:
    """Gives whether SIGINT or SIGTERM has come; a second one acts as it did before."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, remember)
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
