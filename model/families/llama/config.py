"""The config of a Llama model, what each layer keeps of the past, its state and its weights."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from model.architectures.config import check_booleans, check_positive
from model.architectures.hybrid import (
    MIN_CONTEXT,
    SINKS,
    BoundedConfig,
    attention_shapes,
    decoder_shapes,
    past_state,
)
from model.files import ConfigError
from model.tensor_spec import POSITION_BLOCK, Shape, TensorSpec

# -------------------------------------------------------------------------------------------------
# What a layer of constant state keeps of the past, and the bytes of it.
#
# A layer has a window of exact softmax over the last tokens and the first ``sinks`` tokens of the
# text, which many heads rest on (Xiao et al. 2023, "Efficient Streaming Language Models with
# Attention Sinks"). What leaves the window is forgotten, or goes into a far part:
#
# - ``relative``: sums of features, weighed against the near sum (`.relative`);
# - ``delta``: the gated delta rule (`.delta`).


Far = Literal["none", "relative", "delta"]
FARS: tuple[Far, ...] = get_args(Far)


@dataclass(frozen=True)
class LayerPlan:
    """One layer: ``window`` last tokens, the far part, and its features per head of keys."""

    window: int
    far: Far = "none"
    features: int = 0

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < 1:
            raise ConfigError(f"window must be 1 or more, not {self.window!r}")
        if self.far not in FARS:
            raise ConfigError(f"far must be one of {', '.join(FARS)}, not {self.far!r}")
        features = self.features
        if type(features) is not int or (self.far == "none") != (features == 0):
            raise ConfigError(f"far part {self.far!r} cannot have {features!r} features")
        if features < 0 or features % 2:
            raise ConfigError(f"features must be even and positive, not {features}")

    @property
    def context(self) -> int:
        """Tokens whose keys and values the layer holds: the first ones and the last ones."""
        return self.window + SINKS

    def far_state(self, num_kv_heads: int, head_dim: int) -> dict[str, TensorSpec]:
        """S, and z where there is a sum of the features alone."""
        sums = TensorSpec((num_kv_heads, self.features, head_dim), is_sum=True)
        if self.far == "none":
            return {}
        if self.far == "delta":
            return {"S": sums}
        return {"S": sums, "z": TensorSpec((num_kv_heads, self.features))}

    def far_shapes(self, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Shape]:
        """The weights of the far part, by their names in it."""
        if self.far == "none":
            return {}
        half = self.features // 2
        shapes: dict[str, Shape] = {
            "key_map": (num_kv_heads, head_dim, half),
            "query_map": (num_heads, head_dim, half),
            "scale": (num_heads, head_dim),
            "bias": (num_heads,),
        }
        if self.far == "delta":
            shapes |= {"gates": (num_kv_heads, 2 * head_dim, 2), "gate_bias": (num_kv_heads, 2)}
        return shapes


def read_plans(values: Any, num_layers: int) -> tuple[LayerPlan, ...]:
    """Those of a config, where a JSON file has objects: one for each layer, or none.

    Raises `ConfigError`. First tokens and window fill whole blocks of positions.
    """
    if not isinstance(values, list | tuple) or len(values) not in (0, num_layers):
        raise ConfigError(f"windows must be a list of {num_layers} objects or empty")
    return tuple(_read_plan(value) for value in values)


def _read_plan(value: Any) -> LayerPlan:
    if isinstance(value, dict) and value.keys() <= {"window", "far", "features"}:
        value = LayerPlan(**{"window": 0, **value})
    if not isinstance(value, LayerPlan):
        raise ConfigError(f"windows: {value!r:.80} is not of window, far and features")
    if value.context % POSITION_BLOCK:
        raise ConfigError(
            f"windows: a window must be {SINKS} less than a multiple of {POSITION_BLOCK},"
            f" not {value.window}"
        )
    return value


# -------------------------------------------------------------------------------------------------
# The config of a Llama model, its state and its weights' names and shapes.


@dataclass(frozen=True)
class LlamaConfig(BoundedConfig):
    """Everything that decides the shapes of weights and state."""

    model_type: ClassVar[str] = "everstream-llama"
    attention: ClassVar[str] = "llama"
    options: ClassVar[tuple[str, ...]] = (
        *("num_key_value_heads", "qk_norm", "qkv_bias", "out_bias", "unrotated_layers", "windows"),
    )
    added_later: ClassVar[tuple[str, ...]] = ("windows",)

    vocab_size: int
    hidden_size: int = 576
    num_hidden_layers: int = 30
    #: The width inside the MLP.
    intermediate_size: int = 1536
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    rope_theta: float = 1e4
    #: What the frequency of each pair of channels is divided by [head_dim / 2]; none is all one.
    rope_factors: tuple[float, ...] = ()
    #: Indices of layers whose queries and keys have no positions, as SmolLM3 has some.
    unrotated_layers: tuple[int, ...] = ()
    #: Whether queries and keys have norms, as in Qwen3.
    qk_norm: bool = False
    #: Whether queries, keys and values have biases, as in Qwen2.
    qkv_bias: bool = False
    #: Whether the output of attention has one.
    out_bias: bool = False
    norm_eps: float = 1e-5
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    max_context: int = 2048
    context: int = 0
    past: str = "stop"
    #: Of each layer, where the state is constant: then the first tokens are seen no farther away
    #: than ``max_context``, and there is no bound: ``context`` is 0 and ``past`` "stop".
    windows: tuple[LayerPlan, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self, "num_hidden_layers")
        self._set("windows", read_plans(self.windows, self.num_hidden_layers))
        if self.windows and (self.context, self.past) != (0, "stop"):
            raise ConfigError(
                "with windows there is no bound: context must be 0 and past 'stop', not"
                f" {self.context!r:.80} and {self.past!r:.80}"
            )
        super().__post_init__()
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, not {self.head_dim}")
        check_booleans(self, "qk_norm", "qkv_bias", "out_bias")
        self._set("rope_factors", self._factors(self.rope_factors))
        self._set("unrotated_layers", self._layers(self.unrotated_layers))

    def _factors(self, values: Any) -> tuple[float, ...]:
        """As a JSON file has them, a list."""
        factors = tuple(values) if isinstance(values, list | tuple) else ("",)
        if len(factors) not in (0, self.head_dim // 2) or not all(
            type(factor) is float and 0.0 < factor < 1e30 for factor in factors
        ):
            raise ConfigError(
                f"rope_factors must be {self.head_dim // 2} positive floats or none,"
                f" not {values!r:.80}"
            )
        return factors

    def _layers(self, values: Any) -> tuple[int, ...]:
        layers = tuple(values) if isinstance(values, list | tuple) else (-1,)
        known = range(self.num_hidden_layers)
        if not all(type(layer) is int and layer in known for layer in layers):
            raise ConfigError(
                f"unrotated_layers must be a list of numbers in 0..{known[-1]}, not {values!r:.80}"
            )
        return tuple(sorted(set(layers)))

    @property
    def is_attention(self) -> list[bool]:
        """Of each layer whether its past grows: of all or none."""
        return [not self.windows] * self.num_hidden_layers

    @property
    def attention_options(self) -> dict[str, Any]:
        """See `model.architectures.config.Config`; a window without a far part is its length."""
        windows = [
            plan.window if plan.far == "none" else list(astuple(plan)) for plan in self.windows
        ]
        return {**super().attention_options, "windows": windows}

    @property
    def longest_window(self) -> int:
        """Tokens that the layer with the longest window keeps; 0 without windows."""
        return max((plan.context for plan in self.windows), default=0)

    def with_longest_window(self, context: int) -> LlamaConfig:
        """Windows in the same proportions, the longest of which keeps ``context`` tokens at most.

        Each fills whole blocks of positions, and none is cut below `MIN_CONTEXT` tokens. Raises
        `ConfigError` where ``context`` is more than the longest keeps, or less than that.
        """
        longest = self.longest_window
        least = min(MIN_CONTEXT, longest)
        if not least <= context <= longest:
            raise ConfigError(f"--context must be in {least}..{longest}, not {context}")

        def shortened(plan: LayerPlan) -> LayerPlan:
            blocks = plan.context * context // longest // POSITION_BLOCK
            kept = min(plan.context, max(MIN_CONTEXT, blocks * POSITION_BLOCK))
            return replace(plan, window=kept - SINKS)

        return replace(self, windows=tuple(map(shortened, self.windows)))

    def layer_states(self) -> list[dict[str, TensorSpec]]:
        """See `model.architectures.config.Config`."""
        heads, width = self.num_key_value_heads, self.head_dim
        if not self.windows:
            return [self.past_state()] * self.num_hidden_layers
        return [
            past_state(plan.context, heads, width, per_position=False)
            | plan.far_state(heads, width)
            for plan in self.windows
        ]

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        mixer = attention_shapes(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
        )
        mixers = [mixer] * self.num_hidden_layers
        if self.windows:
            sizes = self.num_attention_heads, self.num_key_value_heads, self.head_dim
            far = [plan.far_shapes(*sizes) for plan in self.windows]
            mixers = [mixer | {f"far.{name}": shape for name, shape in of.items()} for of in far]
        return decoder_shapes(self, mixers, self.tied)
