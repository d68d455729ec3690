"""RWKV-7 in GGUF: the model of the native file; metadata and tensors that disagree are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from model import foreign
from model.checkpoint import Checkpoint, load_checkpoint, load_tokenizer
from model.config import ConfigError
from model.families.rwkv7.chat import ENDS, TEMPLATE
from model.native.runtime import Runtime
from model.tokenizer import TokenizerError
from model.weights import CheckpointError, StoredWeights, is_quantized
from model.weights.gguf_file import GgufFile
from server.models.backend import open_backend
from server.models.storage import identity_of
from tests.gguf_blocks import KINDS, BlockWeights, random_blocks
from tests.gguf_files import (
    Fill,
    Raw,
    Tensors,
    byte_level_vocabulary,
    finish,
    gguf_tensors,
    write_gguf,
)
from tests.hybrid_gguf import numbered_vocabulary
from tests.int4 import Q4Weights, to_int4
from tests.model.architectures.rwkv7_llama import llama_logprobs
from tests.model.ops.cpu.models import feed
from tests.rwkv7 import SHAPES, Shape, published, write_pth
from tests.tiny import tiny_tokenizer

SHAPE = SHAPES["square"]
TENSORS = gguf_tensors(published(SHAPE))
VOCABULARY = byte_level_vocabulary(tiny_tokenizer(), SHAPE.vocab_size)
#: Distance of the log probabilities from llama.cpp's, relative to how much they differ.
LLAMA_TOLERANCE = 0.1
Change = Callable[[Tensors], object]


def vocabulary_of(shape: Shape) -> Fill:
    return byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("native")
    tiny_tokenizer().save(folder / "tokenizer.json")
    return load_checkpoint(write_pth(folder / "model.pth", published(SHAPE)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint.model.parallel(torch.arange(2, 40)[None])


def test_file_is_the_model_of_the_native_file(path: Path, native: Checkpoint) -> None:
    checkpoint = load_checkpoint(write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY))
    assert checkpoint.config == native.config == SHAPE.config
    assert list(checkpoint.weights) == list(native.weights)
    for name in native.weights:
        assert np.array_equal(checkpoint.weights[name], native.weights[name]), name
    assert torch.equal(logits(checkpoint), logits(native))


@pytest.mark.parametrize(("kind", "error"), [("BF16", 3e-2), ("F16", 4e-3), ("Q8_0", 4e-2)])
def test_lower_precisions_are_the_same_model_with_their_error(
    path: Path, native: Checkpoint, kind: str, error: float
) -> None:
    checkpoint = load_checkpoint(write_gguf(path, SHAPE, TENSORS, kind, VOCABULARY))
    assert is_quantized(checkpoint.weights) == (kind == "Q8_0")
    exact = logits(native)
    difference = (logits(checkpoint) - exact).std() / exact.std()
    assert error / 50 < difference < error


def test_int4_weights_are_held_as_they_are(path: Path) -> None:
    """Those of Q4_0, and the others of the file in int8; the head of this one is Q5_0."""
    name = "output.weight"
    blocks = quantize(TENSORS[name], GGMLQuantizationType.Q5_0)
    raw = {name: (blocks, GGMLQuantizationType.Q5_0)}
    checkpoint = load_checkpoint(write_gguf(path, SHAPE, TENSORS, "Q4_0", VOCABULARY, raw=raw))
    held = open_backend(checkpoint, "native", threads=1)
    assert held.dtype == "int4"
    numbers = {name: np.asarray(weight, np.float32) for name, weight in checkpoint.weights.items()}
    others = [name for name, values in numbers.items() if not is_exact(values)]
    assert "head.weight" in others
    assert "blocks.1.channel_mix.key.weight" not in others
    runtimes = [
        Runtime(checkpoint.config, weights, "int4")
        for weights in (checkpoint.weights, Q4Weights(numbers, tuple(others)))
    ]
    wanted, found = (
        feed(runtime, runtime.empty_pool(1), 0, list(range(2, 40))) for runtime in runtimes
    )
    assert found.tobytes() == wanted.tobytes()
    assert runtimes[0].num_bytes == runtimes[1].num_bytes


@pytest.mark.parametrize(("dtype", "held"), [("auto", "int8"), ("int4", "int4")])
def test_file_mostly_of_eight_bits_is_rounded_as_asked(path: Path, dtype: str, held: str) -> None:
    checkpoint = load_checkpoint(write_gguf(path, SHAPE, TENSORS, "Q8_0", VOCABULARY))
    opened = open_backend(checkpoint, "native", dtype, 1)
    assert (opened.dtype, opened.held) == (held, held)


#: Types of four to six bits, and what the file's other matrices are then.
MIXED = {
    "Q4_1": "Q8_0",
    "Q4_K": "Q6_K",
    "Q5_K": "Q6_K",
    "Q6_K": "Q8_0",
    "IQ4_XS": "Q5_K",
    "IQ4_NL": "Q6_K",
}


def write_blocks(path: Path, kind: str = "Q4_K", fill: Callable[[int], Fill] | None = None) -> Path:
    """A file as those of Q4_K_M: the head and a half of one kind of matrix have more bits."""
    shape = Shape(301, 256, 2, 64, 512, (16, 16, 8, 32))
    tensors = gguf_tensors(published(shape))
    raw: Raw = {}
    for seed, (name, data) in enumerate(tensors.items()):
        if data.ndim != 2 or data.shape[1] % 256 or "lerp" in name or "time_mix_r_k" in name:
            continue
        is_other = name in ("output.weight", "blk.1.channel_mix_value.weight")
        used = MIXED[kind] if is_other else kind
        raw[name] = (random_blocks(used, *data.shape, seed), GGMLQuantizationType[used])
    vocabulary = vocabulary_of(shape) if fill is None else fill(shape.vocab_size)
    return write_gguf(path, shape, tensors, fill=vocabulary, raw=raw)


@pytest.mark.parametrize("kind", MIXED)
def test_blocks_are_held_as_they_are(path: Path, kind: str) -> None:
    """Those of each matrix in its own type, and in int8 where the runtime does not multiply it."""
    checkpoint = load_checkpoint(write_blocks(path, kind))
    opened = open_backend(checkpoint, "native", threads=1)
    used = {kind, MIXED[kind]}
    held = "+".join(["int4", *sorted(each.lower() for each in used)])
    assert (opened.dtype, opened.held) == ("int4", held)
    weights = checkpoint.weights
    assert isinstance(weights, StoredWeights)
    kinds = {name: weights.block_kind(name) or "" for name in weights}
    assert kinds["head.weight"] == kinds["blocks.1.channel_mix.value.weight"] == MIXED[kind]
    assert kinds["blocks.0.channel_mix.value.weight"] == kind
    assert kinds["blocks.0.time_mix.gate.down.weight"] == kind
    blocks = {name: weights.blocks(name, 0, None) for name in weights if kinds[name] in used}
    numbers = {name: np.asarray(weights[name], np.float32) for name in weights}
    stored = BlockWeights(numbers, kind, blocks, kinds)
    for name in blocks:
        assert np.array_equal(stored[name], weights[name])
    runtimes = [Runtime(checkpoint.config, each, "int4") for each in (weights, stored)]
    wanted, found = (
        feed(runtime, runtime.empty_pool(1), 0, list(range(2, 40))) for runtime in runtimes
    )
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.package
@pytest.mark.parametrize("kind", MIXED)
def test_llama_cpp_says_the_same_of_the_same_blocks(path: Path, kind: str) -> None:
    """Every id's probability at 100 places; it rounds inputs in blocks, where we round rows."""
    write_blocks(path, kind, numbered_vocabulary)
    prompt = list(range(3, 40))
    ids, logprobs = llama_logprobs(path, prompt, 100, 301)
    runtime = Runtime(*foreign.read_gguf(GgufFile(path), path.name), "int4")
    rows = torch.from_numpy(feed(runtime, runtime.empty_pool(1), 0, prompt + ids[:-1]))[36:]
    found, wanted = rows.log_softmax(dim=-1), torch.tensor(logprobs)
    assert (found - wanted).square().mean().sqrt() <= LLAMA_TOLERANCE * wanted.std()


def test_states_of_blocks_are_not_those_of_int8(path: Path) -> None:
    checkpoint = load_checkpoint(write_blocks(path))
    ours, other = (
        identity_of(checkpoint, open_backend(checkpoint, "native", dtype, 1))
        for dtype in ("auto", "int8")
    )
    assert (ours.dtype, other.dtype) == ("int4+q4_k+q6_k", "int8")


@pytest.mark.parametrize("kind", MIXED)
def test_damaged_scale_of_a_block_is_reported(
    path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = load_checkpoint(write_blocks(path, kind))
    weights, name = checkpoint.weights, "blocks.0.channel_mix.key.weight"
    assert isinstance(weights, StoredWeights)
    damaged = weights.blocks(name, 0, None)
    place = path.read_bytes().index(damaged.tobytes())
    with path.open("r+b") as file:
        file.seek(place + KINDS[kind].at)
        file.write(b"\xff\x7f")  # NaN
    open_backend(load_checkpoint(path), "native", threads=1)
    assert f"{name} has numbers that are not finite" in caplog.text


def is_exact(values: npt.NDArray[np.float32]) -> bool:
    """Whether a matrix is of int4 numbers."""
    return values.ndim == 2 and np.array_equal(to_int4(values), values)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ4_XS", "TQ1_0"])
def test_types_of_few_bits_are_the_model_of_their_numbers(path: Path, kind: str) -> None:
    """The package writes no IQ types, so the blocks are random bits with a scale near 1e-3."""
    type_, (block, num_bytes) = (each := GGMLQuantizationType[kind]), GGML_QUANT_SIZES[each]
    name = "blk.1.channel_mix_value.weight"
    rows, columns = TENSORS[name].shape
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // block, num_bytes))
    scale = slice(-2, None) if kind == "TQ1_0" else slice(0, 2)
    blocks[..., scale] = (0x00, 0x14)
    raw = blocks.astype(np.uint8).reshape(rows, -1)
    write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY, raw={name: (raw, type_)})
    found = load_checkpoint(path)
    numbers = TENSORS | {name: dequantize(raw, type_)}
    wanted = load_checkpoint(
        write_gguf(path.with_name("f32.gguf"), SHAPE, numbers, fill=VOCABULARY)
    )
    assert torch.equal(logits(found), logits(wanted))


def test_digest_is_of_the_file(path: Path) -> None:
    first = load_checkpoint(write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY)).digest
    assert load_checkpoint(path).digest == first
    changed = TENSORS | {"output.weight": TENSORS["token_embd.weight"]}
    assert load_checkpoint(write_gguf(path, SHAPE, changed, fill=VOCABULARY)).digest != first


def test_first_layer_has_no_values_to_mix_in(path: Path, native: Checkpoint) -> None:
    without = {name: data for name, data in TENSORS.items() if "blk.0.time_mix_v" not in name}
    without["blk.0.time_mix_value.weight"] = TENSORS["blk.0.time_mix_value.weight"]
    checkpoint = load_checkpoint(write_gguf(path, SHAPE, without, fill=VOCABULARY))
    assert torch.equal(logits(checkpoint), logits(native))


def test_tokenizer_inside_is_taken_with_its_end_of_text(path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY))
    ours = tiny_tokenizer()
    assert checkpoint.tokenizer.encode("Once upon") == ours.encode("Once upon")
    assert checkpoint.tokenizer.eos_token_ids == ours.eos_token_ids
    assert checkpoint.tokenizer.vocab_size == ours.vocab_size
    assert load_tokenizer(path).digest == checkpoint.tokenizer.digest


def test_file_without_a_tokenizer_takes_one_next_to_it_or_elsewhere(
    path: Path, tmp_path: Path
) -> None:
    write_gguf(path, SHAPE, TENSORS)
    message = r"has no tokenizer\.json or rwkv_vocab.* for model\.gguf; --tokenizer FILE names one"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiny_tokenizer().save(elsewhere / "tokenizer.json")
    first = load_checkpoint(path, tokenizer=elsewhere / "tokenizer.json")
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    second = load_checkpoint(path)
    assert first.tokenizer.digest == second.tokenizer.digest == tiny_tokenizer().digest
    assert first.digest == second.digest


def test_other_tokenizer_is_refused_with_a_remedy(path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")

    write_gguf(path, SHAPE, TENSORS, fill=fill)
    message = (
        "model.gguf: tokenizer.ggml.model 'bert' is not supported, only rwkv, gpt2, llama; --tok"
    )
    with pytest.raises(TokenizerError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("template", ["rwkv-world", "{{ bos_token }}{{ messages[0].content }}"])
def test_template_is_that_of_the_file(path: Path, template: str) -> None:
    def fill(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_chat_template(template)

    found = load_checkpoint(write_gguf(path, SHAPE, TENSORS, fill=fill)).chat_template
    assert found.source == (TEMPLATE if template == "rwkv-world" else template)
    assert found.special_tokens == {"bos_token": "<|endoftext|>"}
    assert found.turns.ends == (ENDS if template == "rwkv-world" else ())


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("token_embd.weight"), "lacks key 'token_embd.weight'"),
        (drop("token_embd_norm.bias"), r"lacks key 'token_embd_norm.bias' \(1 in all\)"),
        (drop("output.weight"), "lacks key 'output.weight'"),
        (drop("blk.1.time_mix_v2.weight"), "lacks key 'blk.1.time_mix_v2.weight'"),
        (drop("blk.0.time_mix_r_k.weight"), "lacks key 'blk.0.time_mix_r_k.weight'"),
        (drop("blk.0.time_mix_lerp_fused.weight"), "lacks key 'blk.0.time_mix_lerp_fused.weight'"),
        (put("extra", 3), r"has an unknown key 'extra' \(1 in all\)"),
        (put("blk.0.time_mix_r_k.weight", 96), r"time_mix_r_k.weight is \[96\], no heads of 64"),
        (put("blk.0.time_mix_r_k.weight", 64), r"r_k is \[1, 64\] for a width of 128"),
        (put("blk.0.time_mix_w1.weight", 128, 16), "decay_lora_rank is 16, the tensors have 128"),
        (put("blk.1.channel_mix_key.weight", 2, 2), r"channel_mix_key.weight is \[2, 2\], wanted"),
        (
            put("blk.0.time_mix_lerp_fused.weight", 5, 1, 1, 128),
            r"is \[5, 128\], wanted \[6, 128\]",
        ),
        (put("blk.9.attn_norm.weight", 128), "block_count is 2, the tensors have 3"),
    ],
)
def test_what_is_wrong_in_the_tensors_is_named(path: Path, change: Change, message: str) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    write_gguf(path, SHAPE, tensors, fill=VOCABULARY)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("model.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("wkv.head_size", None, "rwkv7.wkv.head_size is missing"),
        ("wkv.head_size", 0, "rwkv7.wkv.head_size must be a positive integer, not 0"),
        ("block_count", None, "rwkv7.block_count is missing"),
        ("block_count", 3, "rwkv7.block_count is 3, the tensors have 2"),
        ("block_count", "2", "rwkv7.block_count must be a positive integer, not '2'"),
        ("embedding_length", 64, "rwkv7.embedding_length is 64, the tensors have 128"),
        ("feed_forward_length", 64, "rwkv7.feed_forward_length is 64, the tensors have 512"),
        ("attention.decay_lora_rank", 8, "rwkv7.attention.decay_lora_rank is 8, the tensors have"),
        ("attention.iclr_lora_rank", 8, "rwkv7.attention.iclr_lora_rank is 8"),
        ("attention.value_residual_mix_lora_rank", 3, "value_residual_mix_lora_rank is 3"),
        ("attention.gate_lora_rank", 8, "rwkv7.attention.gate_lora_rank is 8"),
        ("attention.layer_norm_epsilon", "x", "layer_norm_epsilon must be a number, not 'x'"),
        ("vocab_size", 300, "rwkv7.vocab_size is 300, the tensors have 301"),
        ("token_shift_count", 1, "rwkv7.token_shift_count 1 is not supported, only 2"),
        ("surprise", 1, "unknown field 'rwkv7.surprise'"),
    ],
)
def test_metadata_that_says_something_else_is_refused(
    path: Path, key: str, value: object, message: str
) -> None:
    write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY, change={key: value})
    with pytest.raises(ConfigError, match=message) as error:
        load_checkpoint(path)
    assert str(error.value).startswith("model.gguf: ")


def test_many_layers_of_few_tensors_are_refused_before_anything_is_made(path: Path) -> None:
    layers = {f"blk.{layer}.attn_norm.weight": np.ones(1, np.float32) for layer in range(5000)}
    write_gguf(path, SHAPE, TENSORS | layers, fill=VOCABULARY)
    with pytest.raises(CheckpointError, match=r"gguf has 5060 keys, too few for 5000 layers"):
        load_checkpoint(path)


def minimal(path: Path, architecture: str, *tensors: str, split: int = 1) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_uint16("split.count", split)
    for name in tensors or ("token_embd.weight",):
        writer.add_tensor(name, np.ones((2, 2), np.float32))
    finish(writer)
    return path


GROWS = "models are not supported: some of its layers are attention, whose state grows"


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        *((name, f"{name} {GROWS}") for name in ("qwen3next", "zamba2")),
        *((name, f"{name} {GROWS}") for name in ("kimi-linear", "kimi-k3", "plamo2")),
        *((name, f"{name} {GROWS}") for name in ("minimax-01", "bamba")),
        ("qwen35moe", "qwen35moe models are not supported: only the dense ones of this family"),
        ("nemotron_h_moe", "nemotron_h_moe models are not supported: only the dense ones of this"),
        ("lfm2moe", "lfm2moe models are not supported: only the dense ones of this family are"),
        ("rwkv6", "rwkv6 models are not supported: of this family only RWKV-7 is"),
        (
            "rwkv6qwen2",
            "rwkv6qwen2 models are not supported: of RWKV models made from tr",
        ),
        ("lfm3", "'lfm3' models are not supported as GGUF, only as a folder; docs/start/models.md"),
        ("gru", "'gru' models are not supported; docs/start/models.md has what is served \\(rwkv7"),
    ],
)
def test_other_architectures_are_refused_by_name(
    path: Path, architecture: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^model.gguf: {message}"):
        load_checkpoint(minimal(path, architecture))


@pytest.mark.parametrize("letter", ["q", "k", "v", "qkv"])
def test_attention_is_refused_under_any_name_of_the_architecture(path: Path, letter: str) -> None:
    minimal(path, "rwkv7", "blk.0.attn_norm.weight", f"blk.1.attn_{letter}.weight")
    with pytest.raises(ConfigError, match=f"'rwkv7' {GROWS}"):
        load_checkpoint(path)


@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "command-r"])
def test_transformer_is_refused_with_what_is_served(path: Path, architecture: str) -> None:
    minimal(path, architecture, "blk.0.attn_q.weight", "blk.1.attn_q.weight", "output.weight")
    message = f"'{architecture}' models are not supported: its layers are attention, whose state"
    with pytest.raises(ConfigError, match=f"{message}.*; docs/start/models.md.*convert.md"):
        load_checkpoint(path)


def split(path: Path) -> list[Path]:
    """The parts of a split file."""
    write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY, split=30)
    return sorted(path.parent.glob("*-of-*.gguf"))


def test_parts_of_a_split_file_are_read_as_one(path: Path) -> None:
    parts = split(path)
    assert len(parts) == 3
    whole = load_checkpoint(write_gguf(path, SHAPE, TENSORS, fill=VOCABULARY))
    found = [load_checkpoint(part) for part in parts]
    assert len({each.digest for each in found}) == 1
    for each in found:
        assert torch.equal(logits(each), logits(whole))
        assert each.tokenizer.digest == whole.tokenizer.digest


def other_part(parts: list[Path]) -> None:
    """The second part of another split, into fewer parts."""
    folder = parts[0].parent / "other"
    folder.mkdir()
    write_gguf(folder / "model.gguf", SHAPE, TENSORS, fill=VOCABULARY, split=40)
    (folder / "model-00002-of-00002.gguf").rename(parts[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1].unlink(), "model-00002-of-00003.gguf: No such file"),
        (
            lambda parts: parts[1].write_bytes(parts[2].read_bytes()),
            "model-00002-of-00003.gguf: split.no is 2, not 1",
        ),
        (other_part, "model-00002-of-00003.gguf: split.count is 2, its name says 3 parts"),
        (
            lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-4000]),
            "model-00002-of-00003.gguf: it is cut off",
        ),
        (
            lambda parts: parts[0].rename(parts[0].with_name("model-00001-of-00004.gguf")),
            "split.count is 3, its name says 4 parts|model-00002-of-00004.gguf: No such file",
        ),
    ],
)
def test_missing_doubled_and_mismatching_parts_are_named(
    path: Path, change: Callable[[list[Path]], object], message: str
) -> None:
    parts = split(path)
    change(parts)
    first = next(path.parent.glob("*-00001-of-*.gguf"))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(first)


def test_tensor_in_two_parts_is_named(path: Path) -> None:
    for number, tensor in enumerate(("x", "x")):
        writer = GGUFWriter(path.with_name(f"model-{number + 1:05}-of-00002.gguf"), "rwkv7")
        for key, value in (("no", number), ("count", 2)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor(tensor, np.ones((2, 2), np.float32))
        finish(writer)
    message = "model-00002-of-00002.gguf: the tensor x is in model-00001-of-00002.gguf too"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path.with_name("model-00001-of-00002.gguf"))


def test_part_under_another_name_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"NAME-00001-of-00003\.gguf and so on"):
        load_checkpoint(minimal(path, "rwkv7", split=3))
