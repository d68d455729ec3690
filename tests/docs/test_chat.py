"""The commands of docs/use/chat.md that need a model that thinks."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from model.tokenization.world import PADDED_SIZE
from tests.docs.blocks import shell_lines
from tests.docs.pages import DOCS
from tests.docs.test_shell import ADDRESS, ELSEWHERE
from tests.reliability.servers import ServerProcess
from tests.rwkv7 import SHAPES, published, write_pth

pytestmark = pytest.mark.process

LINES = [*shell_lines(DOCS / "use" / "chat.md")]


def test_model_thinks_when_it_is_asked_to(tmp_path: Path) -> None:
    """The published tokenizer belongs to a vocabulary of this size, and its turns to RWKV-7."""
    (serve,) = (line for line in LINES if line.startswith("everstream serve"))
    (ask,) = (line for line in LINES if any(words in line for words in ELSEWHERE))
    shape = replace(SHAPES["odd"], vocab_size=PADDED_SIZE)
    model = write_pth(tmp_path / "rwkv7.pth", published(shape))
    flags = [word.replace("rwkv7.pth", str(model)) for word in shlex.split(serve)[2:]]
    with ServerProcess(*flags) as server:
        command = ask.replace(ADDRESS, server.url).replace("curl ", "curl --silent --fail ")
        answer = subprocess.run(["bash", "-ec", command], check=True, stdout=subprocess.PIPE)
    answered = json.loads(answer.stdout)
    assert answered["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
