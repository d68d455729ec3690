"""Chats with a student, most likely token by most likely token, to compare it with its source."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from model.convert.linearize.chats import ChatFormat, encode
from model.convert.linearize.student import Student, empty_state, step
from model.tokenizer import Tokenizer

#: Tokens of an answer.
MAX_ANSWER = 200


@dataclass
class _Chat:
    """One chat: ``feed`` are tokens still to be read, ``answer`` those of the answer so far."""

    questions: list[str]
    feed: list[int]
    answer: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def talk(
    student: Student,
    tokenizer: Tokenizer,
    form: ChatFormat,
    chats: list[list[str]],
    max_answer: int = MAX_ANSWER,
    dtype: torch.dtype = torch.float16,
) -> list[list[str]]:
    """The answers to each question of each chat, in the order of the questions.

    ``dtype`` is that of keys and values. All chats are rows of one batch.
    """
    end = tokenizer.special_ids[form.end]
    begin = [form.system + form.turn("user", chat[0]) + form.assistant for chat in chats]
    rows = [_Chat(chat, encode(tokenizer, text)) for chat, text in zip(chats, begin, strict=True)]
    state = empty_state(student, len(rows), dtype)
    head = student.source.head
    while any(row.feed for row in rows):
        # A chat that is over reads something, which nothing depends on.
        ids = torch.tensor([row.feed.pop(0) if row.feed else end for row in rows])
        drawn = (step(student, state, ids.to(head.device)) @ head.t()).argmax(dim=-1).tolist()
        for row, id in zip(rows, drawn, strict=True):
            if row.feed or len(row.answers) == len(row.questions):
                continue
            if id != end and len(row.answer) < max_answer:
                row.answer.append(id)
                row.feed = [id]
                continue
            row.answers.append(row.answer)
            row.answer = []
            if len(row.answers) < len(row.questions):
                following = form.turn("user", row.questions[len(row.answers)])
                text = form.end + form.after_end + following + form.assistant
                row.feed = encode(tokenizer, text)
    return [[tokenizer.decode(answer) for answer in row.answers] for row in rows]
