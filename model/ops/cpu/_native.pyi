"""The extension module; its sources are in ``src``, and ``bindings.cpp`` names what is here."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

NOT_FINITE: int
HELD_KINDS: list[str]

def levels() -> list[str]: ...
def built_levels() -> list[str]: ...
def processor_levels() -> list[str]: ...
def families() -> list[str]: ...
def uniform(seed: int, position: int) -> float: ...
def sample(
    logits: npt.NDArray[np.float32],
    draw: Draw,
    position: int,
    recent: list[int],
    allowed: npt.NDArray[np.uint32] | None = None,
) -> int: ...
def read_bandwidth(bytes: int, seconds: float, threads: int, level: str = "") -> float: ...
def multiply_add_rate(seconds: float, threads: int, precision: str, level: str = "") -> float: ...

class Draw:
    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        typical_p: float,
        top_n_sigma: float,
        xtc_probability: float,
        xtc_threshold: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        dry_multiplier: float,
        dry_base: float,
        dry_allowed_length: int,
        dry_penalty_last_n: int,
        dry_breakers: Sequence[int],
        logit_bias: Sequence[tuple[int, float]],
        seed: int,
        logprob: bool,
        num_top: int,
        penalty_window: int,
    ) -> None: ...
    @property
    def has_penalty(self) -> bool: ...

class Runtime:
    def __init__(
        self,
        options: dict[str, str | float],
        states: list[dict[str, int]],
        weights: Callable[[str, int, int], npt.NDArray[np.float32]],
        level: str,
        precision: str,
        num_threads: int,
        num_ids: int,
        base: Runtime | None = None,
    ) -> None: ...
    @property
    def level(self) -> str: ...
    @property
    def rounds_inputs(self) -> bool: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    def run(
        self,
        pool: npt.NDArray[np.uint8],
        slots: list[int],
        positions: list[int],
        tokens: list[Sequence[int]],
        draws: list[Draw | None],
        recents: list[Sequence[int] | None] | None,
        allowed: Sequence[Sequence[npt.NDArray[np.uint32] | None] | None] | None,
        num_draws: list[int] | None,
        sources: Sequence[npt.NDArray[np.uint8] | None] | None = None,
        targets: Sequence[npt.NDArray[np.uint8] | None] | None = None,
        hidden: npt.NDArray[np.float32] | None = None,
        draw_offset: int = 0,
    ) -> list[list[int]]: ...
    def hidden(self, first: int, num: int) -> npt.NDArray[np.float32]: ...
    def score(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Iterable[int],
        following: int | None,
        num_top: int,
        source: npt.NDArray[np.uint8] | None = None,
    ) -> tuple[list[float], list[list[tuple[int, float]]]]: ...
    def embed(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Iterable[int],
        source: npt.NDArray[np.uint8] | None = None,
    ) -> npt.NDArray[np.float64]: ...
    def logprobs(self) -> list[list[float]]: ...
    def top_logprobs(self) -> list[list[list[tuple[int, float]]]]: ...
    def logits(self) -> npt.NDArray[np.float32]: ...

class Training:
    """The passes of ``training.h``; tensors are torch's, contiguous and without a gradient."""

    def __init__(self, level: str = "") -> None: ...
    def norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        epsilon: float,
        sum: Tensor | None,
        out: Tensor,
    ) -> None: ...
    def norm_backward(
        self,
        sum: Tensor,
        weight: Tensor,
        epsilon: float,
        grad_out: Tensor,
        grad_sum: Tensor | None,
        grad_x: Tensor,
        grad_y: Tensor | None,
        grad_weight: Tensor,
    ) -> None: ...
    def gated_norm(
        self, x: Tensor, weight: Tensor, gate: Tensor, epsilon: float, out: Tensor
    ) -> None: ...
    def gated_norm_backward(
        self,
        x: Tensor,
        weight: Tensor,
        gate: Tensor,
        epsilon: float,
        grad_out: Tensor,
        grad_x: Tensor,
        grad_gate: Tensor,
        grad_weight: Tensor,
    ) -> None: ...
    def swiglu(self, up: Tensor, out: Tensor) -> None: ...
    def swiglu_backward(self, up: Tensor, grad_out: Tensor, grad_up: Tensor) -> None: ...
    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        state: Tensor,
        unit: int,
        head: int,
        scale: float,
        epsilon: float,
        out: Tensor,
    ) -> None: ...
    def convolution_backward(
        self,
        x: Tensor,
        weight: Tensor,
        state: Tensor,
        unit: int,
        head: int,
        scale: float,
        epsilon: float,
        grad_out: Tensor,
        grad_x: Tensor,
        grad_weight: Tensor,
        grad_state: Tensor,
    ) -> None: ...
    def delta(
        self,
        qkv: Tensor,
        beta: Tensor,
        log_decay: Tensor,
        state: Tensor,
        out: Tensor,
        u: Tensor,
        starts: Tensor,
        new_state: Tensor,
    ) -> None: ...
    def delta_backward(
        self,
        qkv: Tensor,
        beta: Tensor,
        log_decay: Tensor,
        state: Tensor,
        u: Tensor,
        starts: Tensor,
        grad_out: Tensor,
        grad_new_state: Tensor | None,
        grad_qkv: Tensor,
        grad_beta: Tensor,
        grad_log_decay: Tensor,
        grad_state: Tensor,
    ) -> None: ...
    def cross_entropy(self, logits: Tensor, targets: Tensor) -> float: ...
