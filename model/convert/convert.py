"""From a trained model to one with another attention, in two stages.

The target starts with all weights that it shares with the source by name and
shape: embeddings, norms, MLPs, and mostly q, k, v and the output. Then its
attention is matched to the source's layer by layer (`match_layers`), and then all of
it is trained on text as any model here is (`model.training.loop`). A report has a table and a plot
of the way back.

Matching is after Zhang et al. 2024 ("The Hedgehog & the Porcupine"), who match the attention's
weights instead of its outputs; a mechanism with a constant state need not have such weights.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from model.architectures.network import Network, model_of
from model.attention import spec_of
from model.attention.base import Attention
from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ModelConfig
from model.evaluation import evaluate
from model.families.llama.config import LlamaConfig
from model.files import ConfigError
from model.lm import LanguageModel
from model.training import TrainingError
from model.training.loop import VALID_BYTES, Run, TrainConfig
from model.training.optimizer import learning_rate_factor, make_optimizers, prepare_step
from model.weights import Array, Weights


@dataclass(frozen=True)
class Conversion:
    """One conversion; ``training`` is of the second stage, whose data the first one reads too."""

    source: str
    attention: str
    attention_options: dict[str, Any]
    match_steps: int
    training: TrainConfig

    def __post_init__(self) -> None:
        if self.match_steps < 0:
            raise TrainingError(f"match_steps must be 0 or more, not {self.match_steps}")
        if not self.training.valid:
            raise TrainingError("a conversion needs a validation text")


def convert(conversion: Conversion) -> ConversionReport:
    """Converts; the model comes into OUT/model, the report next to it.

    Raises what `load_checkpoint` raises, and `ConfigError`, `DataError` and `TrainingError`.
    """
    config = conversion.training
    if config.threads:
        torch.set_num_threads(config.threads)
    source = load_checkpoint(conversion.source)
    original = as_block(source)
    run = Run(
        config,
        target_config(original.config, conversion.attention, conversion.attention_options),
        source.tokenizer,
    )
    try:
        original = original.to(run.device)
        if run.step:
            raise TrainingError(f"{config.out} holds a training run: use another --out")
        report = _convert(conversion, original, run)
    finally:
        run.close()
    report.save(config.out)
    return report


def _convert(conversion: Conversion, original: LanguageModel, run: Run) -> ConversionReport:
    config, num_tokens = run.config, run.config.batch_size * run.config.window
    target = run.model
    assert isinstance(target, LanguageModel), type(target)
    fresh = copy_shared(original, target)
    bits = {"original": _bits_per_byte(original, run), "swapped": _bits_per_byte(target, run)}
    curve = [(0, bits["swapped"])]
    # The windows after those of the second stage.
    batches = (
        run.batches.batch(config.num_steps + step)[0].to(run.device)
        for step in range(conversion.match_steps)
    )
    errors = match_layers(
        original, target, batches, conversion.match_steps, config, lambda: _autocast(run)
    )
    match_tokens = conversion.match_steps * num_tokens
    if errors:
        bits["matched"] = _bits_per_byte(target, run)
        curve.append((match_tokens, bits["matched"]))
    _fine_tune(run)
    curve += [(match_tokens + tokens, value) for tokens, value in _logged(config.out)]
    bits["fine_tuned"] = _bits_per_byte(load_checkpoint(config.out / "model").model, run)
    return ConversionReport(
        source=Path(conversion.source).name,
        attention=conversion.attention,
        attention_options=target.config.attention_options,
        original_attention=original.config.attention,
        parameters=target.num_parameters(),
        fresh_tensors=fresh,
        window=config.window,
        match_tokens=match_tokens,
        fine_tune_tokens=run.num_tokens,
        match_error=list(zip(errors[0], errors[-1], strict=True)) if errors else [],
        bits_per_byte=bits,
        curve=curve,
    )


def _fine_tune(run: Run) -> None:
    """All parameters, the language-model loss; the best model so far is kept in OUT/model."""
    while run.step < run.config.num_steps:
        run.train_step()
        if run.step % run.config.eval_every == 0 or run.step == run.config.num_steps:
            run.evaluate()


def _bits_per_byte(model: Network, run: Run) -> float:
    (valid, *_) = run.config.valid
    model.to(run.device).eval()
    with _autocast(run):
        result = evaluate(model, run.tokenizer, valid, "windows", run.config.window, VALID_BYTES)
    model.train()
    return result.bits_per_byte


def _autocast(run: Run) -> torch.autocast:
    """The precision of the run, which matching and all evaluations share with fine-tuning."""
    dtype = run.autocast_dtype
    return torch.autocast(run.device.type, dtype=dtype, enabled=dtype is not None)


def _logged(out: Path) -> list[tuple[int, float]]:
    """Tokens and bits per byte of the evaluations in a run's log."""
    with (out / "log.csv").open(newline="", encoding="utf-8") as file:
        return [
            (int(row["tokens"]), float(row["valid_bits_per_byte"]))
            for row in csv.DictReader(file)
            if row["valid_bits_per_byte"]
        ]


#: Our block's names of a Llama's weights, without the block's.
_NAMES = {
    "attention_norm.weight": "mixer_norm.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    "mlp.down.weight": "mlp.down.weight",
    "attention.out.weight": "mixer.out.weight",
    "attention.out.bias": "mixer.out.bias",
}


def as_block(checkpoint: Checkpoint) -> LanguageModel:
    """The model, in float32.

    Grouped keys and values of a Llama are repeated for each of their queries: the same function,
    with more weights. Raises `ConfigError` for a model of another family, or one with options that
    our block does not have.
    """
    config = checkpoint.config
    if isinstance(config, LlamaConfig):
        block, weights = _block_config(config), checkpoint.weights
        model = model_of(
            block, {name: _weight(name, weights, config) for name in block.weight_shapes()}
        )
    else:
        model = checkpoint.model
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"models of {config.attention} can be trained and served, not converted")
    return model


def _block_config(config: LlamaConfig) -> ModelConfig:
    others = ("qk_norm", "rope_factors", "unrotated_layers")
    for name in others:
        if getattr(config, name):
            raise ConfigError(f"models with {name} can be served, not converted")
    if config.qkv_bias != config.out_bias:
        raise ConfigError("models with biases in a part of attention can be served, not converted")
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        attention="softmax",
        attention_options={"rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        attention_bias=config.qkv_bias,
    )


def _weight(name: str, weights: Weights, config: LlamaConfig) -> Array:
    """A weight of our block by its name."""
    if not name.startswith("blocks."):
        return weights[name]
    prefix, layer, part = name.split(".", 2)
    theirs = f"{prefix}.{layer}."
    if part == "mlp.up.weight":
        return np.concatenate([weights[f"{theirs}mlp.{each}.weight"] for each in ("gate", "up")])
    if part.startswith("attention.qkv."):
        kind = part.rsplit(".", 1)[1]
        q, k, v = (weights[f"{theirs}mixer.{each}.{kind}"] for each in "qkv")
        return np.concatenate([q, *(_repeated(each, config) for each in (k, v))])
    return weights[theirs + _NAMES[part]]


def _repeated(rows: Array, config: LlamaConfig) -> Array:
    """Each head of keys or values as often as it has queries."""
    heads = rows.reshape(config.num_key_value_heads, config.head_dim, *rows.shape[1:])
    group = config.num_attention_heads // config.num_key_value_heads
    repeated: Array = np.repeat(heads, group, axis=0).reshape(-1, *rows.shape[1:])
    return repeated


def target_config(source: ModelConfig, attention: str, options: dict[str, Any]) -> ModelConfig:
    """``source`` with another mechanism, whose state is constant.

    The target rotates queries and keys as the source does, if it can, unless
    ``options`` say otherwise. Raises `ConfigError`.
    """
    if not isinstance(options, dict):
        raise ConfigError(f"attention_options must be an object, not {options!r}")
    target = spec_of(attention)
    if not target.constant_state:
        raise ConfigError(f"attention {attention!r} has no constant state to convert to")
    if "rotary" in target.options:
        options = {**_rotation(source), **options}
    return dataclasses.replace(source, attention=attention, attention_options=options)


def _rotation(config: ModelConfig) -> dict[str, Any]:
    """The options that say how queries and keys are rotated; only "before" is known to all."""
    options = spec_of(config.attention).values(config)
    if options.get("rotary", "none") == "none":
        return {"rotary": "none"}
    return {"rotary": "before", "rope_theta": options["rope_theta"]}


@torch.no_grad()
def copy_shared(source: LanguageModel, target: LanguageModel) -> list[str]:
    """Copies into ``target``, in place, what ``source`` has under the same name and shape.

    Returns the names of the tensors of ``target`` that have no counterpart and
    stay as they are.
    """
    weights = source.state_dict()
    fresh = []
    for name, tensor in target.state_dict().items():
        if name in weights and weights[name].shape == tensor.shape:
            tensor.copy_(weights[name])
        else:
            fresh.append(name)
    return fresh


def match_layers(
    old: LanguageModel,
    new: LanguageModel,
    batches: Iterable[Tensor],
    num_steps: int,
    config: TrainConfig,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[list[float]]:
    """Trains the attention of ``new``, in place, on ``num_steps`` batches of tokens [B, T].

    Each layer learns to give what the old one gave for the same input. The layers are independent:
    all see the old model's activations, so errors do not add up over the depth, and only the
    attention's parameters train. The loss of a layer is relative, ``|new - old|^2 / |old|^2`` over
    a batch, which weighs layers alike for outputs of any size.

    Both models compute under ``autocast``. Returns the relative error of each layer at each
    step, before its update. Raises `TrainingError`, the weights untouched by that step, where
    an error or a gradient is not finite.
    """
    new.requires_grad_(False)
    layers = attentions(new)
    for layer in layers:
        layer.requires_grad_(True)
    optimizers = make_optimizers(new, config.optimizer, config.learning_rate, config.weight_decay)
    warmup_steps = min(config.warmup_steps, num_steps // 10)
    history = []
    for step, tokens in zip(range(num_steps), batches, strict=False):
        factor = learning_rate_factor(step, num_steps, warmup_steps)
        prepare_step(optimizers, factor)
        with autocast():
            pairs = zip(layers, old.attention_pairs(tokens), strict=True)
            errors = [_backward(layer, inputs, outputs) for layer, (inputs, outputs) in pairs]
        norms = [
            torch.nn.utils.clip_grad_norm_(layer.parameters(), config.clip) for layer in layers
        ]
        history.append(_finite(errors, "an error", step))
        _finite(norms, "the norm of a gradient", step)
        for optimizer in optimizers:
            optimizer.step()
    new.requires_grad_(True)
    return history


def attentions(model: LanguageModel) -> list[Attention]:
    """The attention of each layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def _backward(layer: Attention, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Adds the gradient of the layer's loss to its parameters; the relative error."""
    losses: list[Tensor] = []
    found = layer.parallel(inputs, losses)
    found, wanted = found.float(), wanted.float()
    error = (found - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)
    loss = torch.stack([error, *losses]).sum()
    with torch.autocast(inputs.device.type, enabled=False):
        loss.backward()
    return error.detach()


def _finite(values: list[Tensor], name: str, step: int) -> list[float]:
    found: list[float] = torch.stack(values).tolist()
    if not all(map(math.isfinite, found)):
        raise TrainingError(f"{name} is not finite at step {step} of matching: {found}")
    return found


STAGES = {
    "original": "the model before",
    "swapped": "after the bare swap",
    "matched": "after matching the layers",
    "fine_tuned": "after fine-tuning",
}


@dataclass(frozen=True)
class ConversionReport:
    """``bits_per_byte`` has the four stages; ``curve`` is (tokens of recovery, bits per byte).

    ``match_error`` is, per layer, the relative squared error of the attention's
    output at the first and at the last step of matching.
    """

    source: str
    attention: str
    attention_options: dict[str, Any]
    original_attention: str
    parameters: int
    fresh_tensors: list[str]
    window: int
    match_tokens: int
    fine_tune_tokens: int
    match_error: list[tuple[float, float]]
    bits_per_byte: dict[str, float]
    curve: list[tuple[int, float]]

    def save(self, out: Path) -> None:
        """Writes ``report.json`` and, where matplotlib is there, ``recovery.png`` into ``out``."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (out / "report.json").write_text(text, encoding="utf-8")
        self._plot(out / "recovery.png")

    def print(self, console: Console) -> None:
        """The four stages with the tokens seen until then."""
        table = Table("stage", "tokens", "bits per byte", "to the original")
        total = self.match_tokens + self.fine_tune_tokens
        seen = {"original": 0, "swapped": 0, "matched": self.match_tokens, "fine_tuned": total}
        original = self.bits_per_byte["original"]
        for stage, value in self.bits_per_byte.items():
            change = f"{value - original:+.4f}"
            table.add_row(STAGES[stage], f"{seen[stage]:,}", f"{value:.4f}", change)
        console.print(table)

    def _plot(self, path: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return  # the plot needs the extra 'train'; report.json holds the same numbers
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="tokens of recovery", ylabel="bits per byte")
        original = self.bits_per_byte["original"]
        axes.axhline(original, color="tab:gray", linestyle="--", label=STAGES["original"])
        axes.plot(*zip(*self.curve, strict=True), color="tab:blue", marker=".", zorder=1)
        total = self.match_tokens + self.fine_tune_tokens
        places = {"swapped": 0, "matched": self.match_tokens, "fine_tuned": total}
        for stage, tokens in places.items():
            if stage in self.bits_per_byte:
                axes.scatter([tokens], [self.bits_per_byte[stage]], label=STAGES[stage], zorder=2)
        axes.set_title(f"{self.original_attention} to {self.attention}")
        axes.legend()
        figure.savefig(path, dpi=120)
