"""A file that another process downloads at the same time."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import pytest

from model.hub import fetch as module
from model.hub.cache import Repository
from model.hub.fetch import fetch
from model.hub.listing import HubFile, Listing
from model.hub.names import HubName

CONTENT = bytes(range(250)) * 40


def test_what_another_process_wrote_while_this_one_waited_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = HubFile("one.pth", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    place = Repository("owner/one", tmp_path)
    place.blobs.mkdir(parents=True)
    partial = module._partial(place, file)
    partial.write_bytes(CONTENT[:100])
    asked = []

    def wait(out: BinaryIO, operation: int) -> None:
        with partial.open("ab") as other:
            other.write(CONTENT[100:600])

    def download(listing: Listing, file: HubFile, out: BinaryIO) -> None:
        asked.append(out.tell())
        out.write(CONTENT[out.tell() :])

    monkeypatch.setattr("fcntl.flock", wait)
    monkeypatch.setattr(module, "download", download)
    fetch(Listing(HubName("owner/one"), "0" * 40, {}), place, file, lambda line: None)
    assert asked == [600]
    assert (place.blobs / file.digest).read_bytes() == CONTENT
