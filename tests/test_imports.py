"""What `everstream serve` imports before the first token; rules of import are `lint-imports`'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: What `everstream serve` imports on its way to the first token of the native runtime, or may.
ON_THE_NATIVE_WAY = (
    *("model.config", "model.attention", "model.state", "model.tokenizer", "model.weights"),
    *("model.checkpoint", "model.evaluation", "model.foreign.gpt2", "model.families.llama.read"),
    *("model.foreign.flash_linear_attention", "model.native.runtime"),
    *("model.architectures", "model.families.rwkv7.config", "model.families.rwkv7.read"),
    *("model.checkpoint_files", "model.weights.safetensors", "model.weights.torch_file"),
    *("model.weights.gguf_file", "model.tokenization.gguf"),
    "model.export.cli",
    *("model.families.rwkv7.read_arwkv", "model.families.mamba.read"),
    *("server.engine.engine", "server.engine.scheduler", "server.engine.runner"),
    *(
        "server.engine.tables",
        "server.engine.runner",
        "server.models.backend",
        "server.cli.main",
        "server.cli.serve",
        "server.cli.generate",
    ),
    *(
        "server.cli.inspect",
        "server.config",
        "server.http.server",
        "server.runtime.async_engine",
    ),
    *("server.observability.metrics", "server.api.app", "server.models.service"),
)
#: What none of them may import: slow, or not in every image.
NOT_ON_THE_NATIVE_WAY = (
    *("torch", "transformers", "huggingface_hub", "matplotlib", "httpx", "rich", "gguf"),
    *("clients", "server.cluster", "model.lm", "model.training", "model.convert"),
)


@pytest.mark.process
def test_native_way_imports_nothing_slow() -> None:
    """In a process of its own; the first module that brings one in is named."""
    code = f"""
import importlib, json, sys
brought = {{}}
for name in {ON_THE_NATIVE_WAY}:
    importlib.import_module(name)
    for slow in {NOT_ON_THE_NATIVE_WAY}:
        if slow in sys.modules:
            brought.setdefault(slow, name)
print(json.dumps(brought))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert json.loads(output) == {}
