"""A moment without memory at the first text breaks no later one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.reliability.servers import ROOT
from tests.tiny import write_model

#: In a process of its own: the limit is the whole process's.
CODE = """
import resource, sys
from server.models.build import build_models
from server.config import ServerConfig
from server.config import model_source

source = model_source(sys.argv[1])
config = ServerConfig(model=(source,), store="memory", threads=1, speculation="off")
models, _ = build_models(config)
tokenizer = models.default.tokenizer
with open("/proc/self/statm") as statm:
    mapped = int(statm.read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 20), hard))
try:
    tokenizer.encode("Once upon a time")
except BaseException as error:
    print(type(error), file=sys.stderr)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(tokenizer.decode(tokenizer.encode("Once upon a time")))
"""


def test_text_is_tokenised_after_a_moment_without_memory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-c", CODE, str(model)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout) == (0, "Once upon a time\n"), run.stderr
