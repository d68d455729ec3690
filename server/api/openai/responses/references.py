"""Items that a request's input only names: of stored responses, found by their names.

The name of an item has that of its response in it, unless a client gave it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.api.openai.responses.items import Given
from server.api.openai.responses.note import ID_PREFIX, Json
from server.api.openai.responses.reading import ResponseNotFound
from server.api.openai.responses.schemas import ItemReference
from server.api.openai.responses.turns import FindTurn
from server.api.translate import renamed
from server.errors import InvalidRequest, invalid

#: Responses that one input may refer to: each is read from the store.
MAX_RESPONSES = 256

_NAME = re.compile(r"(?:msg|fc|fco|rs)_([0-9a-f]{48})_(?:in_)?[0-9]+")


def has_references(given: str | Sequence[Given]) -> bool:
    """Whether an input names items that are stored."""
    return bool(_references(given))


async def referred(find: FindTurn, given: str | Sequence[Given]) -> dict[str, Json]:
    """The items that ``given`` refers to, by their names. Raises `InvalidRequest`."""
    found: dict[str, Json] = {}
    read: dict[str, dict[str, Json]] = {}
    for index, item in _references(given):
        found[item.id] = await _item(find, item.id, f"input[{index}].id", read)
    return found


def _references(given: str | Sequence[Given]) -> list[tuple[int, ItemReference]]:
    """Those in an input, with their places; a text has none."""
    if isinstance(given, str):
        return []
    return [(index, item) for index, item in enumerate(given) if isinstance(item, ItemReference)]


async def _item(find: FindTurn, id: str, place: str, read: dict[str, dict[str, Json]]) -> Json:
    """The item ``id``; ``read`` are the responses that have been read for others."""
    named = _NAME.fullmatch(id)
    response = ID_PREFIX + named[1] if named else ""
    if named and response not in read:
        if len(read) == MAX_RESPONSES:
            raise invalid(place, f"the input refers to more than {MAX_RESPONSES} responses")
        read[response] = await _items(find, response, place)
    if id not in read.get(response, {}):
        raise invalid(place, f"item with id '{id}' not found in a stored response")
    return read[response][id]


async def _items(find: FindTurn, response: str, place: str) -> dict[str, Json]:
    """All items of a response, of its input and its output; empty if it is not found."""
    try:
        turn = await find(response)
    except ResponseNotFound:
        return {}
    except InvalidRequest as error:
        raise renamed(error, {error.param or "": place}) from None
    return {item["id"]: item for item in (*turn.note.items, *await turn.output())}
