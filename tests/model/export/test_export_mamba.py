"""Mamba models in GGUF and as folders of transformers: read back, and read by their makers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.export import writer_of
from model.families.mamba.config import MambaConfig
from model.native.runtime import Runtime
from tests.mamba import SHAPES, drawn
from tests.mamba_gguf import mamba_tensors
from tests.model.architectures.rwkv7_llama import run_llama
from tests.model.commands import everstream
from tests.tiny import TEXT, tiny_tokenizer

#: Of float32 log probabilities, in bits per token.
TOLERANCE = 1e-4
#: What GGUF calls a dtype of the command.
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


def checkpoint(name: str) -> Checkpoint:
    return Checkpoint(SHAPES[name], drawn(name), tiny_tokenizer(), name)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("name", ["head", "grouped", "first"])
def test_what_is_written_is_read_back_as_the_same(tmp_path: Path, name: str, kind: str) -> None:
    source = checkpoint(name)
    out = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    writer_of(source, kind)(out, source, "float32")
    found = load_checkpoint(out)
    assert found.config == source.config
    assert set(found.weights) == set(source.weights)
    for key, wanted in source.weights.items():
        # A is written in the place of its logarithm.
        error = 1e-6 if kind == "gguf" and key.endswith("A_log") else 0.0
        assert np.abs(np.asarray(found.weights[key]) - wanted).max() <= error, key
    assert found.tokenizer.digest == source.tokenizer.digest


@pytest.mark.parametrize("name", ["head", "grouped", "first", "falcon"])
def test_transformers_reads_the_folder_and_agrees(tmp_path: Path, name: str) -> None:
    source = checkpoint(name)
    writer_of(source, "hf")(tmp_path, source, "float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.model_type == {"first": "mamba", "falcon": "falcon_mamba"}.get(
        name, "mamba2"
    )
    tokens = torch.arange(2, 60)[None]
    with torch.no_grad():
        wanted = theirs(tokens).logits
    torch.testing.assert_close(source.model.parallel(tokens), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.package
@pytest.mark.parametrize("name", ["grouped", "first"])
def test_llama_cpp_reads_the_gguf_file_and_writes_the_same(tmp_path: Path, name: str) -> None:
    source, out = checkpoint(name), tmp_path / "model.gguf"
    writer_of(source, "gguf")(out, source, "float32")
    prompt = list(range(3, 40))
    ids = run_llama(out, prompt, 300)
    logits = source.model.parallel(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
    logits[:, source.tokenizer.eos_token_ids] = -torch.inf  # as it was told to continue
    assert len(ids) == 300
    assert ids == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", ["head", "first"])
def test_gguf_has_the_tensors_and_types_of_the_converter(
    tmp_path: Path, name: str, dtype: str
) -> None:
    source, out = checkpoint(name), tmp_path / "model.gguf"
    writer_of(source, "gguf")(out, source, dtype)
    kind = KINDS[dtype]
    found = {tensor.name: tensor for tensor in GGUFReader(out).tensors}
    wanted = mamba_tensors(SHAPES[name], drawn(name))
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert tuple(reversed(tensor.shape.tolist())) == wanted[key].shape, key
        stays = wanted[key].ndim == 1 or key.endswith(("conv1d.weight", "_a", "_d", "norm.weight"))
        small = kind in ("Q8_0", "Q4_0") and wanted[key].shape[-1] % 32
        assert tensor.tensor_type.name == ("F32" if stays else "F16" if small else kind), key


@pytest.mark.parametrize(
    ("name", "kind", "change", "message"),
    [
        ("falcon", "gguf", {}, "GGUF implies mixer_norm_eps 1e-05, the model has 1e-06"),
        ("odd", "hf", {"hidden_size": 20}, "no place for an inner width of 46, which is not a mul"),
        ("odd", "gguf", {"hidden_size": 20}, r"GGUF implies an inner width of 2 \* 20, the model"),
        ("odd", "pth", {}, "--format pth is not supported for mamba2 models"),
    ],
)
def test_model_that_a_format_cannot_say_is_refused(
    tmp_path: Path, name: str, kind: str, change: dict[str, int], message: str
) -> None:
    config = dataclasses.replace(SHAPES[name], **change)
    source = dataclasses.replace(checkpoint(name), config=config)
    with pytest.raises(CheckpointError, match=message):
        writer_of(source, kind)(tmp_path / "out", source, "float32")


@pytest.mark.slow
@pytest.mark.package
def test_trained_model_is_the_same_for_transformers_and_llama_cpp(
    tmp_path: Path,
) -> None:
    """Train, export, and measure the bits per token of a text with each."""
    corpus = tmp_path / "text.txt"
    corpus.write_text(TEXT * 40, encoding="utf-8")
    run = "--steps 40 --batch-size 4 --window 64 --threads 1 --vocab-size 300 --layers 2"
    sizes = "--architecture mamba2 --hidden-size 32 --head-dim 16"
    options = ["--attention-options", '{"state_size": 16}', "--out", tmp_path / "run"]
    everstream("train", "--data", corpus, *run.split(), *sizes.split(), *options)
    model, folder, file = tmp_path / "run" / "model", tmp_path / "hf", tmp_path / "model.gguf"
    for kind, out in (("hf", folder), ("gguf", file)):
        everstream("export", model, out, "--format", kind, "--dtype", "float32")
    ours = load_checkpoint(model)
    tokens = ours.tokenizer.encode(corpus.read_text(encoding="utf-8"))[:400]
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = bits(theirs(torch.tensor([tokens])).logits[0], tokens)
    runtime = Runtime(ours.config, ours.weights, "float32")
    scores = runtime.score(runtime.empty_pool(1), 0, 0, tokens)
    found = -float(np.sum(scores)) / np.log(2) / (len(tokens) - 1)
    assert found == pytest.approx(wanted, abs=TOLERANCE)
    assert wanted < 0.9 * np.log2(ours.config.vocab_size)  # it has learnt
    ids = run_llama(file, tokens[:50], 100)
    logits = ours.model.parallel(torch.tensor([tokens[:50] + ids]))[0, 49:-1]
    logits[:, ours.tokenizer.eos_token_ids] = -torch.inf
    assert ids == logits.argmax(dim=-1).tolist()


def bits(logits: torch.Tensor, tokens: list[int]) -> float:
    """Per token, of all but the first."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    return float(loss) / float(np.log(2))


def test_folder_names_what_transformers_needs(tmp_path: Path) -> None:
    source = checkpoint("first")
    assert isinstance(source.config, MambaConfig)
    writer_of(source, "hf")(tmp_path, source, "bfloat16")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["time_step_rank"]) == ("mamba", source.config.dt_rank)
    assert (config["architectures"], config["torch_dtype"]) == (["MambaForCausalLM"], "bfloat16")
