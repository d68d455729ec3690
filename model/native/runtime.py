"""The native runtime: a whole step of a whole batch in one call, without torch.

Prompts and single tokens share a call, since a row's bits depend neither on the
rest of its batch nor on how a prompt is cut: every output is summed in one fixed order,
and attention reads token by token. The code is in ``src``; ``docs/contribute/native.md``
describes it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.files import ConfigError, FileError
from model.native.options import covers, native_options
from model.state import StateLayout
from model.tensor_spec import Shape
from model.weights import StoredWeights, shape_in

if TYPE_CHECKING:
    import model.ops.cpu._native as _native

# What a user is told where the extension module lacks this processor's level. An editable install
# has one level, that of the processor that it was compiled on; wheels have all. A module that moved
# to another processor runs the best of its levels that is left, if there is one.

COMPILE_HERE = (
    f"compile it here: {sys.executable} -m pip install --no-build-isolation --no-deps --editable"
    f" {Path(__file__).parents[2]}"
)


def why_none_runs(built: Sequence[str], processor: Sequence[str]) -> str | None:
    """One line where no level of the module is the processor's; these have the best first."""
    if set(built) & set(processor):
        return None
    best = processor[0] if processor else "none of the levels"
    return f"it was compiled for {', '.join(built)}, and this processor has {best}; {COMPILE_HERE}"


def better_level(built: Sequence[str], processor: Sequence[str]) -> str | None:
    """One line where a level runs, and the processor has a better one."""
    used = next(level for level in processor if level in built)
    if used == processor[0]:
        return None
    return f"the native runtime runs {used}, without kernels for {processor[0]}; {COMPILE_HERE}"


try:
    _module: ModuleType | None = importlib.import_module("model.ops.cpu._native")
except ImportError as error:
    # `make serve` installs again once there is a compiler.
    _module = None
    _reason = (
        f"it was not built ({error}); install a C++ compiler and Python's headers (Debian: apt-get"
        " install g++ python3-dev), then run `make serve` or `pip install` again"
    )
if _module is not None:
    _lacks = why_none_runs(_module.built_levels(), _module.processor_levels())
    if _lacks:
        _module, _reason = None, _lacks

#: How weights are kept; the names are those of ``everstream serve --dtype``.
DTYPES = ("float32", "bfloat16", "int8", "int4")
#: Those that torch has no products of.
NATIVE_DTYPES = ("int8", "int4")
#: What folders and GGUF call what is int4 here, number by number.
INT4_KINDS = ("int4", "Q4_0")
#: The types of GGUF whose blocks a runtime of int4 holds as they are in the file. The extension
#: module lists them; without it there are none.
HELD_KINDS: tuple[str, ...] = tuple(getattr(_module, "HELD_KINDS", ()))
#: A runtime of int4 serves files mostly of these as they are. It rounds one mostly of Q8_0, since
#: int4 asks for fewer bits than that has.
HELD_FILES = (*INT4_KINDS, *(kind for kind in HELD_KINDS if kind != "Q8_0"))
#: Those of `HELD_FILES` with four bits a weight, which are not rounded to int4 again.
INT4_FILES = (*INT4_KINDS, "Q4_1", "Q4_K", "IQ4_XS", "IQ4_NL")
#: What a runtime of int4 holds in int8; see the notebook.
INT8_TABLES = ("embedding.weight", "position_embedding.weight", "head.weight")
#: In the place of a token: the logits were not finite.
NOT_FINITE = -2

Draw = Any  # `_native.Draw`
#: Of each draw of a row the ids that it may give; see `Runtime.run`.
Masks = Sequence[npt.NDArray[np.uint32] | None]


class NativeError(ValueError):
    """What the native runtime does not cover, or that it was not built."""


def built() -> bool:
    """Whether the extension module is there, with a level that runs on this processor."""
    return _module is not None


def why_not_built() -> str | None:
    """Why not, in one line; None where it is `built`."""
    return None if built() else _reason


def better_level_exists() -> str | None:
    """One line where this processor has a better level than those that were compiled."""
    module = _built()
    return better_level(module.built_levels(), module.processor_levels())


def levels() -> list[str]:
    """The levels of vector instructions that were compiled and run here, the best one first."""
    names: list[str] = _built().levels()
    return names


class Dry(Protocol):
    """See `server.engine.types.Dry`."""

    @property
    def multiplier(self) -> float: ...
    @property
    def base(self) -> float: ...
    @property
    def allowed_length(self) -> int: ...
    @property
    def penalty_last_n(self) -> int: ...
    @property
    def breakers(self) -> Sequence[int]: ...


class Runtime:
    """One model with its weights packed for this machine. Not thread-safe.

    ``weights`` are float32 by their names in a checkpoint, and not kept.
    ``num_ids`` is how many ids may be drawn, where the model's vocabulary is
    padded beyond the tokenizer's. ``progress`` is called while weights are read, with how many
    numbers have been. The embedding and the head are those of ``base`` where that is given, as a
    multi-token head has them. ``held`` is the dtype, and the kinds of blocks that are as in their
    file; ``int4_names`` are the matrices that int4 rounds.
    Raises `NativeError` for what it does not cover.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, npt.NDArray[Any]],
        dtype: str = "bfloat16",
        threads: int = 1,
        level: str | None = None,
        num_ids: int | None = None,
        progress: Callable[[int], None] | None = None,
        base: Runtime | None = None,
    ) -> None:
        module = _built()
        if dtype not in DTYPES:
            raise NativeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if level is not None and level not in module.levels():
            known = ", ".join(module.levels())
            raise NativeError(
                f"level must be one of {known}, which were compiled and run here, not {level!r}"
            )
        if threads < 1:
            raise NativeError(f"threads must be at least 1, not {threads}")
        num_ids = config.vocab_size if num_ids is None else num_ids
        if not 1 <= num_ids <= config.vocab_size:
            raise NativeError(f"num_ids must be in 1..{config.vocab_size}, not {num_ids}")
        if not covers(config):
            raise NativeError(f"it has no kernels for {config.attention} models")
        self.config, self.dtype, self.num_ids = config, dtype, num_ids
        try:
            self.layout = StateLayout.of(config)
        except ConfigError as error:
            raise NativeError(str(error)) from error

        offsets: list[dict[str, int]] = [{} for _ in range(config.num_hidden_layers)]
        for field in self.layout.fields:
            offsets[field.layer][field.name] = field.offset
        options = native_options(config, self.layout)
        if options["family"] not in module.families():
            raise NativeError(f"it was built before it had kernels for {config.attention} models")
        source = _Source(config.weight_shapes(), weights, progress)
        try:
            self._native: _native.Runtime = module.Runtime(
                options,
                offsets,
                source,
                level or "",
                dtype,
                threads,
                num_ids,
                None if base is None else base._native,
            )
        except FileError:  # what a file of weights turns out to be when it is read
            raise
        except ValueError as error:
            raise NativeError(str(error)) from error
        self.held = "+".join([dtype, *sorted(kind.lower() for kind in source.kinds)])
        self.int4_names = tuple(source.int4_names)

    @property
    def level(self) -> str:
        """The level of vector instructions in use."""
        return self._native.level

    @property
    def threads(self) -> int:
        return self._native.num_threads

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._native.num_bytes

    def empty_pool(self, num_slots: int) -> npt.NDArray[np.uint8]:
        """Empty states, [num_slots, num_bytes] uint8."""
        return np.zeros((num_slots, self.layout.num_bytes), np.uint8)

    def draw(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        logprob: bool = False,
        typical_p: float = 1.0,
        top_n_sigma: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        dry: Dry | None = None,
        logit_bias: Sequence[tuple[int, float]] = (),
        top_logprobs: int | None = None,
        penalty_window: int | None = None,
    ) -> Draw:
        """How to draw a token, for `run`; parameters as in `server.engine.types.SamplingParams`.

        They apply in the order that `server.engine.torch_runner` defines. A bias of an id
        that is not drawn does nothing. Penalties look at the last ``penalty_window`` of the
        recent tokens that `run` is given, or at all of them. Raises `ValueError` for a bias
        that is not finite, or of a negative id, and for more than 20 ``top_logprobs``.
        """
        return _built().Draw(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            top_n_sigma=top_n_sigma,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            dry_multiplier=0.0 if dry is None else dry.multiplier,
            dry_base=1.0 if dry is None else dry.base,
            dry_allowed_length=1 if dry is None else dry.allowed_length,
            dry_penalty_last_n=0 if dry is None else dry.penalty_last_n,
            dry_breakers=() if dry is None else dry.breakers,
            logit_bias=logit_bias,
            seed=seed,
            logprob=logprob or top_logprobs is not None,
            num_top=top_logprobs or 0,
            penalty_window=penalty_window or 0,
        )

    def run(
        self,
        pool: npt.NDArray[np.uint8],
        slots: list[int],
        positions: list[int],
        tokens: list[Sequence[int]],
        draws: list[Draw | None],
        recents: list[Sequence[int] | None] | None = None,
        allowed: Sequence[Masks | None] | None = None,
        num_draws: list[int] | None = None,
        sources: Sequence[npt.NDArray[np.uint8] | None] | None = None,
        targets: Sequence[npt.NDArray[np.uint8] | None] | None = None,
        hidden: npt.NDArray[np.float32] | None = None,
        draw_offset: int = 0,
    ) -> list[list[int]]:
        """Feeds ``tokens[i]``, one or more, to the state in row ``slots[i]`` of ``pool``, in place.

        ``positions[i]`` counts the tokens that the state has seen. Where ``draws[i]`` is
        not None, a token is drawn after each of the last ``num_draws[i]`` tokens; without
        ``num_draws``, after the last one. A draw gives what a run gives that ends at its token.
        ``recents[i]`` are the last tokens of the sequence, ``tokens[i]`` included, for the
        penalties; a draw does not see the tokens after its own.
        ``allowed[i]`` has for each draw None, or the ids that may be drawn: bit ``id % 32``
        of word ``id // 32``, contiguous.
        The first ``fixed_bytes`` of a state are in ``sources[i]`` where that is not None, and
        go to ``targets[i]`` where that is not None: then the source stays as it was. A past is
        written in the row of ``pool`` in any case.
        Of a multi-token head ``hidden`` [tokens of all rows, width] are the hidden states before
        the tokens, zeros where it is None; a draw is at ``draw_offset`` more than its position.
        Returns for each row what was drawn, tokens or `NOT_FINITE`. No slot, source or target may
        be given twice. Raises `ValueError` for what cannot be run, also where nothing
        is allowed; if it raises, no state has changed.
        """
        rows = pool, slots, positions, tokens, draws, recents, allowed, num_draws
        return self._native.run(*rows, sources, targets, hidden, draw_offset)

    def hidden(self, first: int, num: int) -> npt.NDArray[np.float32]:
        """What the final norm gives for ``num`` tokens of the last `run`, from ``first`` on.

        [num, width]; tokens of all rows count in their order. Raises `ValueError` where the run
        had fewer.
        """
        return self._native.hidden(first, num)

    def score(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Sequence[int],
        following: int | None = None,
    ) -> list[float]:
        """Feeds ``tokens`` to a slot as `run` does; ``following`` comes next and is not fed.

        Returns the natural logarithm of the probability of each of
        ``tokens[1:]``, and of ``following`` if given, after all before it; NaN
        where the model's output is not finite. The softmax is over the first
        ``num_ids`` ids, and every token but the first must be one of them. Any
        cut of a text gives the same numbers. Raises `ValueError` before anything
        has changed, also where nothing is to be scored.
        """
        return self.score_top(pool, slot, position, tokens, following, 0)[0]

    def score_top(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Sequence[int],
        following: int | None,
        num_top: int,
        source: npt.NDArray[np.uint8] | None = None,
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """As `score`; for each number also the ``num_top`` likeliest ids, at most 20, with theirs.

        Best first, equal ones by id; none where the model's output is not finite. ``source`` as
        in `run`.
        """
        return self._native.score(pool, slot, position, tokens, following, num_top, source)

    def embed(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Sequence[int],
        source: npt.NDArray[np.uint8] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Feeds ``tokens`` to a slot as `run` does; the sum of what the final norm gives for each.

        [hidden_size]; NaN where that is not finite. Each term is rounded to a
        multiple of 2**-24, so that float64 adds exactly: the sums over any parts of
        a text add up to the same bits. Raises `ValueError` before anything has
        changed.
        """
        return self._native.embed(pool, slot, position, tokens, source)

    def logprobs(self) -> list[list[float]]:
        """The log-probabilities of what the last `run` drew, in the same lists.

        As `score` has them, bit for bit: before bias, penalties, temperature, filters
        and mask. NaN where the draw was made without ``logprob`` and
        ``top_logprobs``, or there is no token.
        """
        return self._native.logprobs()

    def top_logprobs(self) -> list[list[list[tuple[int, float]]]]:
        """For each draw of the last `run` the ``top_logprobs`` likeliest ids, as in `score_top`."""
        return self._native.top_logprobs()

    def logits(self) -> npt.NDArray[np.float32]:
        """A copy of the last run's logits, [rows with a draw, vocabulary].

        As bias, penalties and mask left them: minus infinity where not allowed.
        """
        return self._native.logits()


def held_as(weights: Mapping[str, npt.NDArray[Any]], name: str) -> str:
    """What a runtime of int4 holds a matrix in: int4, int8, or one of `HELD_KINDS`.

    int8 are those that a file of `HELD_FILES` has in another type, which its author chose, or that
    come out changed; and of other files what is looked up or gives logits.
    """
    if not _is_held_file(weights):
        return "int8" if name in INT8_TABLES else "int4"
    kind = weights.block_kind(name)
    if kind in HELD_KINDS:
        return kind
    return "int4" if weights.dtype_of(name) in INT4_KINDS else "int8"


def _is_held_file(weights: Mapping[str, npt.NDArray[Any]]) -> TypeGuard[StoredWeights]:
    return isinstance(weights, StoredWeights) and weights.stored_dtype in HELD_FILES


class _Source:
    """A checkpoint's tensors as the extension module reads them, rows at a time.

    ``shapes`` are those that the config lists, ``kinds`` the `HELD_KINDS` that were read,
    ``int4_names`` the matrices that are held in int4.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        weights: Mapping[str, npt.NDArray[Any]],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._shapes = shapes
        self._weights, self._progress, self._num_read = weights, progress, 0
        self.kinds: set[str] = set()
        self.int4_names: dict[str, None] = {}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        """Raises `NativeError` for an unknown name, and for a tensor of another shape."""
        if not self.has(name) or name not in self._weights:
            raise NativeError(f"weight {name!r} is missing")
        if shape_in(self._weights, name) != self._shapes[name]:
            raise NativeError(f"weight {name!r} has another shape")
        return self._shapes[name]

    def held_as(self, name: str) -> str:
        """As `held_as`; keeps the names of what is rounded to int4."""
        held = held_as(self._weights, name)
        if held == "int4" and not _is_held_file(self._weights):
            self.int4_names[name] = None
        return held

    def blocks(self, name: str, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Rows of a matrix that is held as one of `HELD_KINDS`, in the blocks of its file."""
        assert isinstance(self._weights, StoredWeights), name
        rows = np.array(self._weights.blocks(name, begin, end), np.uint8, order="C", copy=True)
        self._weights.release()
        self.kinds.add(held_as(self._weights, name))
        self._count(len(rows) * self._shapes[name][-1])
        return rows

    def __call__(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Rows ``begin`` to ``end`` as float32."""
        if isinstance(self._weights, StoredWeights):
            rows = np.array(self._weights.rows(name, begin, end), np.float32, order="C", copy=True)
            self._weights.release()
        else:
            rows = np.ascontiguousarray(self._weights[name][begin:end], dtype=np.float32)
        self._count(rows.size)
        return rows

    def _count(self, num: int) -> None:
        self._num_read += num
        if self._progress is not None:
            self._progress(self._num_read)


def _built() -> Any:
    if _module is None:
        raise NativeError(f"the native runtime is not there: {_reason}")
    return _module


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
