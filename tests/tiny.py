"""A model too small to say anything, made in milliseconds, and an engine around it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from model.architectures import Config
from model.architectures.config import with_state_dtype
from model.architectures.decoder import Decoder
from model.architectures.network import Network, network_class
from model.checkpoint import Checkpoint, save_checkpoint
from model.config import ModelConfig
from model.export.hybrid import write_qwen35
from model.families.jamba.config import JambaConfig
from model.families.lfm2.config import Lfm2Config
from model.families.lfm3.config import Lfm3Config
from model.families.llama.config import LayerPlan, LlamaConfig
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config, Qwen35MtpConfig
from model.families.qwen35.network import Qwen35Mtp
from model.families.rwkv7.config import Arwkv7Config, Rwkv7Config
from model.foreign import MultiTokenHead
from model.lm import LanguageModel
from model.state import StateLayout
from model.tokenizer import Tokenizer, train_tokenizer
from server.engine.engine import Engine, EngineConfig
from server.engine.runner import CpuStatePool, NativeRunner, Runner
from server.engine.session import StateBlock
from server.engine.torch_runner import TorchRunner
from server.engine.types import Event, Finished, Request, SamplingParams, Started, TokenEvent
from tests.fakes import FakeRuntime
from tests.weights import weights_of

if TYPE_CHECKING:
    from model.native.runtime import Runtime

#: Of sessions: no engine uses one that another has used.
IDS = itertools.count(1)

TEXT = """Once upon a time there was a little girl who lived in a wood with her grandmother.
Every morning she fetched water from the well, and every evening she told the fire a story.
"Who lives in the hollow tree?" asked the fox. "Only the wind," said she, "and he is not at home."
"""


@cache
def tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(TEXT, encoding="utf-8")
        return train_tokenizer([file], 300)


#: What `tiny_checkpoint` takes for a mechanism of our own block, and is another architecture.
ARCHITECTURES = (
    *("rwkv7", "arwkv7", "mamba2", "mamba", "qwen35", "lfm2", "lfm3", "llama", "llama-windows"),
    *("mamba2_hybrid", "jamba"),
)
#: The end of any of its names, where the sums of a state are in bfloat16.
ROUNDED = "+bfloat16"
#: The same of those whose state has a bounded past, and what that is: families, and one of them
#: under a bound that a test reaches soon.
BOUNDED = {
    "qwen35": (512, "stop"),
    "lfm2": (512, "stop"),
    "lfm3": (512, "stop"),
    "llama": (512, "stop"),
    "mamba2_hybrid": (512, "stop"),
    "jamba": (512, "stop"),
    "qwen35-short": (64, "stop"),
    "qwen35-slide": (64, "slide"),
    "qwen35-machine": (192, "stop"),
}


@cache
def tiny_checkpoint(attention: str = "gated", seed: int = 0) -> Checkpoint:
    config = _tiny_config(attention.removesuffix(ROUNDED))
    if attention.endswith(ROUNDED):
        config = with_state_dtype(config, "bfloat16")
    model, generator = network_class(config)(config), torch.Generator().manual_seed(seed)
    if is_initialised := isinstance(model, LanguageModel | Decoder):
        model.init_weights(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not is_initialised:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.2)
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    digest = f"tiny-{attention}-{seed}"
    return Checkpoint(config, weights_of(model), tiny_tokenizer(), digest)


def _tiny_config(attention: str) -> Config:
    vocab_size = tiny_tokenizer().vocab_size
    if attention == "rwkv7":
        return Rwkv7Config(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            head_dim=16,
            intermediate_size=48,
            decay_rank=8,
            rate_rank=8,
            value_rank=4,
            gate_rank=12,
        )
    if attention == "mamba":
        return MambaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            inner_size=64,
            state_size=12,
            dt_rank=5,
        )
    if attention == "mamba2":
        return Mamba2Config(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=16,
            state_size=12,
            num_groups=2,
        )
    if attention == "llama-windows":
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_context=100,
            windows=(LayerPlan(12, "relative", 8), LayerPlan(28, "delta", 8), LayerPlan(12)),
        )
    if attention == "arwkv7":
        return Arwkv7Config(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            head_dim=16,
            intermediate_size=48,
            decay_rank=8,
            rate_rank=8,
            value_rank=4,
            tied=True,
        )
    if attention in BOUNDED:
        return _tiny_hybrid(attention, vocab_size)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=48,
        attention=attention,
    )


def _tiny_hybrid(attention: str, vocab_size: int) -> Config:
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    sizes["context"], sizes["past"] = BOUNDED[attention]
    if attention == "llama":
        return LlamaConfig(**sizes)
    sizes["attention_layers"] = (1,)
    if attention == "lfm2":
        return Lfm2Config(**sizes)
    if attention == "mamba2_hybrid":
        return Mamba2HybridConfig(  # a layer of one mixer, of both, and of an MLP alone
            **sizes,
            mamba_layers=(0, 1),
            rotary_dim=16,
            num_mamba_heads=4,
            mamba_head_dim=16,
            state_size=12,
            num_groups=2,
            embedding_scale=3.0,
            residual_scale=0.4,
            attention_scale=0.1,
        )
    if attention == "jamba":
        return JambaConfig(**sizes, inner_size=64, state_size=12, dt_rank=5)
    if attention == "lfm3":
        windows = {"window_layers": (2,), "window": 20, "rotary_dim": 8, "window_rotary_dim": 16}
        return Lfm3Config(**sizes, **windows)
    heads = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
    return Qwen35Config(**sizes, **heads, rotary_dim=8)


@cache
def tiny_head(attention: str = "qwen35", seed: int = 0) -> MultiTokenHead:
    """A multi-token head for a model of Qwen3.5, with random weights."""
    config = tiny_checkpoint(attention).config
    assert isinstance(config, Qwen35Config), attention
    head, generator = Qwen35Mtp(Qwen35MtpConfig.of(config)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return MultiTokenHead(head.config, weights_of(head))


def checkpoint_with_head() -> Checkpoint:
    """A model whose next token depends on the last one most, and a head that knows this alone."""
    checkpoint, head = tiny_checkpoint("qwen35"), tiny_head()
    width = checkpoint.config.hidden_size
    model, drafting = (
        {
            name: tensor * (0.1 if name.endswith(("out.weight", "down.weight")) else 1.0)
            for name, tensor in each.weights.items()
        }
        for each in (checkpoint, head)
    )
    drafting["join.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    drafting["embedding_norm.weight"] = np.ones(width, np.float32)
    drafting["norm.weight"] = model["norm.weight"]
    return replace(checkpoint, weights=model, head=head._replace(weights=drafting))


@cache
def tiny_runtime(attention: str = "gated") -> Runtime:
    """The native runtime, in float32 on one thread. It keeps nothing of a session."""
    from model.native.runtime import Runtime

    checkpoint = tiny_checkpoint(attention)
    num_ids = checkpoint.tokenizer.vocab_size
    return Runtime(checkpoint.config, checkpoint.weights, "float32", num_ids=num_ids)


def tiny_engine(
    attention: str = "gated",
    max_sessions: int = 80,
    grid: tuple[int, ...] = (64, 16),
    runtime: FakeRuntime | Runtime | None = None,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    tokenizer: Tokenizer | None = None,
    model: Network | None = None,
    **config: Any,
) -> Engine:
    """On torch, or on the native runtime or a stand-in for it. ``config`` is `EngineConfig`'s."""
    checkpoint = tiny_checkpoint(attention)
    pool = CpuStatePool(StateLayout.of(checkpoint.config), max_sessions)
    runner: Runner
    if runtime is None:
        num_ids = checkpoint.tokenizer.vocab_size
        runner = TorchRunner(model or checkpoint.model, pool, num_ids, grid)
    else:
        runner = NativeRunner(cast("Runtime", runtime), pool)
    return engine_of(checkpoint, wrap(runner), pool, tokenizer, **config)


def engine_of(
    checkpoint: Checkpoint,
    runner: Runner,
    pool: CpuStatePool,
    tokenizer: Tokenizer | None = None,
    **config: Any,
) -> Engine:
    """With the limits of tests, where ``config`` has no others."""
    limits = {
        "new_id": lambda: f"session-{next(IDS)}",
        "max_waiting": 8,
        "session_ttl_s": 60.0,
        **config,
    }
    return Engine(
        checkpoint.config,
        tokenizer or checkpoint.tokenizer,
        pool,
        runner,
        EngineConfig(**limits),
    )


def request(
    request_id: str = "r",
    tokens: Iterable[int] = (10, 20, 30),
    session: str | None = None,
    keep: bool = False,
    owner: str = "me",
    generate: bool = True,
    start: bool = True,
    **sampling: object,
) -> Request:
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Request(
        request_id, owner, tuple(tokens), params if generate else None, session, keep, start
    )


def drain(engine: Engine, now: float = 0.0) -> dict[str, list[Event]]:
    """Steps until nothing is left to do; the events by request."""
    events: dict[str, list[Event]] = {}
    while engine.has_work():
        for event in engine.step(now):
            events.setdefault(event.request_id, []).append(event)
    return events


def solo(engine: Engine, req: Request, now: float = 0.0) -> list[Event]:
    engine.submit(req, now)
    return drain(engine, now)[req.request_id]


def tokens_of(events: Iterable[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def text_of(events: Iterable[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TokenEvent | Finished))


def finished(events: Iterable[Event]) -> Finished:
    (last,) = [event for event in events if isinstance(event, Finished)]
    return last


def started(events: Iterable[Event]) -> Started:
    (first,) = [event for event in events if isinstance(event, Started)]
    return first


def state_of(engine: Engine, session: str, owner: str = "me") -> bytes:
    """The bytes of a session's state, wherever it is; of the empty one, none."""
    state = engine.kept.value(session, owner).state
    return b"" if state is None else state.data.tobytes()


def poison(engine: Engine, session: str, owner: str = "me") -> None:
    """Makes every number of a session's state one that is not finite. It has a slot."""
    found, pool = engine._sessions.find(session, owner), engine._pool
    assert found.slot is not None
    block = np.array(pool.read(found.slot, found.position).data)
    for layer in pool.layout.views(block[None]):
        for tensor in layer.values():
            if tensor.dtype.kind == "f":
                tensor.fill(float("nan"))
    pool.write(found.slot, StateBlock(block.data))


def check_books(engine: Engine) -> None:
    """Free + held = total, no slot held twice, and none held without a holder."""
    stats, pool = engine.stats(), engine._pool
    slots = [session.slot for session in engine._sessions if session.slot is not None]
    assert len(set(slots)) == len(slots) == stats.held_slots, slots
    assert len(pool._free) + stats.held_slots == stats.max_sessions, (pool._free, stats)
    assert stats.num_running <= stats.held_slots, stats
    assert stats.num_sessions <= stats.max_sessions + engine._config.max_asleep, stats


def write_model(folder: Path, seed: int = 0, attention: str = "gated") -> Path:
    """Such a checkpoint in ``folder``, in the place of what was there; it loads at once."""
    checkpoint = tiny_checkpoint(attention, seed)
    save_checkpoint(folder, checkpoint.model, checkpoint.tokenizer)
    return folder


def write_model_with_head(folder: Path) -> Path:
    """A folder of `checkpoint_with_head`, as Qwen3.5 is published."""
    write_qwen35(folder, checkpoint_with_head(), "float32")
    return folder
