"""The chat template of a checkpoint: its own, its family's, or the plain one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from model.architectures import ARCHITECTURES
from model.architectures.config import Config
from model.chat import ChatTemplate
from model.tokenizer import Tokenizer

#: From a checkpoint's tokenizer and its own template, if it has one, to a family's; None where
#: the family has not trained the checkpoint on turns.
FamilyChat = Callable[[Tokenizer, ChatTemplate | None], ChatTemplate | None]


def chat_of(config: Config, tokenizer: Tokenizer, found: ChatTemplate | None) -> ChatTemplate:
    """The template to serve, where ``found`` is that of the checkpoint's files."""
    if (place := ARCHITECTURES[config.model_type].chat) is not None:
        module, name = place
        family: FamilyChat = getattr(import_module(module), name)
        if (described := family(tokenizer, found)) is not None:
            return described
    return found or plain_chat(config, tokenizer)


def plain_chat(config: Config, tokenizer: Tokenizer) -> ChatTemplate:
    """The template for a checkpoint without one: texts begin with the model's start token."""
    starts = [n for id, n in tokenizer.special_names.items() if id == config.bos_token_id]
    return ChatTemplate(special_tokens={"bos_token": starts[0]} if starts else {})
