"""How a chat is written: by ChatML (SmolLM2, Qwen) or in the format of Llama 3.

A chat template is code, which only the server runs; here its text tells which of the two it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from model.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """The texts around messages. ``system`` is all that comes before the first one."""

    system: str
    user: str
    assistant: str
    #: The special token that ends a message, and what follows it.
    end: str
    after_end: str

    def turn(self, role: str, text: str) -> str:
        """One whole message of ``user`` or ``assistant``."""
        return f"{getattr(self, role)}{text}{self.end}{self.after_end}"


CHAT_ML = ChatFormat("", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "\n")
_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3 = ChatFormat(
    "<|begin_of_text|>", _LLAMA3.format("user"), _LLAMA3.format("assistant"), "<|eot_id|>", ""
)
#: The system message of a ChatML template where a chat has none.
_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'\"<{}]+)<\|im_end\|>")


def chat_format(template: str, tokenizer: Tokenizer) -> ChatFormat | None:
    """That of a template's text; None for one in another format."""
    for known in (CHAT_ML, LLAMA3):
        start = known.user.partition("user")[0]
        if start in template and known.end in tokenizer.special_ids:
            break
    else:
        return None
    if known is LLAMA3 or (system := _SYSTEM.search(template)) is None:
        return known
    message = f"<|im_start|>system\n{system[1]}<|im_end|>\n"
    return ChatFormat(message, known.user, known.assistant, known.end, known.after_end)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text of such a format, of which the names of special tokens are these tokens."""
    return tokenizer.encode(text, allow_special=True)
