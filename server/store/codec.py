"""Values and log entries as JSON and back: one codec for the log, snapshots and exports.

Fields travel by name, those of named tuples by place. What is missing takes its
default, so that an older log can be read by a newer program; an unknown field,
or a value of another type, is refused. States travel apart.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple
from zlib import crc32

import orjson

from server.engine.session import (
    Accepted,
    Deleted,
    Entry,
    Opened,
    Rewound,
    Saved,
    SessionValue,
    StateBlock,
)
from server.engine.text import TokenArray
from server.engine.types import Finished, TokenEvent

T = typing.TypeVar("T")


class Malformed(ValueError):
    """Data that this codec has not written, or cannot write."""


#: What has no form that a database takes: text with a lone surrogate, a number beyond 64 bits.
UNSTORABLE = (Malformed, UnicodeError, OverflowError)


def encode(value: object) -> bytes:
    """JSON of a dataclass, a named tuple, or a list of such; without states. Raises `Malformed`."""
    try:
        return orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY)
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
    try:
        return typing.cast("T", _read(_form(typing.cast("Any", kind)), data))
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(str(error)) from error


def decode_value(data: bytes | str) -> SessionValue:
    """A value without its state. Raises `Malformed`."""
    return build(SessionValue, decode_json(data))


#: What an entry's list begins with; tokens, the many, are lists of their fields alone.
_KINDS = (Accepted, TokenEvent, Finished, Rewound, Opened, Saved, Deleted)
_TAGS = {kind: kind.__name__.lower() for kind in _KINDS}
_BY_TAG = {tag: kind for kind, tag in _TAGS.items()}


def pack_entry(entry: Entry, running: str | None) -> Sequence[object]:
    """``entry`` for `encode`.

    A token does without its request's id where that is ``running``; most have no probabilities
    and no thought.
    """
    if type(entry) is not TokenEvent:
        return _TAGS[type(entry)], (entry if isinstance(entry, Finished) else tuple(entry))
    end = 8 if entry[7] is not None else 5 if entry[5] is None else 7
    return entry[1:end] if entry[0] == running else (_TAGS[TokenEvent], entry[:end])


def unpack_entry(data: Any, running: str | None) -> Entry:
    """The entry that `pack_entry` was given. Raises `Malformed`."""
    if not isinstance(data, list):
        raise Malformed(f"an entry must be a list: {data!r}")
    if len(data) == 4:
        return TokenEvent(running or "", *data)
    if len(data) != 2:
        return build(TokenEvent, [running or "", *data])
    tag, fields = data
    if tag not in _BY_TAG:
        raise Malformed(f"no entry is called {tag!r}")
    return typing.cast("Entry", build(_BY_TAG[tag], fields))


def pack_entries(entries: Sequence[Entry], running: str | None) -> bytes:
    """``entries`` as they follow each other, ``running`` being the request before them."""
    packed: list[object] = []
    for entry in entries:
        packed.append(pack_entry(entry, running))
        if type(entry) is not TokenEvent or entry.request_id != running:
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


def _plain(value: object) -> object:
    """What orjson does not know by itself."""
    if isinstance(value, tuple):
        return tuple(value)
    if isinstance(value, TokenArray):
        return value.numbers
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, StateBlock):
        return None
    raise TypeError(f"no JSON for {type(value)}")


class _Form(NamedTuple):
    """How a type is written: as JSON of the ``types``, with forms of its ``parts``."""

    how: Literal["as it is", "hex", "choice", "integers", "list", "pair", "places", "names"]
    types: tuple[type, ...]
    kind: Any = None
    parts: Any = None


@cache
def _form(kind: Any) -> _Form:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not type(None))
        form = _form(inner)
        return form._replace(types=(*form.types, type(None)))
    if origin is Literal:
        return _Form("choice", tuple(map(type, args)), parts=args)
    if kind in (tuple[int, ...], Sequence[int]):
        return _Form("integers", (list,), TokenArray if kind == Sequence[int] else tuple)
    if origin is tuple and args[-1:] == (Ellipsis,):
        return _Form("list", (list,), parts=_form(args[0]))
    if origin is tuple:
        return _Form("pair", (list,), kind, tuple(map(_form, args)))
    if kind is StateBlock:  # it travels apart
        return _Form("as it is", (type(None),))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return _Form("names", (dict,), kind, {name: _form(each) for name, each in hints.items()})
    if hasattr(kind, "_fields"):
        return _Form("places", (list,), kind, [*map(_form, typing.get_type_hints(kind).values())])
    if kind is bytes:
        return _Form("hex", (str,))
    return _Form("as it is", (float, int) if kind is float else (kind,))


def _read(form: _Form, data: Any) -> Any:
    """Raises `Malformed`, and `TypeError` and `ValueError` of what makes the value."""
    how, expected, kind, parts = form
    if type(data) not in expected:
        raise Malformed(f"{data!r} is not {expected[0].__name__}")
    if data is None or how == "as it is":
        return data
    if how == "list":
        return tuple([_read(parts, each) for each in data])
    if how == "pair" and len(data) == len(parts):
        return tuple(map(_read, parts, data))
    if how == "integers" and set(map(type, data)) <= {int}:  # prompts are long: all at once
        return kind(data)
    if how == "places" and len(data) <= len(parts):
        return kind(*map(_read, parts, data))
    if how == "names" and data.keys() <= parts.keys():
        return kind(**{name: _read(parts[name], each) for name, each in data.items()})
    if how == "choice" and data in parts:
        return data
    if how == "hex":
        return bytes.fromhex(data)
    raise Malformed(f"{data!r} is no {getattr(kind, '__name__', how)}")


def row_sum(*columns: str | int | None, data: bytes = b"") -> int:
    """Of ``columns``, and of ``data`` after them."""
    return crc32(data, crc32(orjson.dumps(columns)))


def sealed(text: str) -> str:
    """``text`` after its own checksum."""
    return f"{crc32(text.encode()):08x}{text}"


def unsealed(text: str) -> str | None:
    """What `sealed` was given; None where it was altered."""
    return text[8:] if sealed(text[8:]) == text else None
