"""Values and log entries as JSON and back: one codec for the log, snapshots and exports.

Fields travel by name, those of named tuples by place. What is missing takes its
default, so that an older log can be read by a newer program; an unknown field,
or a value of another type, is refused. States travel apart.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from zlib import crc32

import orjson

from server.engine.types import Finished, TokenEvent
from server.engine.value import (
    Accepted,
    Deleted,
    Entry,
    Opened,
    Rewound,
    Saved,
    SessionValue,
    StateBlock,
)

T = typing.TypeVar("T")


class Malformed(ValueError):
    """Data that this codec has not written, or cannot write."""


#: What has no form that a database takes: text with a lone surrogate, a number beyond 64 bits.
UNSTORABLE = (Malformed, UnicodeError, OverflowError)


def encode(value: object) -> bytes:
    """JSON of a dataclass, a named tuple, or a list of such; without states. Raises `Malformed`."""
    try:
        return orjson.dumps(value, _plain)
    except orjson.JSONEncodeError as error:
        raise Malformed(str(error)) from error


def decode_json(data: bytes | str) -> Any:
    """JSON as lists and dicts. Raises `Malformed`."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Malformed(str(error)) from error


def build(kind: type[T], data: Any) -> T:
    """A ``kind`` out of what `encode` made of it. Raises `Malformed`."""
    return typing.cast("T", _reader(typing.cast("Any", kind))(data))


def decode_value(data: bytes | str) -> SessionValue:
    """A value without its state. Raises `Malformed`."""
    return build(SessionValue, decode_json(data))


#: What an entry's list begins with; tokens, the many, are lists of their fields alone.
_KINDS = (Accepted, TokenEvent, Finished, Rewound, Opened, Saved, Deleted)
_TAGS = {kind: kind.__name__.lower() for kind in _KINDS}
_BY_TAG = {tag: kind for kind, tag in _TAGS.items()}


def pack_entry(entry: Entry, running: str | None) -> Sequence[object]:
    """``entry`` for `encode`; a token does without its request's id where that is ``running``."""
    if isinstance(entry, TokenEvent):
        fields = pack_token(entry)
        if entry.request_id == running:
            return fields
        return _TAGS[TokenEvent], (entry.request_id, *fields)
    return _TAGS[type(entry)], (entry if isinstance(entry, Finished) else tuple(entry))


def pack_token(entry: TokenEvent) -> tuple[object, ...]:
    """A token of the request that runs: most have no probabilities and no thought."""
    if entry[7] is not None:
        return entry[1:]
    return entry[1:5] if entry[5] is None else entry[1:7]


def unpack_entry(data: Any, running: str | None) -> Entry:
    """The entry that `pack_entry` was given. Raises `Malformed`."""
    if not isinstance(data, list):
        raise Malformed(f"an entry must be a list: {data!r}")
    if len(data) != 2:
        return _token(running or "", data)
    tag, fields = data
    if tag not in _BY_TAG:
        raise Malformed(f"no entry is called {tag!r}")
    return typing.cast("Entry", build(_BY_TAG[tag], fields))


def pack_entries(entries: Sequence[Entry], running: str | None) -> bytes:
    """``entries`` as they follow each other, ``running`` being the request before them."""
    packed: list[object] = []
    for entry in entries:
        if type(entry) is TokenEvent and entry.request_id == running:
            packed.append(pack_token(entry))
        else:
            packed.append(pack_entry(entry, running))
            running = running_after(entry, running)
    return encode(packed)


def unpack_entries(data: bytes, running: str | None) -> list[Entry]:
    """What `pack_entries` was given. Raises `Malformed`."""
    entries = []
    for packed in decode_json(data):
        entry = unpack_entry(packed, running)
        if type(entry) is not TokenEvent or entry.request_id != running:
            running = running_after(entry, running)
        entries.append(entry)
    return entries


def running_after(entry: Entry, running: str | None) -> str | None:
    """The id of the request that runs after ``entry``."""
    match entry:
        case Accepted():
            return entry.request.request_id
        case TokenEvent():
            return entry.request_id
        case Finished():
            return None
        case Opened() | Saved() | Rewound():
            progress = entry.value.progress
            return progress.request.request_id if progress else None
    return running


def _token(request_id: str, fields: list[Any]) -> TokenEvent:
    if len(fields) == 4:
        return TokenEvent(request_id, *fields)
    return build(TokenEvent, [request_id, *fields])


def _plain(value: object) -> object:
    """What orjson does not know by itself."""
    if isinstance(value, tuple):
        return tuple(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, StateBlock):
        return None
    raise TypeError(f"no JSON for {type(value)}")


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function from JSON to ``kind``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind == tuple[int, ...]:
        return _ints
    if origin is tuple and args[-1:] == (Ellipsis,):
        return lambda data: tuple(map(_reader(args[0]), _typed(data, list)))
    if origin is tuple:
        return lambda data: _pair(data, args)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not type(None))
        return lambda data: None if data is None else _reader(inner)(data)
    if origin is typing.Literal:
        return lambda data: _one_of(data, args)
    if kind is bytes:
        return _bytes
    if kind is StateBlock:
        return lambda data: _typed(data, type(None))
    if kind is float:
        return lambda data: _typed(data, float, int)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if hasattr(kind, "_fields"):
        return _tuple_reader(kind)
    return lambda data: _typed(data, kind)


def _dataclass_reader(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)

    def read(data: Any) -> Any:
        fields = _typed(data, dict)
        unknown = fields.keys() - hints.keys()
        if unknown:
            raise Malformed(f"{kind.__name__} has no field {sorted(unknown)}")
        return _made(kind, (), {name: _reader(hints[name])(at) for name, at in fields.items()})

    return read


def _tuple_reader(kind: Any) -> Callable[[Any], Any]:
    hints = list(typing.get_type_hints(kind).values())

    def read(data: Any) -> Any:
        if len(_typed(data, list)) > len(hints):
            raise Malformed(f"{kind.__name__} has {len(hints)} fields, not {len(data)}")
        return _made(kind, [_reader(hint)(at) for hint, at in zip(hints, data, strict=False)], {})

    return read


def _made(kind: Any, args: Sequence[Any], fields: dict[str, Any]) -> Any:
    try:
        return kind(*args, **fields)
    except TypeError as error:
        raise Malformed(str(error)) from error


def _typed(data: Any, *kinds: type) -> Any:
    if type(data) not in kinds:
        raise Malformed(f"{data!r} is not {kinds[0].__name__}")
    return data


def _ints(data: Any) -> tuple[int, ...]:
    """Prompts are long, so that their types are looked at all at once."""
    if not set(map(type, _typed(data, list))) <= {int}:
        raise Malformed("not a list of integers")
    return tuple(data)


def _pair(data: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(_typed(data, list)) != len(kinds):
        raise Malformed(f"{data!r} has not {len(kinds)} elements")
    return tuple(_reader(kind)(at) for kind, at in zip(kinds, data, strict=True))


def _one_of(data: Any, choices: tuple[Any, ...]) -> Any:
    if data not in choices:
        raise Malformed(f"{data!r} is none of {choices}")
    return data


def _bytes(data: Any) -> bytes:
    try:
        return bytes.fromhex(_typed(data, str))
    except ValueError as error:
        raise Malformed(str(error)) from error


def row_sum(*columns: str | int | None, data: bytes = b"") -> int:
    """Of ``columns``, and of ``data`` after them."""
    return crc32(data, crc32(orjson.dumps(columns)))


def is_altered(stored: int | None, *columns: str | int | None, data: bytes = b"") -> bool:
    """Whether a row is not as it was written with the sum ``stored``."""
    return stored != row_sum(*columns, data=data)


def sealed(text: str) -> str:
    """``text`` after its own checksum."""
    return f"{crc32(text.encode()):08x}{text}"


def unsealed(text: str) -> str | None:
    """What `sealed` was given; None where it was altered."""
    return text[8:] if sealed(text[8:]) == text else None
