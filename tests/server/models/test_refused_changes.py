"""Changes that are refused: broken checkpoints, other paths and names, missing keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.server.models.changing import engines, post, reload, serving, statuses
from tests.tiny import write_model

pytestmark = pytest.mark.slow


def broken(folder: Path, name: str) -> None:
    """A folder that holds no model, in one of the ways in which that can be."""
    if name == "empty":
        folder.mkdir()
        return
    write_model(folder, attention="softmax" if name == "growing" else "gated")
    if name == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "no json":
        (folder / "config.json").write_text("{")
    elif name == "other shapes":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    elif name == "no tokenizer":
        (folder / "tokenizer.json").write_text("{}")


async def test_broken_checkpoint_is_a_clear_400_and_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        before, threads = await server.text(), engines()
        for name in ("empty", "truncated", "no json", "other shapes", "no tokenizer", "growing"):
            broken(tmp_path / name, name)
            loaded, reloaded = {"name": "second", "path": name}, {"path": name}
            for path, body in (("", loaded), ("/a/reload", reloaded)):
                answer = await post(server, path, **body)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "model_broken"), error
                assert error["message"]
                assert str(tmp_path) not in error["message"]
        assert await server.text() == before
        assert await statuses(server) == [("a", "serving")]
        assert engines() == threads


async def test_path_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    outside = write_model(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    for file in outside.iterdir():
        (root / "files" / file.name).symlink_to(file)
    async with serving(tmp_path, model_dir=root) as server:
        outer = ("/etc", "..", "../outside", "link", "b/../../outside", "nothing", "a\0b", "files")
        for path in outer:
            answer = await post(server, "", name="second", path=path)
            error = answer.json()["error"]
            found = (answer.status_code, error["code"], error["param"])
            assert found == (400, "invalid_value", "path"), path
        assert await statuses(server) == [("a", "serving")]


async def test_nothing_is_loaded_from_a_path_without_a_folder_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path, model_dir=None) as server:
        for path, body in (("", {"name": "second", "path": "a"}), ("/a/reload", {"path": "a"})):
            answer = await post(server, path, **body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "loading_refused")
        assert (await reload(server))["changed"] is False


async def test_name_that_is_no_folder_or_is_served_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for name in ("", "a/b", "../a", ".hidden", "x" * 65, "a b"):
            answer = await post(server, "", name=name, path="a")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name"), name
        answer = await post(server, "", name="a", path="a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_exists")


async def test_admin_routes_need_an_admin_key(tmp_path: Path) -> None:
    keys = {"api_keys": ("user",), "admin_keys": ("boss",)}
    async with serving(tmp_path, **keys) as server:
        for key, status in (("user", 403), ("boss", 200)):
            server.http.headers["authorization"] = f"Bearer {key}"
            assert (await server.http.get("/v1/admin/models")).status_code == status
            assert (await post(server, "/a/reload")).status_code == status
        server.http.headers["authorization"] = "Bearer user"
        assert (await server.http.delete("/v1/admin/models/a")).status_code == 403
        assert (await post(server, "", name="b", path="a")).status_code == 403


async def test_one_change_at_a_time(tmp_path: Path) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path) as server:
        answers = await asyncio.gather(
            *(post(server, "", name=f"m{number}", path="b") for number in range(3))
        )
        codes = [answer.json().get("error", {}).get("code") for answer in answers]
        assert codes.count(None) >= 1
        assert set(codes) <= {None, "model_changing"}
        assert len(await statuses(server)) == 1 + codes.count(None)
