"""A SentencePiece vocabulary in GGUF (``tokenizer.ggml.model`` "llama") as a ``tokenizer.json``.

The file has the score of each token and no merges: of two neighbours whose join is a token, those
with the best score are joined first. So every way to cut a token into two others is a merge, in the
order of the scores. A character without a token is written in tokens of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from model.tokenization.base import TokenizerError
from model.tokenization.kinds import SPACE

#: Types of tokens, next to those of `model.tokenization.gguf`.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5


def sentencepiece(
    tokens: Sequence[bytes],
    types: Sequence[int],
    scores: npt.NDArray[np.float32],
    has_space_in_front: bool,
) -> str:
    """The ``tokenizer.json``; one of each for an id. Raises `TokenizerError`."""
    names = _names(tokens)
    ids = {name: id for id, name in enumerate(names) if types[id] != UNUSED}
    unknown = [name for name, id in ids.items() if types[id] == UNKNOWN]
    if not unknown:
        raise TokenizerError("tokenizer.ggml.token_type has no unknown token")
    pieces = {name: id for name, id in ids.items() if types[id] not in (UNKNOWN, CONTROL)}
    backend = Backend(
        models.BPE(
            ids,
            _merges(pieces, scores),
            unk_token=unknown[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space_in_front:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    for name, id in ids.items():
        if types[id] in (UNKNOWN, CONTROL, USER_DEFINED):
            special = types[id] != USER_DEFINED
            backend.add_tokens([AddedToken(name, normalized=False, special=special)])
    return str(backend.to_str())


def _names(tokens: Sequence[bytes]) -> list[str]:
    try:
        names = [token.decode() for token in tokens]
    except UnicodeDecodeError as error:
        raise TokenizerError("tokenizer.ggml.tokens are not UTF-8") from error
    if len(set(names)) < len(names):
        raise TokenizerError("two ids have the same token")
    return names


def _merges(ids: Mapping[str, int], scores: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """Best score first; of one token, by the ids of its parts."""
    found = [
        (-float(scores[id]), id, ids[left], ids[right], (left, right))
        for name, id in ids.items()
        for left, right in ((name[:at], name[at:]) for at in range(1, len(name)))
        if left in ids and right in ids
    ]
    return [pair for *_, pair in sorted(found)]
