"""Each tenant has a memory of its own for texts, and only the last ones do."""

from __future__ import annotations

from unittest.mock import patch

from model.bundled_models import DEFAULT_MODEL
from model.tokenization import library
from model.tokenization.base import Encoded
from model.tokenizer import Tokenizer
from server.models.service import MAX_TENANTS, TenantTokenizers

TEXT = "Once upon a time there was a lion. " * 40


def test_no_tenant_is_answered_from_what_another_one_sent() -> None:
    tokenizers = TenantTokenizers(Tokenizer.load(DEFAULT_MODEL / "tokenizer.json"))
    encoded = list[int]()
    settled = library.LibraryCodec.settled

    def counted(codec: library.LibraryCodec, text: str) -> Encoded:
        encoded.append(len(text))
        return settled(codec, text)

    with patch.object(library.LibraryCodec, "settled", counted):
        ids = [tokenizers.of(owner).encode(TEXT) for owner in ("a", "b", "a", "b")]
        assert encoded == [len(TEXT)] * 2
        tokenizers.of("a").encode(TEXT + TEXT)
        assert encoded[2] < len(TEXT) + 100
    assert all(one == ids[0] for one in ids)


def test_only_the_last_tenants_are_remembered() -> None:
    tokenizers = TenantTokenizers(Tokenizer.load(DEFAULT_MODEL / "tokenizer.json"))
    first, second = tokenizers.of("first"), tokenizers.of("second")
    for index in range(MAX_TENANTS - 2):
        tokenizers.of(f"another {index}")
    assert tokenizers.of("first") is first
    tokenizers.of("one more")
    assert tokenizers.of("first") is first
    assert tokenizers.of("second") is not second
