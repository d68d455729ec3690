"""Tokenizers that remember, one for each tenant: what one sends makes no other one faster."""

from __future__ import annotations

from collections import OrderedDict

from model.tokenizer import Tokenizer

#: Of those that sent texts last; each may keep `model.tokenization.known.MAX_BYTES`.
MAX_TENANTS = 8


class TenantTokenizers:
    """Belongs to the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: The one that was used last comes last.
        self._by_owner = OrderedDict[str, Tokenizer]()

    def of(self, owner: str) -> Tokenizer:
        """That of ``owner``."""
        if owner not in self._by_owner:
            self._by_owner[owner] = self._tokenizer.remembering()
            if len(self._by_owner) > MAX_TENANTS:
                self._by_owner.popitem(last=False)
        self._by_owner.move_to_end(owner)
        return self._by_owner[owner]
