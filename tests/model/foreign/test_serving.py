"""The engine takes a folder of another project as it takes one of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.tokenizer import Tokenizer
from server.engine.engine import EngineConfig
from server.models.backend import open_backend
from tests.model.foreign.test_flash_linear_attention import FAMILIES, Theirs, tokens
from tests.tiny import request, solo, tokens_of


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_their_own_forward_pass(
    family: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    theirs = Theirs(family, {})
    checkpoint = load_checkpoint(theirs.save(tmp_path / "theirs", tokenizer))
    engine = open_backend(checkpoint, "torch", "float32").engine(
        2, EngineConfig(new_id=lambda: "session")
    )
    prompt = tokens(20, batch=1)[0].tolist()
    events = solo(engine, request(tokens=prompt, max_tokens=6, temperature=0.0, start=False))
    ids, wanted = list(prompt), []
    for _ in range(6):
        wanted.append(int(theirs.logits(torch.tensor([ids]))[0, -1].argmax()))
        ids.append(wanted[-1])
    assert tokens_of(events) == wanted
