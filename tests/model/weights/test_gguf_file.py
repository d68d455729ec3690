"""GGUF files: the same numbers as the package ``gguf`` reads, and one line for what is broken."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from model.native.runtime import HELD_KINDS
from model.weights import CheckpointError
from model.weights.gguf_file import KINDS, SCALES, GgufFile
from tests.gguf_files import finish

SMALL = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write(path: Path, **tensors: np.ndarray) -> Path:
    writer = GGUFWriter(path, "rwkv7")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.part", 1e-5)
    writer.add_bool("a.flag", True)
    writer.add_array("some.strings", ["one", "zwölf", ""])
    writer.add_array("some.numbers", [1, 2, 3])
    for name, data in (tensors or {"x": SMALL, "y": SMALL[0]}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


@contextmanager
def refused(path: Path, message: str, most_bytes: int = 1 << 20) -> Iterator[None]:
    """The file is refused in one line that names it, without much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as error:
            yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)


def test_metadata_is_what_was_written(path: Path) -> None:
    file = GgufFile(write(path))
    metadata, arrays = file.metadata, file.arrays
    assert metadata["general.architecture"] == "rwkv7"
    assert (metadata["a.number"], metadata["a.part"], metadata["a.flag"]) == (7, 1e-5, True)
    assert arrays["some.strings"] == [b"one", "zwölf".encode(), b""]
    assert list(arrays["some.numbers"]) == [1, 2, 3]


def test_tensors_have_their_shapes_and_numbers(path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5), dtype=np.float32)
    file = GgufFile(write(path, x=x, y=x[0, 0, 0]))
    assert {name: file.shape(name) for name in file} == {"x": (2, 3, 4, 5), "y": (5,)}
    assert np.array_equal(file["x"], x)
    assert np.array_equal(file["y"], x[0, 0, 0])
    assert file.stored_dtype == "float32"
    assert not file.is_quantized


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values()])
def test_numbers_of_every_type_are_those_of_the_package(path: Path, kind: str) -> None:
    """Random bits, so every field of a block counts; more rows than are unpacked at a time."""
    found = next(each for each in KINDS.values() if each.name == kind)
    columns = max(found.block, 4) * 2
    rows = (1 << 18) // columns + 3
    draw = np.random.default_rng(1)
    # No exponent of a number of 16 bits is at its end, so that all are finite.
    raw = draw.integers(0, 64, (rows, columns // found.block * found.num_bytes), np.uint8)
    type_ = GGMLQuantizationType[kind]
    writer = GGUFWriter(path, "rwkv7")
    writer.add_tensor("x", raw, raw_dtype=type_)
    finish(writer)
    file = GgufFile(path)
    (theirs,) = GGUFReader(path).tensors
    assert file.shape("x") == (rows, columns)
    assert file["x"].dtype == np.float32
    assert np.array_equal(file["x"], dequantize(theirs.data, type_).reshape(rows, columns))
    assert file.is_quantized == (kind not in ("F32", "F16", "BF16"))


def test_codes_and_sizes_are_those_of_the_package() -> None:
    for code, kind in KINDS.items():
        assert GGMLQuantizationType(code).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(code)] == (kind.block, kind.num_bytes)


def test_place_of_the_scales_is_known_of_every_kind_that_is_held() -> None:
    assert SCALES.keys() == set(HELD_KINDS)


def test_types_that_are_not_supported_are_named(path: Path) -> None:
    writer = GGUFWriter(path, "rwkv7")
    writer.add_tensor("x", np.zeros((2, 292), np.uint8), raw_dtype=GGMLQuantizationType.Q8_K)
    finish(writer)
    with refused(path, "x is of type Q8_K; supported are F32, F16, .*Q6_K", 1 << 24):
        GgufFile(path)


def header(*parts: bytes | int, tensors: int = 0, fields: int = 0, version: int = 3) -> bytes:
    """A file; numbers are uint64."""
    body = b"".join(p if isinstance(p, bytes) else struct.pack("<Q", p) for p in parts)
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def tensor(name: bytes, *sizes: int, offset: int = 0, kind: int = 0) -> bytes:
    sizes_ = struct.pack(f"<{len(sizes)}Q", *sizes)
    return text(name) + number(len(sizes)) + sizes_ + number(kind) + struct.pack("<Q", offset)


HUGE = 1 << 62
SPACE = bytes(4096)

BROKEN = {
    "empty": (b"", "is not a GGUF file: it is empty"),
    "other": (b"PK\3\4" + SPACE, "it is not a GGUF file"),
    "short": (b"GGUF\3\0\0\0", "it is cut off at tensors"),
    "version 1": (header(SPACE, version=1), "version 1 is not supported"),
    "big-endian": (header(SPACE, version=3 << 24), "version 3, in big-endian order, is not"),
    "fields": (header(SPACE, fields=HUGE), f"its header counts {HUGE} metadata keys"),
    "many fields": (header(SPACE, fields=400), "its header counts 400 "),
    "tensors": (header(SPACE, tensors=HUGE), f"its header counts {HUGE} tensors"),
    "key": (header(HUGE, SPACE, fields=1), "a metadata key is a string of"),
    "key beyond": (header(200, bytes(50), fields=1), "it is cut off at a metadata key"),
    "key's text": (
        header(text(b"\xff"), number(4), SPACE, fields=1),
        "a metadata key is not UTF-8",
    ),
    "line": (header(text(b"a\nb"), SPACE, fields=1), "a metadata key is not a name: 'a\\\\nb'"),
    "type": (header(text(b"k"), number(77), SPACE, fields=1), "k is of the unknown type 77"),
    "twice": (
        header(*[text(b"k") + number(4) + number(1)] * 2, SPACE, fields=2),
        "the metadata key 'k' is there twice",
    ),
    "string": (header(text(b"k"), number(8), HUGE, SPACE, fields=1), "k is a string of"),
    "array": (
        header(text(b"k"), number(9), number(0), HUGE, SPACE, fields=1),
        f"its header counts {HUGE} numbers of k",
    ),
    "strings": (
        header(text(b"k"), number(9), number(8), HUGE, SPACE, fields=1),
        f"its header counts {HUGE} strings of k",
    ),
    "array of arrays": (
        header(text(b"k"), number(9), number(9), 1, SPACE, fields=1),
        "k is an array of the unsupported type 9",
    ),
    "alignment": (
        header(text(b"general.alignment"), number(4), number(0), SPACE, fields=1),
        "general.alignment must be in 1..65536, not 0",
    ),
    "alignment's type": (
        header(text(b"general.alignment"), number(8), text(b"32"), SPACE, fields=1),
        "general.alignment must be in",
    ),
    "axes": (header(tensor(b"x", *[1] * 5), SPACE, tensors=1), "x has 5 axes"),
    "no axes": (header(tensor(b"x"), SPACE, tensors=1), "x has 0 axes"),
    "size": (header(tensor(b"x", HUGE, HUGE), SPACE, tensors=1), "it is cut off at x"),
    "size 0": (header(tensor(b"x", 0), SPACE, tensors=1), "x has rows of 0 numbers"),
    "blocks": (header(tensor(b"x", 48, kind=8), SPACE, tensors=1), "rows of 48 numbers, no blocks"),
    "kind": (header(tensor(b"x", 4, kind=9999), SPACE, tensors=1), "x is of type 9999"),
    "offset": (header(tensor(b"x", 4, offset=HUGE), SPACE, tensors=1), "it is cut off at x"),
    "unaligned": (header(tensor(b"x", 4, offset=5), SPACE, tensors=1), "x begins at 5"),
    "same name": (
        header(*[tensor(b"x", 4)] * 2, SPACE, tensors=2),
        "the tensor 'x' is there twice",
    ),
    "overlap": (
        header(tensor(b"x", 64), tensor(b"y", 4, offset=128), SPACE, tensors=2),
        "y overlaps x",
    ),
    "same place": (header(tensor(b"x", 4), tensor(b"y", 4), SPACE, tensors=2), "overlaps"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_header_is_one_line_and_little_memory(path: Path, name: str) -> None:
    data, message = BROKEN[name]
    path.write_bytes(data)
    with refused(path, message, 1 << 24 if name == "kind" else 1 << 20):
        GgufFile(path)


def test_missing_file_is_named(path: Path) -> None:
    with refused(path, "No such file"):
        GgufFile(path)


def test_truncated_anywhere_is_refused(path: Path) -> None:
    data = write(path).read_bytes()
    for length in range(0, len(data) - 32, 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            GgufFile(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_an_error_or_a_file_of_the_same_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Nothing else: no other exception, and no number from beyond the file."""
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    changed = bytearray(write(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        file = GgufFile(path)
    except CheckpointError:
        return
    assert sum(file[name].size for name in file) <= 4 * len(changed)
