"""Files of torch.save, read without torch and without running what they name."""

from __future__ import annotations

import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.weights import CheckpointError
from model.weights.torch_file import PickleError, TorchFile, read_tensors
from tests.rwkv7 import unsaved_member, write_pth


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


class Attack:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_come_out_as_float32(file: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.1, -3e4, 0.0], [1e-6, float("inf"), -0.0]], dtype=dtype)
    weights = TorchFile(write_pth(file, {"a": tensor, "b.c": torch.ones(3)}))
    assert list(weights) == ["a", "b.c"]
    assert weights["a"].dtype == np.float32
    assert weights["a"].tobytes() == tensor.float().numpy().tobytes()
    assert weights.shape("a") == (2, 3)
    assert weights.is_float("a")


def test_float32_shares_the_memory_of_the_file(file: Path) -> None:
    found = TorchFile(write_pth(file, {"a": torch.ones(1000)}))["a"]
    assert not found.flags.owndata
    assert not found.flags.writeable


def test_views_of_one_storage_are_cut_as_torch_cuts_them(file: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    views = {
        "whole": whole,
        "rows": whole[1:3],
        "transposed": whole.T,
        "scalar": whole[2, 3],
        "empty": whole[:0],
    }
    weights = TorchFile(write_pth(file, views))
    for name, view in views.items():
        assert weights.shape(name) == tuple(view.shape)
        assert np.array_equal(weights[name], view.numpy())


def test_parameters_and_ordered_dictionaries_are_read(file: Path) -> None:
    module = torch.nn.Linear(3, 2)
    weights = TorchFile(write_pth(file, module.state_dict()))
    assert np.array_equal(weights["weight"], module.weight.detach().numpy())
    parameters = OrderedDict(module.named_parameters())
    assert list(TorchFile(write_pth(file, parameters))) == ["weight", "bias"]


def test_integers_come_out_as_they_are(file: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.tensor([True, False]), "c": torch.ones(2)}
    weights = TorchFile(write_pth(file, tensors))
    for name, tensor in tensors.items():
        assert np.array_equal(weights[name], tensor.numpy())
        assert weights.is_float(name) == tensor.is_floating_point()


def test_most_numbers_name_the_dtype(file: Path) -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16)}
    assert TorchFile(write_pth(file, weights)).stored_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Attack(print, "ran"), r"would call __builtin__\.print, which is refused"),
        ({"a": Attack(getattr, 1, "x")}, r"would call __builtin__\.getattr, which is refused"),
        ({"a": torch.nn.Linear}, r"would call torch\.nn\.modules\.linear\.Linear"),
        ({"a": 3}, "'a' is not a tensor"),
        ({3: torch.ones(2)}, "a key is of type int, not a string"),
        ({"a": {"b": torch.ones(2)}}, "'a' is not a tensor"),
        (torch.ones(2), "it holds a Tensor, not a dictionary of tensors"),
        ([torch.ones(2)], "its pickle has the instruction EMPTY_LIST: no tensor needs it"),
        (
            {"a": torch.ones(2, dtype=torch.complex64)},
            "a is of the unsupported 'torch ComplexFloatStorage'",
        ),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_refused(
    file: Path, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pth(file, value)
    with pytest.raises(CheckpointError, match=message) as error:
        TorchFile(file)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(file))
    assert capsys.readouterr().out == ""


#: (x, x) of itself 60 times: 2**60 values for a reader that walks through it.
NESTED = b"K\1" + b"q\0h\0\x86" * 60 + b"q\0"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"}" + NESTED + b"K\1s.", "a key is of type tuple, not a string"),
        (b"}(" + NESTED + b"K\1u.", "a key is of type tuple, not a string"),
        (b"ccollections\nOrderedDict\n" + NESTED + b"K\1\x86\x85\x85R.", "is damaged"),
        (b"(Nctorch\nFloatStorage\n" + NESTED + b"NK\1tQ.", "is damaged: no storage"),
        (NESTED + b"h\0\x93.", "a name is not a string"),
        (b"}X\1\0\0\0a" + NESTED + b"s.", "'a' is not a tensor"),
        (NESTED + b".", "it holds a tuple, not a dictionary"),
    ],
)
def test_nested_values_are_neither_hashed_nor_printed(program: bytes, message: str) -> None:
    with pytest.raises(PickleError, match=message):
        read_tensors(program)


def test_shape_and_strides_of_different_lengths_are_refused() -> None:
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ"
    for shape, message in ((b"K\2K\2\x86", "is damaged: no tensor"), (b"K\4\x85", None)):
        tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + shape + b"K\1\x85tR"
        program = b"}X\1\0\0\0a" + tensor + b"s."
        if message is None:
            assert read_tensors(program)["a"].shape == (4,)
            continue
        with pytest.raises(PickleError, match=message):
            read_tensors(program)


def test_old_format_is_refused(file: Path) -> None:
    write_pth(file, {"a": torch.ones(2)}, zipped=False)
    with pytest.raises(CheckpointError, match="is not a zip archive of torch"):
        TorchFile(file)


def test_missing_numbers_are_named(file: Path) -> None:
    unsaved_member(write_pth(file, {"a": torch.ones(2)}), "data/0")
    with pytest.raises(CheckpointError, match="the numbers of a are missing"):
        TorchFile(file)


def test_archive_without_a_pickle_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme", "nothing")
    with pytest.raises(CheckpointError, match=r"it has no data\.pkl"):
        TorchFile(file)


def write_description(file: Path, program: bytes) -> bytes:
    """An archive with this data.pkl alone; returns its bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", program)
    return file.read_bytes()


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("member", ["data.pkl", "byteorder"])
def test_compressed_description_is_refused(file: Path, member: str, damaged: bool) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", b"}.", zipfile.ZIP_DEFLATED if member[0] == "d" else None)
        if member == "byteorder":
            archive.writestr("m/byteorder", b"little", zipfile.ZIP_DEFLATED)
        at = archive.getinfo(f"m/{member}").header_offset + 30 + len(f"m/{member}")
    if damaged:
        data = bytearray(file.read_bytes())
        data[at] = 0xFF
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"its {member} is compressed"):
        TorchFile(file)


def test_size_beyond_the_end_is_refused(file: Path) -> None:
    data = bytearray(write_description(file, b"}."))
    entry = data.rindex(b"PK\1\2")
    for field in (20, 24):  # the sizes as stored and as read
        data[entry + field : entry + field + 4] = (1 << 20).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.pth: it is cut off"):
        TorchFile(file)


def test_long_description_is_refused(file: Path) -> None:
    write_description(file, bytes((1 << 24) + 1))
    with pytest.raises(CheckpointError, match=r"its data\.pkl has 16777217 bytes, too many"):
        TorchFile(file)


def member_of(file: Path, name: str) -> zipfile.ZipInfo:
    with zipfile.ZipFile(file) as archive:
        return next(info for info in archive.infolist() if info.filename.endswith(name))


def numbers_at(data: bytes, header: int) -> int:
    """Where the bytes of the member begin whose header is at ``header``."""
    return header + 30 + sum(struct.unpack("<HH", data[header + 26 : header + 30]))


def test_flipped_bit_of_a_storage_is_found_when_it_is_first_read(file: Path) -> None:
    write_pth(file, {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3)})
    data = bytearray(file.read_bytes())
    data[numbers_at(data, member_of(file, "data/0").header_offset) + 50] ^= 4
    file.write_bytes(data)
    weights = TorchFile(file)
    assert np.array_equal(weights["b"], np.ones(3))
    for read in (lambda: weights["a"], lambda: weights.rows("a", 0, 1)):
        with pytest.raises(CheckpointError, match=r"model\.pth: a: .*data/0 is damaged"):
            read()


@pytest.mark.parametrize("field", [6, 8, 14, 18, 22, 26, 28, 30])
def test_header_that_its_directory_contradicts_is_refused(file: Path, field: int) -> None:
    """Flags, method, checksum, both sizes, both lengths, name."""
    with zipfile.ZipFile(write_pth(file, {"a": torch.ones(50)})) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    TorchFile(file)["a"]
    data = bytearray(file.read_bytes())
    data[member_of(file, "data/0").header_offset + field] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.pth: (its member|it is cut off)"):
        TorchFile(file)["a"]


def test_two_members_at_one_place_are_refused(file: Path) -> None:
    data = bytearray(write_pth(file, {"a": torch.ones(50), "b": torch.zeros(50)}).read_bytes())
    entry = [data.rindex(b"data/%d" % key) - 46 - len("model/") for key in (0, 1)]
    assert all(data[at : at + 4] == b"PK\1\2" for at in entry)
    data[entry[1] + 42 : entry[1] + 46] = data[entry[0] + 42 : entry[0] + 46]
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="contradicts"):
        TorchFile(file)


def test_member_that_reaches_into_the_next_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", b"}.")
        archive.writestr("m/data/0", bytes(64))
    data = bytearray(file.read_bytes())
    for at in (18, 22, data.index(b"PK\1\2") + 20, data.index(b"PK\1\2") + 24):
        data[at] = 60
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"its members m/data\.pkl and m/data/0 overlap"):
        TorchFile(file)


def test_file_without_checksums_is_read(file: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_pth(file, {"a": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert member_of(file, "data/0").CRC == 0
    assert np.array_equal(TorchFile(file)["a"], np.ones(2))


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_truncated_file_is_refused(file: Path, part: float) -> None:
    data = write_pth(file, {"a": torch.ones(200), "b": torch.ones(100)}).read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        TorchFile(file)


def test_any_changed_byte_of_the_pickle_is_an_error_or_tensors(file: Path) -> None:
    """Nothing else: no other exception, and no tensor beyond its storage."""
    write_pth(file, {"a": torch.arange(6.0).view(2, 3)})
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    for at in range(len(members[name])):
        for value in (0, 0xFF, members[name][at] ^ 1, ord("K"), ord(".")):
            changed = bytearray(members[name])
            changed[at] = value
            with zipfile.ZipFile(file, "w") as archive:
                for member, data in members.items():
                    archive.writestr(member, bytes(changed) if member == name else data)
            try:
                weights = TorchFile(file)
            except CheckpointError:
                continue
            for key in weights:
                assert set(weights[key].flatten().tolist()) <= set(range(6))
