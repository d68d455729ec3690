"""SmolLM2's chat format (ChatML), with the system message of its template where a chat has none."""

from __future__ import annotations

from model.tokenizer import Tokenizer


def turn(role: str, text: str) -> str:
    """One whole message."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


SYSTEM = turn("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
#: What an answer comes after.
ANSWER = "<|im_start|>assistant\n"
END = "<|im_end|>"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text of this format, of which the names of special tokens are these tokens."""
    return tokenizer.encode(text, allow_special=True)
