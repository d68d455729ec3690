from __future__ import annotations

import json
from pathlib import Path

import torch

from model.convert.linearize.__main__ import talk
from model.convert.linearize.chats import CHAT_ML, FOLLOW_UPS, PLAIN, QUESTIONS, TOPICS, encode
from model.convert.linearize.plan import window_plan
from model.convert.linearize.student import Student
from tests.model.convert.linearize.tiny import SHAPE, tiny_llama, tiny_tokenizer

CHATS = [["How are you?", "Why?"], ["What?"]]
FIXED = Path(__file__).parents[4] / "benchmarks" / "studies" / "chats" / "questions.json"


def test_answers_are_the_most_likely_tokens_of_the_whole_text() -> None:
    source, tokenizer = tiny_llama(), tiny_tokenizer()
    student = Student(source, window_plan(SHAPE.num_layers, 2000), {})
    found = talk(student, tokenizer, CHAT_ML, CHATS, 12, torch.float32)
    assert [len(answers) for answers in found] == [2, 1]
    ids = encode(tokenizer, CHAT_ML.turn("user", "What?") + CHAT_ML.assistant)
    assert ids[0] == tokenizer.special_ids["<|im_start|>"]
    begin = len(ids)
    for _ in range(12):
        logits = source.hidden(torch.tensor([ids]))[0, -1] @ source.embedding.t()
        if (drawn := int(logits.argmax())) == tokenizer.special_ids["<|im_end|>"]:
            break
        ids.append(drawn)
    assert found[1] == [tokenizer.decode(ids[begin:])]


def test_fixed_chats_are_fifty_of_several_turns_that_training_never_asks() -> None:
    fixed = json.loads(FIXED.read_text(encoding="utf-8"))
    assert len(fixed) == 50
    assert all(3 <= len(chat) <= 4 for chat in fixed)
    asked = {message for chat in fixed for message in chat}
    topics = [(topic, other) for topic in TOPICS for other in TOPICS[:1]]
    templates = (*QUESTIONS, *FOLLOW_UPS)
    made = {text.format(*pair) for text in templates for pair in topics}
    assert not asked & (made | set(PLAIN))
