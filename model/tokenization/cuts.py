"""How byte-level tokenizers cut a text into words, by the names that GGUF has for it.

The patterns are those of the published ``tokenizer.json``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """``pattern`` matches a word; without one it is GPT-2's.

    ``whole_words``: a word that is a token becomes it without merges. ``composed``: a text is
    normalised to NFC. ``falcon``: runs of punctuation are words, and so are runs of digits, three
    at a time. ``single_digits``: each digit is a word, before anything else is cut.
    """

    pattern: str = ""
    whole_words: bool = False
    composed: bool = False
    falcon: bool = False
    single_digits: bool = False

    def apply(self, backend: Backend) -> None:
        """Sets what comes before the merges."""
        if self.composed:
            backend.normalizer = normalizers.NFC()
        if self.falcon:
            backend.pre_tokenizer = pre_tokenizers.Sequence(_falcon())
            return
        if not self.pattern:
            of_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
            digits = pre_tokenizers.Digits(individual_digits=True)
            both = pre_tokenizers.Sequence([digits, of_gpt2])
            backend.pre_tokenizer = both if self.single_digits else of_gpt2
            return
        words = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])


def _falcon() -> list[pre_tokenizers.PreTokenizer]:
    """The steps of Falcon's file: the digits are cut out after the bytes became characters."""
    return [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]


def _pattern(letters: str, digits: str) -> str:
    """Words of ``letters``, which may have one other character in front, and ``digits``."""
    others = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return f"{_CONTRACTIONS}|{word}|{digits}|{others}|{_SPACES}"


def _tekken() -> str:
    """Words begin at a capital after small letters; each digit is a word."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}[{upper}]*[{lower}]+|{first}[{upper}]+[{lower}]*"
    return rf"{words}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


#: ``tokenizer.ggml.pre`` -> how to cut.
CUTS = {
    "gpt-2": Cut(),
    **dict.fromkeys(("mpt", "olmo"), Cut(composed=True)),  # of GPT-NeoX-20B, under either name
    "qwen2": Cut(_pattern(r"\p{L}", r"\p{N}"), composed=True),
    "qwen35": Cut(_pattern(r"\p{L}\p{M}", r"\p{N}"), composed=True),
    "falcon": Cut(falcon=True),
    "smollm": Cut(single_digits=True),
    "llama-bpe": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}"), whole_words=True),
    # As llama.cpp cuts Falcon-H1's texts.
    "falcon-h1": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}"), whole_words=True),
    # Of Mistral's vocabularies, which Nemotron-H has, under the name of one of them.
    **dict.fromkeys(("tekken", "pixtral"), Cut(_tekken(), whole_words=True)),
    "dbrx": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}")),  # of GPT-4, as Granite 4.0 has it
    "lfm2": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}"), whole_words=True),
}
