"""The pickle of a torch file: a dictionary of tensors, read without running what it names.

A pickle is a program. Here the few instructions run that a dictionary of tensors needs, and
three functions are known by name: those that make an ordered dictionary, a tensor and a
parameter. Any other name is refused before anything is called, and none is imported.

A few instructions can nest a value in itself so often that hashing or printing it never ends.
So a value is hashed or printed only when it is known to be a string or a number.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.tensor_spec import Shape

#: Storage classes of torch -> dtype of the numbers, and what numpy reads them as.
STORAGES = {
    "torch FloatStorage": ("F32", "<f4"),
    "torch HalfStorage": ("F16", "<f2"),
    "torch BFloat16Storage": ("BF16", "<u2"),
    "torch DoubleStorage": ("F64", "<f8"),
    "torch LongStorage": ("I64", "<i8"),
    "torch IntStorage": ("I32", "<i4"),
    "torch ShortStorage": ("I16", "<i2"),
    "torch CharStorage": ("I8", "i1"),
    "torch ByteStorage": ("U8", "u1"),
    "torch BoolStorage": ("BOOL", "?"),
}
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
ORDERED_DICT = "collections OrderedDict"


@dataclass(frozen=True)
class _Global:
    """A name that the pickle refers to; it is never imported."""

    name: str


@dataclass(frozen=True)
class Storage:
    """One member of the archive: ``count`` numbers."""

    kind: str
    key: str
    count: int


@dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: Shape
    strides: Shape


class PickleError(Exception):
    """What a pickle holds that a dictionary of tensors does not."""


def read_tensors(program: bytes) -> dict[str, Tensor]:
    """What the pickle ``program`` describes. Raises `PickleError`."""
    try:
        found = _Machine().run(program)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise PickleError(f"its pickle is damaged: {error}") from error
    if not isinstance(found, dict):
        raise PickleError(f"it holds a {type(found).__name__}, not a dictionary of tensors")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise PickleError(f"{name!r} is not a tensor")
    return found


class _Machine:
    """Runs the instructions of pickle that build dictionaries of tensors; no other."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name not in _INSTRUCTIONS:
                raise PickleError(
                    f"its pickle has the instruction {opcode.name}: no tensor needs it"
                )
            _INSTRUCTIONS[opcode.name](self, argument)
        raise PickleError("its pickle is cut off")

    def nothing(self, argument: Any) -> None:
        pass

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_global(self, name: str) -> None:
        self.push(_known(name))

    def push_stack_global(self, argument: Any) -> None:
        module, attribute = self.pop(2)
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise TypeError("a name is not a string")
        self.push_global(f"{module} {attribute}")

    def push_storage(self, argument: Any) -> None:
        self.push(_storage(self.pop(1)[0]))

    def put(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def memoize(self, argument: Any) -> None:
        self.put(len(self._memo))

    def get(self, at: int) -> None:
        self.push(self._memo[at])

    def mark(self, argument: Any) -> None:
        self._marks.append(len(self._stack))

    def pop(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise IndexError("its stack is empty")
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return values

    def drop(self, argument: Any) -> None:
        self.pop(1)

    def pop_to_mark(self) -> list[Any]:
        return self.pop(len(self._stack) - self._marks.pop())

    def set_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            if not isinstance(key, str):
                raise PickleError(f"a key is of type {type(key).__name__}, not a string")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def reduce(self, argument: Any) -> None:
        function, arguments = self.pop(2)
        self.push(_FUNCTIONS[function.name](*arguments))


def _known(name: str) -> _Global:
    if name not in _FUNCTIONS and name not in STORAGES and not _is_storage(name):
        raise PickleError(
            f"its pickle would call {name.replace(' ', '.')}, which is refused:"
            " a file of weights holds tensors only"
        )
    return _Global(name)


def _is_storage(name: str) -> bool:
    return name.startswith("torch ") and name.endswith("Storage") and name[6:].isidentifier()


def _storage(reference: Any) -> Storage:
    """A storage by its persistent id: ("storage", class, key, device, count)."""
    _, kind, key, _, count = reference
    if type(count) is not int or count < 0 or not isinstance(key, str):
        raise ValueError("no storage")
    return Storage(kind.name, key, count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or len(shape) != len(strides):
        raise ValueError("no tensor")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("no tensor")
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _ordered_dict() -> dict[str, Any]:
    """An empty one: torch adds the items afterwards."""
    return {}


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    TENSOR: _tensor,
    PARAMETER: _parameter,
    ORDERED_DICT: _ordered_dict,
}
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.nothing),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _Machine.push),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "GLOBAL": _Machine.push_global,
    "STACK_GLOBAL": _Machine.push_stack_global,
    "BINPERSID": _Machine.push_storage,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "MARK": _Machine.mark,
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "REDUCE": _Machine.reduce,
    # Attributes of a dictionary, such as `_metadata`.
    "BUILD": _Machine.drop,
}
