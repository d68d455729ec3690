"""Small ``tokenizer.json`` of the kinds that published checkpoints have, learnt from a page."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from model.tokenization.base import Ends
from model.tokenization.library import LibraryCodec
from model.tokenizer import FILES, Tokenizer
from tests.tiny import TEXT

#: Texts of many scripts, characters outside of any vocabulary, and spaces of every kind.
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                *(
                    " ",
                    "  ",
                    "\n",
                    "\t",
                    "▁",
                    "a",
                    "the",
                    "Once",
                    " upon",
                    "…",
                    "é",
                    "e\u0301",
                    "\r\n",
                ),
                *(
                    "漢字",
                    "かな",
                    "한국어",
                    "العربية",
                    "עברית",
                    "देवनागरी",
                    "ไทย",
                    "Ελλάδα",
                    "Привет",
                ),
                *(
                    "🦊",
                    "👩‍👩‍👧",
                    "🇩🇪",
                    "<0x41>",
                    "<s>",
                    "</s>",
                    "\0",
                    "\ufeff",
                    "\u2028",
                    "ﬁ",
                    "Å",
                ),
            ]
        ),
        max_size=16,
    ).map("".join),
)


def load_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, which need not hold more."""
    return Tokenizer.load(next(folder / name for name in FILES if (folder / name).is_file()))


#: SentencePiece's messages of protobuf, which are made when they are imported.
schema: Any = import_module("transformers.utils.sentencepiece_model_pb2_new")

LLAMA_ENDS = Ends(ids=((2, "config.json"),))


def llama(style: str = "legacy", num_learnt: int = 150, **model: Any) -> str:
    """Llama's kind, as "legacy" files write the space in front, or Metaspace's scheme.

    "decoder" is legacy with a Metaspace decoder. ``num_learnt`` tokens follow the special ones
    and the bytes. ``model`` replaces fields of the model.
    """
    vocab, merges = _learnt(num_learnt)
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "decoder":
        steps[0] = decoders.Metaspace(prepend_scheme="always")
    elif style != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    if style in ("legacy", "decoder"):
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    values = json.loads(backend.to_str())
    values["model"].update(model)
    return json.dumps(values)


def sentencepiece_file() -> bytes:
    """`llama` as SentencePiece's own file: the later a token was learnt, the lower its score."""
    vocabulary = json.loads(llama())["model"]["vocab"]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    found = schema.ModelProto()
    for name, id in sorted(vocabulary.items(), key=lambda pair: pair[1]):
        kind = 6 if name.startswith("<0x") else kinds.get(name, 1)
        found.pieces.add(piece=name, score=-float(id), type=kind)
    found.trainer_spec.model_type = 2  # BPE
    found.trainer_spec.byte_fallback = True
    found.normalizer_spec.remove_extra_whitespaces = False
    data: bytes = found.SerializeToString()
    return data


def llama_tokenizer(style: str = "legacy") -> Tokenizer:
    """The tokenizer of `llama`, which ``</s>`` ends."""
    return Tokenizer(LibraryCodec(llama(style), LLAMA_ENDS))


def neox() -> str:
    """GPT-NeoX's kind: NFC, byte-level, runs of spaces as tokens that are added, not special."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens([AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    return str(backend.to_str())


@cache
def _learnt(num: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: <unk>, <s>, </s>, the 256 bytes, then what the page has."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        [TEXT, "▁▁▁▁ ▁▁"], trainers.BpeTrainer(vocab_size=num, show_progress=False)
    )
    learnt = json.loads(backend.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *sorted(learnt["vocab"], key=learnt["vocab"].get)]
    return {token: id for id, token in enumerate(tokens)}, [tuple(m) for m in learnt["merges"]]
