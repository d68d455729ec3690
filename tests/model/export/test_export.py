"""Every format is read back as the same model, and those who made the formats read them too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer as Backend

from model.architectures.network import model_of
from model.bundled_models import DEFAULT_MODEL
from model.chat import ChatTemplate
from model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from model.export import writer_of
from model.export.published import vocabulary
from model.tokenization.gguf import CUTS
from model.tokenization.world import WorldCodec
from model.tokenizer import Tokenizer, TokenizerError
from model.weights.gguf_file import GgufFile
from model.weights.torch_file import TorchFile
from tests.gguf_files import gguf_tensors
from tests.model.architectures.rwkv7_llama import run_llama
from tests.model.architectures.rwkv7_package import run_package
from tests.model.commands import everstream, refused
from tests.published_layouts import fused_blocks
from tests.rwkv7 import SHAPES, fla_names, published, write_pth
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[3]
SHAPE = SHAPES["square"]
#: What GGUF calls a dtype of the command.
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
#: What the converter of llama.cpp leaves in float32 whatever is asked for.
STAY = re.compile(r"norm|\.bias|time_mix_(w[012]|[av]0|k_k|k_a|r_k|ln|lerp)|channel_mix_lerp")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    tiny_tokenizer().save(folder / "tokenizer.json")
    return write_pth(folder / "model.pth", published(SHAPE))


@pytest.fixture(scope="module")
def checkpoint(native: Path) -> Checkpoint:
    return load_checkpoint(native)


def export(model: Path | str, out: Path, *options: str) -> Path:
    everstream("export", model, out, *options)
    return out


def place(folder: Path, form: str) -> Path:
    return folder / ("model" if form in ("hf", "everstream") else f"model.{form}")


def same(found: Checkpoint, wanted: Checkpoint) -> None:
    assert found.config == wanted.config
    assert set(found.weights) == set(wanted.weights)
    for name in wanted.weights:
        assert np.array_equal(found.weights[name], wanted.weights[name]), name
    assert found.tokenizer.digest == wanted.tokenizer.digest
    assert found.tokenizer.eos_token_ids == wanted.tokenizer.eos_token_ids


@pytest.mark.parametrize("second", ["everstream", "gguf", "pth", "hf"])
@pytest.mark.parametrize("first", ["everstream", "gguf", "pth", "hf"])
def test_every_form_becomes_every_other_and_stays_the_same(
    native: Path, checkpoint: Checkpoint, tmp_path: Path, first: str, second: str
) -> None:
    float32 = ("--dtype", "float32", "--format")
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    once = export(native, place(tmp_path / "1", first), *float32, first)
    same(load_checkpoint(once), checkpoint)
    twice = export(once, place(tmp_path / "2", second), *float32, second)
    same(load_checkpoint(twice), checkpoint)


def test_native_file_has_the_published_tensors(native: Path, tmp_path: Path) -> None:
    out = export(native, tmp_path / "model.pth", "--format", "pth", "--dtype", "float32")
    found, wanted = TorchFile(out), published(SHAPE)
    assert {key: found.shape(key) for key in found} == {
        key: tuple(tensor.shape) for key, tensor in wanted.items()
    }
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.package
def test_package_reads_the_native_file_and_agrees(
    native: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    out = export(native, tmp_path / "model.pth", "--format", "pth", "--dtype", "float32")
    prompt = list(range(3, 40))
    package = run_package(out, prompt, 1)
    ours = checkpoint.model.parallel(torch.tensor([prompt]))[0].numpy()
    scale = np.abs(ours).max()
    assert np.abs(package["logits"] - ours).max() < 2e-5 * scale


@pytest.mark.package
def test_llama_cpp_reads_the_gguf_file_and_writes_the_same(
    native: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    out = export(native, tmp_path / "model.gguf", "--format", "gguf", "--dtype", "float32")
    prompt = list(range(3, 40))
    ids = run_llama(out, prompt, 300)
    logits = checkpoint.model.parallel(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
    logits[:, checkpoint.tokenizer.eos_token_ids] = -torch.inf  # as it was told to continue
    assert len(ids) == 300
    assert ids == logits.argmax(dim=-1).tolist()


def test_folder_has_the_keys_of_fla(native: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = export(native, tmp_path / "hf", "--format", "hf", "--dtype", "bfloat16")
    found, wanted = load_file(out / "model.safetensors"), fla_names(published(SHAPE))
    assert {key: tensor.shape for key, tensor in found.items()} == {
        key: tensor.shape for key, tensor in wanted.items()
    }
    assert all(torch.equal(found[key], wanted[key].bfloat16()) for key in wanted)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["head_dim"], config["norm_eps"]) == ("rwkv7", 64, 1e-5)


@pytest.mark.parametrize("dtype", KINDS)
def test_gguf_has_the_tensors_and_types_of_the_converter(
    native: Path, tmp_path: Path, dtype: str
) -> None:
    out = export(native, tmp_path / "model.gguf", "--format", "gguf", "--dtype", dtype)
    kind = KINDS[dtype]
    found = {tensor.name: tensor for tensor in GGUFReader(out).tensors}
    wanted = gguf_tensors(published(SHAPE))
    assert found.keys() == wanted.keys()
    file = GgufFile(out)
    for name, tensor in found.items():
        assert tuple(reversed(tensor.shape.tolist())) == wanted[name].shape, name
        stays = STAY.search(name) is not None
        # The value residual's rank is 8: its rows have no blocks of 32.
        small = kind in ("Q8_0", "Q4_0") and wanted[name].shape[-1] % 32
        assert tensor.tensor_type.name == ("F32" if stays else "F16" if small else kind), name
        if stays or kind == "F32":
            assert np.array_equal(file[name], wanted[name])
        else:
            # A block's number opposite to its largest is a step of an eighth away.
            most = 0.13 if kind == "Q4_0" else 0.02
            assert np.abs(file[name] - wanted[name]).max() < most * np.abs(wanted[name]).max()


def test_gguf_has_the_metadata_of_the_converter(native: Path, tmp_path: Path) -> None:
    out = export(native, tmp_path / "model.gguf", "--format", "gguf", "--dtype", "q8_0")
    metadata = GgufFile(out).metadata
    assert {key: value for key, value in metadata.items() if key.startswith("rwkv7.")} == {
        "rwkv7.context_length": 1 << 20,
        "rwkv7.embedding_length": 128,
        "rwkv7.block_count": 2,
        "rwkv7.attention.layer_norm_epsilon": 1e-5,
        "rwkv7.wkv.head_size": 64,
        "rwkv7.attention.decay_lora_rank": 16,
        "rwkv7.attention.iclr_lora_rank": 16,
        "rwkv7.attention.value_residual_mix_lora_rank": 8,
        "rwkv7.attention.gate_lora_rank": 32,
        "rwkv7.feed_forward_length": 512,
        "rwkv7.attention.head_count": 0,
    }
    assert metadata["general.architecture"] == "rwkv7"
    assert "general.name" not in metadata  # it would be that of the unfinished file
    assert (metadata["general.file_type"], metadata["general.quantization_version"]) == (7, 2)
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]) == (
        0,
        0,
    )


@pytest.mark.process
def test_gguf_is_written_without_torch(native: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from server.cli.main import app; app()"
    out = tmp_path / "model.gguf"
    words = ["export", str(native), str(out), "--format", "gguf"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=ROOT)
    assert GgufFile(out).stored_dtype == "bfloat16"


def world() -> Tokenizer:
    tokens = [*((id + 1, bytes([id])) for id in range(256)), (261, b"\n\n"), (262, "é".encode())]
    return Tokenizer(WorldCodec(tokens))


def test_world_vocabulary_is_that_of_the_converter(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = Checkpoint(checkpoint.config, checkpoint.weights, world(), "digest")
    out = tmp_path / "model.gguf"
    writer_of(source, "gguf")(out, source, "float32")
    file = GgufFile(out)
    assert file.metadata["tokenizer.ggml.model"] == "rwkv"
    assert file.metadata["tokenizer.ggml.eot_token_id"] == 261
    assert file.metadata["tokenizer.chat_template"] == "rwkv-world"
    tokens, types = (file.arrays[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert (len(tokens), len(types)) == (301, 301)
    assert (tokens[0], tokens[1], tokens[11]) == (b"<s>", rb"\x00", rb"\n")
    assert (tokens[257], tokens[261], tokens[262]) == (b"[PAD257]", rb"\n\n", rb"\xc3\xa9")
    assert [types[0], types[1], types[257], types[300]] == [3, 1, 5, 5]
    same(load_checkpoint(out), source)


@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_template_is_exported(checkpoint: Checkpoint, tmp_path: Path, form: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}", None, {"bos_token": "<|endoftext|>"})
    source = Checkpoint(
        checkpoint.config, checkpoint.weights, checkpoint.tokenizer, "digest", template
    )
    out = place(tmp_path, form)
    writer_of(source, form)(out, source, "float32")
    assert load_checkpoint(out).chat_template == template


def test_tokenizers_that_gguf_cannot_hold_are_refused() -> None:
    values = json.loads(tiny_tokenizer().content)
    values["normalizer"] = {"type": "NFKC"}
    with pytest.raises(TokenizerError, match="GGUF cannot hold the tokenizer: only RWKV's"):
        vocabulary(Tokenizer.from_json(json.dumps(values)), 300)


@pytest.mark.parametrize("name", CUTS)
def test_gguf_names_the_way_in_which_a_tokenizer_cuts_texts(name: str) -> None:
    backend, cut = Backend.from_str(tiny_tokenizer().content), CUTS[name]
    cut.apply(backend)
    values = json.loads(backend.to_str())
    values["model"]["ignore_merges"] = cut.whole_words
    found = vocabulary(Tokenizer.from_json(json.dumps(values)), 300)
    assert CUTS[found["tokenizer.ggml.pre"]] == cut


@pytest.mark.parametrize("form", ["gguf", "pth"])
def test_other_families_are_refused_by_format_and_family(tmp_path: Path, form: str) -> None:
    out = place(tmp_path, form)
    attention = load_checkpoint(DEFAULT_MODEL).config.attention
    message = refused("export", DEFAULT_MODEL, out, "--format", form)
    assert f"--format {form} is not supported for {attention} models" in message
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_named_before_anything_is_written(native: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "must end in .gguf" in refused("export", native, out, "--format", "gguf")
    assert "q8_0 is for --format gguf" in refused("export", native, out, "--dtype", "q8_0")
    assert "is the model's own file" in refused("export", native, native, "--format", "pth")
    assert list(tmp_path.iterdir()) == []


def test_other_tokenizer_next_to_a_native_file_is_kept(native: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    message = refused("export", native, tmp_path / "model.pth", "--format", "pth")
    assert "tokenizer.json is another tokenizer than the model's" in message
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("form", ["pth", "hf", "gguf"])
def test_embedding_that_is_normed_already_is_refused(tmp_path: Path, form: str) -> None:
    folder, out = fused_blocks(tmp_path / "fused", SHAPE, published(SHAPE)), place(tmp_path, form)
    assert "the embedding is normed already" in refused("export", folder, out, "--format", form)
    assert not out.exists()


@pytest.mark.parametrize(
    ("form", "field", "value", "message"),
    [
        ("pth", "norm_eps", 1e-6, ".pth implies norm_eps 1e-05, the model has 1e-06"),
        ("pth", "group_norm_eps", 1e-5, ".pth implies group_norm_eps 0.00064, the model has 1e-05"),
        ("pth", "eos_token_id", 5, ".pth implies eos_token_id 0, the model has 5"),
        ("hf", "group_norm_eps", 1e-5, "fla's config implies group_norm_eps 0.00064"),
        ("gguf", "group_norm_eps", 1e-5, "GGUF implies group_norm_eps 0.00064"),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, form: str, field: str, value: float, message: str
) -> None:
    values = checkpoint.config.to_dict() | {field: value}
    model = model_of(type(checkpoint.config).from_dict(values), checkpoint.weights)
    save_checkpoint(tmp_path / "ours", model, checkpoint.tokenizer)
    out = place(tmp_path, form)
    assert message in refused("export", tmp_path / "ours", out, "--format", form)
    assert not out.exists()
