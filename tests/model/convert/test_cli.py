from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from model.checkpoint import load_checkpoint
from model.state import StateLayout
from model.tokenizer import Tokenizer
from tests.model.commands import everstream, refused

ROOT = Path(__file__).parents[3]
RUN = "--match-steps 2 --steps 2 --batch-size 2 --window 32 --threads 1 --device cpu"


def convert(source: Path, to: str, corpus: Path, out: Path, *more: str) -> list[object]:
    texts = ["--data", corpus, "--valid", corpus, "--out", out]
    return ["convert", "--from", source, "--to", to, *texts, *RUN.split(), *more]


def test_gpt2_folder_becomes_a_model_with_a_constant_state(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.vocab_size, **sizes, **ids))
    theirs.save_pretrained(tmp_path / "gpt2")
    tokenizer.save(tmp_path / "gpt2" / "tokenizer.json")
    out = tmp_path / "run"
    said = everstream(*convert(tmp_path / "gpt2", "performer", corpus, out))
    for line in ("the model before", "after the bare swap", "after matching", "after fine-tuning"):
        assert line in said
    config = load_checkpoint(out / "model").config
    assert (config.norm, config.mlp, config.max_position_embeddings) == ("layer", "gelu", 64)
    assert config.attention_options == {"rotary": "none"}
    assert StateLayout.of(config).num_bytes > 0
    report = json.loads((out / "report.json").read_text())
    assert report["original_attention"] == "softmax"
    assert report["source"] == "gpt2"


@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("softmax", [], "no constant state"),
        ("lstm", [], "'lstm' is unknown"),
        ("linformer", [], "linformer"),
        ("performer", ["--attention-options", '{"features": -1}'], "features"),
        ("performer", ["--attention-options", "{"], ""),
        ("performer", ["--attention-options", "[1]"], "attention_options must be an object"),
        ("gated", ["--attention-options", "null"], "attention_options must be an object"),
        ("performer", ["--match-steps", "-1"], "match_steps"),
        ("performer", ["--steps", "0"], "num_steps"),
        ("performer", ["--from", "nowhere"], "nowhere: there is no such folder"),
    ],
)
def test_mistake_is_one_line_and_status_2(
    trained: Path, corpus: Path, tmp_path: Path, to: str, more: list[str], message: str
) -> None:
    assert message in refused(*convert(trained, to, corpus, tmp_path / "run", *more))


@pytest.mark.process
def test_help_does_not_import_torch() -> None:
    code = "import sys, model.convert.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
