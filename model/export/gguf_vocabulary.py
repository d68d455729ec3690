"""A tokenizer as GGUF has it: the reverse of `model.tokenization.gguf`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import models

from model.chat.template import PLAIN
from model.checkpoint import GGUF_TEMPLATE, Checkpoint
from model.export.gguf_tensors import add_values
from model.foreign.gguf_source import BOS, EOS
from model.tokenization import world
from model.tokenization.base import TokenizerError
from model.tokenization.cuts import CUTS
from model.tokenization.gguf import CONTROL, NORMAL, UNUSED, USER_DEFINED, escaped, read_gguf_codec
from model.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
#: Ends a turn in llama.cpp's chat, where it is a token of its own.
_END_OF_TURN = b"\n\n"


def add_vocabulary(writer: GGUFWriter, checkpoint: Checkpoint) -> None:
    """Adds the tokenizer, the ids that begin and end a text, and the chat template.

    Raises `TokenizerError`.
    """
    config, template = checkpoint.config, checkpoint.chat_template.source
    values = vocabulary(checkpoint.tokenizer, config.vocab_size)
    values |= {BOS: config.bos_token_id, EOS: config.eos_token_id}
    if template != PLAIN:
        values[GGUF_TEMPLATE] = template
    add_values(writer, values)


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata ``tokenizer.ggml.*`` of a model with ``vocab_size`` ids, padded to it.

    Raises `TokenizerError` for a tokenizer that would not be the same when it is read.
    """
    is_world = tokenizer.file_name == world.FILE
    values = _world(tokenizer, vocab_size) if is_world else _byte_level(tokenizer, vocab_size)
    values = {_PREFIX + name: value for name, value in values.items()}
    arrays = {key: value for key, value in values.items() if isinstance(value, list)}
    types = _PREFIX + "token_type"
    try:
        read = read_gguf_codec(
            values | {_PREFIX + "eos_token_id": tokenizer.eos_token_id},
            arrays | {types: np.array(values[types])},
            vocab_size,
        )
    except TokenizerError as error:
        raise TokenizerError(f"GGUF cannot hold the tokenizer: {error}") from error
    if read is None or read.content() != tokenizer.content:
        raise TokenizerError(
            "GGUF cannot hold the tokenizer: only RWKV's vocabulary, and byte-level BPE that cuts"
            f" texts as {', '.join(CUTS)} and changes nothing else"
        )
    return values


def _world(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    tokens += [b""] * (size - len(tokens))
    names = [escaped(token) or b"[PAD%d]" % id for id, token in enumerate(tokens)]
    types = [NORMAL if token else UNUSED for token in tokens]
    values: dict[str, Any] = {
        "model": "rwkv",
        "tokens": [b"<s>", *names[1:]],
        "token_type": [CONTROL, *types[1:]],
    }
    if _END_OF_TURN in tokens:
        values["eot_token_id"] = tokens.index(_END_OF_TURN)
    return values


def _byte_level(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    values = json.loads(tokenizer.content)
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [UNUSED] * size
    for token, id in values["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in values["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = values["model"].get("merges", [])
    return {
        "model": "gpt2",
        "pre": _cut_of(values),
        "tokens": [token.encode() for token in tokens],
        "token_type": types,
        "merges": [(m if isinstance(m, str) else " ".join(m)).encode() for m in merges],
        "add_bos_token": False,
    }


def _cut_of(values: dict[str, Any]) -> str:
    """The name of the way in which a ``tokenizer.json`` cuts texts; GPT-2's where it has none."""
    for name, cut in CUTS.items():
        backend = Backend(models.BPE(ignore_merges=cut.whole_words))
        cut.apply(backend)
        made = json.loads(backend.to_str())
        is_same = all(made[part] == values[part] for part in ("normalizer", "pre_tokenizer"))
        whole_words = values["model"].get("ignore_merges", False)
        if is_same and made["model"]["ignore_merges"] == whole_words:
            return name
    return "gpt-2"
