"""What is kept of a response apart from its session: what was asked for, to be told again.

It lies in the store with the request itself, under the response's id, in the one
transaction that begins the work. What the model has written is in the session's
log, and nowhere else.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from model.chat.call_forms import TAGGED
from server.models.large_answers import ID_BYTES, LOGPROB_BYTES, TOKEN_BYTES

Json = dict[str, Any]

ID_PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class Note:
    """``fields`` are those of the response object that never change, ``items`` its input.

    ``tools`` are those that the model was told of, as its template reads them.
    ``may_call``: its text may be calls of theirs. ``logprobs``: those of the output
    are shown. ``apart``: its prompt ends with markers of thinking, which no later one has.
    ``state`` is the named state that its conversation begins with, ``call_form`` the name of the
    form of its calls. ``prompt_ids`` are the tokens that it reads, where they and those of the
    output are shown. ``must_call``: its template was told that the answer must be a call.
    """

    id: str
    fields: Json = field(repr=False)
    items: list[Json] = field(repr=False)
    tools: list[Json] = field(default_factory=list, repr=False)
    may_call: bool = False
    logprobs: bool = False
    apart: bool = False
    state: str | None = None
    call_form: str = TAGGED.name
    prompt_ids: Sequence[int] | None = field(default=None, repr=False)
    must_call: bool = False

    def packed(self) -> str:
        """For `unpacked`."""
        return orjson.dumps(self, list).decode()  # of the ids

    @classmethod
    def unpacked(cls, text: str) -> Note:
        """The note that `packed` has written."""
        return cls(**orjson.loads(text))

    @property
    def num_bytes(self) -> int:
        """What the response may take, by what was asked for."""
        num_entries = 1 + (self.fields.get("top_logprobs") or 0) if self.logprobs else 0
        per_id = 0 if self.prompt_ids is None else ID_BYTES
        per_token = TOKEN_BYTES + num_entries * LOGPROB_BYTES + per_id
        of_prompt = len(self.prompt_ids or ()) * per_id
        return of_prompt + (self.fields.get("max_output_tokens") or 0) * per_token

    def item_id(self, kind: str, index: int) -> str:
        """The name of an item of its output, the same whenever it is read."""
        return f"{kind}_{self.id.removeprefix(ID_PREFIX)}_{index}"


def new_id() -> str:
    """Of a response: unguessable."""
    return ID_PREFIX + secrets.token_hex(24)


def id_under_key(store: str, owner: str, key: str) -> str:
    """The id of what ``owner`` asks for under its own ``key``, so that it is found again."""
    named = f"{store}\0{owner}\0{key}"
    return ID_PREFIX + hashlib.sha256(named.encode()).hexdigest()[:48]
