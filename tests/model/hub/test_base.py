"""What ``base.json`` may say: some of it becomes words of a command, and parts of paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.files import ConfigError
from model.hub.base import BASE, Base, Package, has_base, read_base, write_base
from tests.adapted import base_fields

DESCRIBED = Base("tiny.gguf", 9, "0" * 64, Package("tiny-base", "1.0", "f" * 64))


@pytest.mark.parametrize("base", [DESCRIBED, Base("tiny.gguf", 9, "0" * 64)])
def test_description_comes_back(tmp_path: Path, base: Base) -> None:
    assert not has_base(tmp_path)
    write_base(tmp_path, base)
    assert has_base(tmp_path)
    assert read_base(tmp_path) == base


PACKAGE = {"name": "tiny-base", "version": "1.0", "sha256": "f" * 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": None}, "lacks file"),
        ({"bytes": None}, "lacks bytes"),
        ({"url": "x"}, "url is unknown"),
        ({"file": "../tiny.gguf"}, "file must be the name of a .gguf file, not '../tiny.gguf'"),
        ({"file": "tiny.bin"}, "file must be"),
        ({"file": "a\n.gguf"}, "file must be"),
        ({"bytes": 0}, "bytes must be a positive integer, not 0"),
        ({"bytes": True}, "bytes must be"),
        ({"sha256": "0" * 63}, "sha256 must be 64 hexadecimal digits"),
        ({"sha256": 5}, "sha256 must be"),
        ({"package": "tiny-base"}, "package must be an object"),
        ({"package": {**PACKAGE, "name": "--pre"}}, "package.name must be the name of a package"),
        ({"package": {**PACKAGE, "name": "a\nb"}}, "package.name must be"),
        ({"package": {**PACKAGE, "version": "1.0 --pre"}}, "package.version must be a version"),
        ({"package": {**PACKAGE, "sha256": "F" * 64}}, "package.sha256 must be"),
        ({"package": {"name": "tiny-base", "version": "1.0"}}, "lacks package.sha256"),
        ({"package": {**PACKAGE, "index": "x"}}, "package.index is unknown"),
    ],
)
def test_other_descriptions_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_base(tmp_path, DESCRIBED)
    base_fields(tmp_path, **change)
    with pytest.raises(ConfigError) as refused:
        read_base(tmp_path)
    assert message in str(refused.value)
    assert BASE in str(refused.value)
