"""int4 folders: what is in them, that they load to the same numbers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import Checkpoint, load_checkpoint
from model.evaluation import DataError
from model.files import ConfigError
from model.native.runtime import NativeError, Runtime
from model.quantization.quantize import int4_of, save_int4
from model.weights import CheckpointError
from tests.gguf_blocks import BlockWeights
from tests.int4 import to_int4
from tests.tiny import TEXT, tiny_checkpoint

NAME = "model.safetensors"
TOKENS = [5, 70, 33, 250, 8, 8, 101]
QKV = "blocks.0.attention.qkv.weight"
FAMILIES = (
    *("gated", "delta", "rwkv7", "arwkv7", "mamba", "mamba2", "mamba2_hybrid", "jamba"),
    *("qwen35", "lfm2", "lfm3", "llama"),
)


#: Whose matrix of width 5 is left as it is, and served in int8.
LEFT = ("mamba", "jamba")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Of more tokens than a calibration needs."""
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT * 40, encoding="utf-8")
    return path


def logits(checkpoint: Checkpoint, dtype: str = "int4") -> bytes:
    runtime = Runtime(checkpoint.config, checkpoint.weights, dtype)
    runtime.run(runtime.empty_pool(1), [0], [0], [TOKENS], [runtime.draw()])
    assert np.ptp(runtime.logits()) > 0.1
    return runtime.logits().tobytes()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in LEFT])
def test_rounded_folder_is_served_as_the_original(family: str, tmp_path: Path) -> None:
    save_int4(tmp_path, tiny_checkpoint(family))
    assert logits(load_checkpoint(tmp_path)) == logits(tiny_checkpoint(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated_folder_is_served_on_torch_as_natively(
    family: str, text: Path, tmp_path: Path
) -> None:
    save_int4(tmp_path / "out", tiny_checkpoint(family), text)
    checkpoint = load_checkpoint(tmp_path / "out")
    state, position = checkpoint.model.empty_state(1), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        ours, _ = checkpoint.model.chunk(torch.tensor([TOKENS]), state, position)
    native = np.frombuffer(logits(checkpoint, "float32"), np.float32)
    assert native == pytest.approx(ours[0, -1].numpy(), abs=1e-4)


def test_calibration_gives_equal_bits_over_runs(text: Path, tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        save_int4(tmp_path / name, tiny_checkpoint(), text)
        files.append((tmp_path / name / NAME).read_bytes())
    assert files[0] == files[1]
    save_int4(tmp_path / "c", tiny_checkpoint())
    assert (tmp_path / "c" / NAME).read_bytes() != files[0]


def test_file_holds_pairs_of_codes_and_scales(tmp_path: Path) -> None:
    save_int4(tmp_path, tiny_checkpoint())
    stored, weights = load_file(tmp_path / NAME), load_checkpoint(tmp_path).weights
    before = tiny_checkpoint().weights
    packed, scales = stored[QKV].numpy(), stored[QKV + ".scale"].numpy()
    rows, columns = before[QKV].shape
    assert (packed.dtype, packed.shape) == (np.uint8, (rows, columns // 2))
    assert (scales.dtype, scales.shape) == (np.float16, (rows, columns // 32))
    assert np.array_equal(weights[QKV], to_int4(before[QKV]))
    assert (packed[0, 0] & 15) - 8.0 == weights[QKV][0, 0] / np.float32(scales[0, 0])
    assert stored["embedding.weight"].dtype == torch.int8
    small = "blocks.1.attention.decay_down.weight"
    assert np.array_equal(weights[small], before[small])


def test_config_states_the_format_and_the_text(text: Path, tmp_path: Path) -> None:
    for name, path in (("plain", None), ("calibrated", text)):
        save_int4(tmp_path / name, tiny_checkpoint(), path)
        values = json.loads((tmp_path / name / "config.json").read_text())
        calibration = path.name if path else None
        stated = {"bits": 4, "group_size": 32, "calibration": calibration}
        assert values["quantization"] == stated
        checkpoint = load_checkpoint(tmp_path / name)
        assert checkpoint.calibration == calibration
        assert checkpoint.config == tiny_checkpoint().config


@pytest.mark.parametrize("value", [4, {"bits": 4}, {"bits": 3, "group_size": 32}])
def test_other_formats_are_refused(value: object, tmp_path: Path) -> None:
    save_int4(tmp_path, tiny_checkpoint())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization": value}))
    with pytest.raises(ConfigError, match=r"config\.json: quantization must be"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({QKV + ".scale": None}, f"{QKV} is "),
        ({QKV + ".scale": torch.ones(96)}, r"is F32 \[96\], wanted F16 \[96, 1\]"),
        ({QKV + ".scale": torch.ones(96, 2).half()}, r"is F16 \[96, 2\], wanted F16 \[96, 1\]"),
        ({QKV: torch.ones(96, 8).byte()}, rf"{QKV} is \[96, 16\], wanted \[96, 32\]"),
    ],
)
def test_damaged_folders_are_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    save_int4(tmp_path, tiny_checkpoint())
    tensors = {**load_file(tmp_path / NAME), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / NAME)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_weights_of_four_bits_are_refused(tmp_path: Path) -> None:
    save_int4(tmp_path / "a", tiny_checkpoint())
    with pytest.raises(CheckpointError, match="the weights are int4 already"):
        save_int4(tmp_path / "b", load_checkpoint(tmp_path / "a"))


def test_weights_of_more_bits_in_blocks_are_rounded() -> None:
    """Though a runtime of int4 serves such a file as it is."""
    checkpoint = tiny_checkpoint()
    numbers = {name: np.asarray(weight) for name, weight in checkpoint.weights.items()}
    stored = replace(checkpoint, weights=BlockWeights(numbers, "Q6_K", {}))
    found, wanted = (int4_of(each, None, 1) for each in (stored, checkpoint))
    assert list(found) == list(wanted)
    assert QKV in found


def test_family_without_native_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="softmax"):
        save_int4(tmp_path, tiny_checkpoint("softmax"))


def test_short_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(TEXT, encoding="utf-8")
    with pytest.raises(DataError, match=r"short\.txt has \d+ tokens, too few to calibrate"):
        save_int4(tmp_path / "out", tiny_checkpoint(), path)
    assert not (tmp_path / "out").exists()
