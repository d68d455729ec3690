"""A small World vocabulary in every form that is published: text, WordPiece and RwkvTrie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model.tokenization.world import FILE, WorldCodec

END = "<|endoftext|>"
WORDS = ("\n\n", "User", ":", " the", " then", "Ã©", "é", "éa", "你", "你好", "\ue000")
#: Every byte, words that begin with one another, and one that is not UTF-8.
TOKENS = {id: bytes([id - 1]) for id in range(1, 257)}
TOKENS |= {257 + n: w.encode() for n, w in enumerate(w for w in WORDS if len(w.encode()) > 1)}
TOKENS[275] = b"\xe4\xbd"


def write_txt(folder: Path) -> None:
    """As the RWKV project writes it, with the line ends of the pip package."""
    content = WorldCodec(TOKENS.items()).content().replace("\n", "\r\n")
    (folder / FILE).write_text(content, encoding="utf-8", newline="")


def word_piece(vocab_size: int) -> dict[str, Any]:
    """What aabbdev/rwkv-publisher writes: unused ids have tokens that no text has."""
    names = {END: 0} | {_characters(token): id for id, token in TOKENS.items()}
    free = (id for id in range(vocab_size) if id not in TOKENS and id)
    names |= {f"\ue000{id}\ue001": id for id in free}
    model = models.WordPiece(
        vocab=names,
        unk_token=END,
        max_input_chars_per_word=(1 << 31) - 1,
        continuing_subword_prefix="",
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    values: dict[str, Any] = json.loads(backend.to_str())
    return values


def rwkv_trie() -> dict[str, Any]:
    """What transformers-rwkv writes with its own library of tokenizers."""
    names = {END: 0} | {_characters(token): id for id, token in TOKENS.items()}
    special = {"id": END, "ids": [0], "tokens": [END]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": END, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {END: special},
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "RwkvTrie", "vocab": names},
    }


def _characters(token: bytes) -> str:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, the others from U+0100 up."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return "".join(chr(b if b in shown else 0x100 + hidden.index(b)) for b in token)
