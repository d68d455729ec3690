"""RWKV's vocabulary in a ``tokenizer.json``, as two of its publishers write it.

Both write each token in GPT-2's printable stand-ins for its bytes. A WordPiece without a prefix
takes the longest token at each place, as the trie does, but its time grows with the cube of the
text; `RwkvTrie` is a model that the usual library does not have. So both are read into the trie.
Ids that are not used have tokens of two private characters, which have no bytes. A
post-processor that puts id 0 in front of a text is what every session does anyway.
"""

from __future__ import annotations

import re
from typing import Any

from model.tokenization.base import TokenizerError
from model.tokenization.kinds import Kind, bytes_of
from model.tokenization.library import check_bounds, parsed

_UNUSED = re.compile("\ue000[0-9]+\ue001")
_MODELS = ("WordPiece", "RwkvTrie")
_BYTE_LEVEL = Kind(fallback=False)


def world_tokens(text: str) -> dict[int, bytes] | None:
    """The bytes of each id but 0; None for another tokenizer. Raises `TokenizerError`."""
    if not any(f'"{name}"' in text for name in _MODELS):  # spares the others a second reading
        return None
    values = parsed(text)
    if not _is_world(values):
        return None
    check_bounds(values)
    added = values.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError("added_tokens is not a list of objects")
    for token in added:
        if token.get("id") != 0:
            raise TokenizerError(f"added token {token.get('content')!r:.80} is not supported")
    names: dict[str, int] = values["model"]["vocab"]
    if not all(type(id) is int for id in names.values()):
        raise TokenizerError("model.vocab has an id that is not an integer")
    return {
        id: bytes_of(_BYTE_LEVEL, name)
        for name, id in names.items()
        if id != 0 and not _UNUSED.fullmatch(name)
    }


def _is_world(values: dict[str, Any]) -> bool:
    model = values["model"]
    if model.get("type") == "RwkvTrie":
        return isinstance(model.get("vocab"), dict)
    cut = values.get("pre_tokenizer")
    if not isinstance(cut, dict) or not isinstance(model.get("vocab"), dict):
        return False
    return (
        model.get("continuing_subword_prefix") == ""
        and values.get("normalizer") is None
        and cut.get("type") == "ByteLevel"
        and cut.get("use_regex") is False
        and cut.get("add_prefix_space") is False
    )
