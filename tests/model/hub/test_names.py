"""Names of models on the hub: which text is one, and what may become part of a path."""

from __future__ import annotations

import pytest

from model.hub.names import HubName, is_safe_path, parse_name
from model.weights import CheckpointError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name")),
        ("Owner_1/na.me-7b", HubName("Owner_1/na.me-7b")),
        ("owner/name@v1", HubName("owner/name", "v1")),
        ("owner/name@refs/pr/1", HubName("owner/name", "refs/pr/1")),
        ("owner/name:small.pth", HubName("owner/name", file="small.pth")),
        ("owner/name@v1:in/a folder/x.gguf", HubName("owner/name", "v1", "in/a folder/x.gguf")),
    ],
)
def test_name_has_parts(text: str, name: HubName) -> None:
    assert parse_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("name", "a/b/c", "./a/b", "../b", "/a/b", "a/..", "a/.b", "-a/b", "a/b--c", "a/b..c"),
        *("", "a/", "/b", "a/b c", "a/b\n", "a/\u00e9", "runs/small.pth", "runs/small.gguf"),
    ],
)
def test_other_text_is_no_name(text: str) -> None:
    assert parse_name(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("a/b:../x.pth", "a/b:/x.pth", "a/b:x/../../y.pth", "a/b:", "a/b:x//y", "a/b:./x"),
        *("a/b:x\\y", "a/b:x\0y", "a/b:x\n", "a/b@../x", "a/b@", "a/b@/x", "a/b@x/.."),
    ],
)
def test_part_that_would_leave_its_folder_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a (file|revision) of a repository"):
        parse_name(text)


def test_short_name_is_that_of_the_file_or_of_the_repository() -> None:
    assert HubName("owner/name").short == "name"
    assert HubName("owner/name", "v1", "in/small.pth").short == "small.pth"


def test_safe_path_is_relative_and_plain() -> None:
    assert is_safe_path("a/b.c/d e")
    assert not is_safe_path("a/../b")
