"""What a client may call things: every name that ends in a store or a log is text without controls.

PostgreSQL stores no NUL in a text, and a line break in a name would begin a line of a log.
Lone surrogates are not Unicode text: the JSON parser refuses them before this.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from server.engine.prefix import MAX_HANDLE_CHARS

#: C0, DEL, C1 and surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: The same for those who read our documents; a surrogate cannot be written in them.
PATTERN = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"

MAX_EPOCH_CHARS = 64
STATE_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

REFUSAL = "must not have control characters"


def has_control(text: str) -> bool:
    """Whether ``text`` cannot be a name, nor a part of a path."""
    return _CONTROL.search(text) is not None


def _checked(text: str) -> str:
    if has_control(text):
        raise PydanticCustomError("control_characters", REFUSAL)
    return text


_NO_CONTROLS = AfterValidator(_checked)
_SHOWN = Field(json_schema_extra={"pattern": PATTERN})

RequestId = Annotated[str, StringConstraints(min_length=1, max_length=64), _NO_CONTROLS, _SHOWN]
SessionId = Annotated[str, StringConstraints(min_length=1, max_length=64), _NO_CONTROLS, _SHOWN]
Epoch = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_EPOCH_CHARS), _NO_CONTROLS, _SHOWN
]
IdempotencyKey = Annotated[
    str, StringConstraints(min_length=1, max_length=128), _NO_CONTROLS, _SHOWN
]
#: Of a response, an item of one, or a call.
ItemId = Annotated[str, StringConstraints(min_length=1, max_length=128), _NO_CONTROLS, _SHOWN]
#: Of a prompt that was read: see `server.engine.prefix`.
PrefixName = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_HANDLE_CHARS), _NO_CONTROLS, _SHOWN
]
#: Of a named state: it is the name of a file, too.
StateName = Annotated[str, StringConstraints(pattern=f"^{STATE_NAME}$")]
ModelName = Annotated[str, StringConstraints(max_length=256), _NO_CONTROLS, _SHOWN]
#: A client's own word for something, which means nothing here.
Label = Annotated[str, StringConstraints(max_length=256), _NO_CONTROLS, _SHOWN]
ModelPath = Annotated[str, StringConstraints(min_length=1, max_length=1024), _NO_CONTROLS, _SHOWN]
