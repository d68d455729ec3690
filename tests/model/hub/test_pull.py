"""Downloads from a hub on loopback, by the real commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint, locate
from model.tokenization.world import FILE as VOCABULARY
from tests.hub_server import TOKEN, Hub, Repository
from tests.mamba import write_mistral
from tests.model.hub.commands import Commands, commands

pytestmark = pytest.mark.process

#: The library keeps what it has received in units of 10 MiB.
UNIT = 10 << 20


def test_folder_is_pulled_without_the_files_that_it_does_not_need(
    everstream: Commands, hub: Hub, models: Path
) -> None:
    repository = hub.add("owner/fla", models / "fla")
    folder = everstream.pull("owner/fla")
    unneeded = {"README.md", "pytorch_model.bin"}
    assert {path for path, _ in hub.gets()} == repository.files.keys() - unneeded
    assert load_checkpoint(folder).digest == load_checkpoint(models / "fla").digest
    assert everstream.pull("owner/fla") == folder
    assert hub.gets() == []


def test_folder_of_mistral_is_pulled(everstream: Commands, hub: Hub, tmp_path: Path) -> None:
    source, _ = write_mistral(tmp_path / "codestral")
    repository = hub.add("owner/codestral", source)
    folder = everstream.pull("owner/codestral")
    assert {path for path, _ in hub.gets()} == repository.files.keys()
    assert load_checkpoint(folder).digest == load_checkpoint(source).digest
    assert everstream.pull("owner/codestral") == folder
    assert hub.gets() == []


def test_file_is_pulled_with_its_vocabulary(everstream: Commands, hub: Hub, models: Path) -> None:
    hub.add("owner/native", models / "native")
    file = everstream.pull("owner/native")
    assert file.name == "small.pth"
    assert {path for path, _ in hub.gets()} == {"small.pth", VOCABULARY}
    assert load_checkpoint(file).digest == load_checkpoint(models / "native/small.pth").digest


def test_connection_that_breaks_is_tried_again_from_there(everstream: Commands, hub: Hub) -> None:
    content = os.urandom(2 * UNIT + 12345)
    hub.repositories["owner/big"] = Repository({"big.pth": content})
    hub.repositories["owner/big"].broken = {"big.pth": [UNIT + 999]}
    assert everstream.pull("owner/big").read_bytes() == content
    assert hub.gets() == [("big.pth", 0), ("big.pth", UNIT)]


def test_interrupted_pull_keeps_the_files_that_are_whole(
    everstream: Commands, hub: Hub, models: Path
) -> None:
    repository = hub.add("owner/fla", models / "fla")
    second = "model-00002-of-00002.safetensors"
    repository.broken = {second: [0]}
    message = everstream.refused("pull", "owner/fla")
    assert message == f"owner/fla: {second} is not available from the hub: the hub answered 507"
    assert "owner/fla" not in everstream.run("models").stdout
    hub.gets()
    folder = everstream.pull("owner/fla")
    assert hub.gets() == [(second, 0)]
    assert load_checkpoint(folder).digest == load_checkpoint(models / "fla").digest


def test_damaged_file_is_named_and_nothing_else_is_lost(
    everstream: Commands, hub: Hub, models: Path
) -> None:
    repository = hub.add("owner/fla", models / "fla")
    second = "model-00002-of-00002.safetensors"
    repository.wrong = {second}
    message = everstream.refused("pull", "owner/fla")
    assert f"owner/fla: {second} was damaged on the way" in message
    assert repository.etag(second) in message
    hub.gets()
    repository.wrong = set()
    folder = everstream.pull("owner/fla")
    assert hub.gets() == [(second, 0)]
    assert load_checkpoint(folder).digest == load_checkpoint(models / "fla").digest


def test_damaged_small_file_is_named(everstream: Commands, hub: Hub, models: Path) -> None:
    repository = hub.add("owner/fla", models / "fla")
    repository.wrong = {"config.json"}
    assert "config.json was damaged" in everstream.refused("pull", "owner/fla")


def test_one_of_several_files_has_to_be_chosen(everstream: Commands, hub: Hub) -> None:
    files = {"a.pth": bytes(5000), "in/b.pth": bytes(6000), "notes.txt": b"x"}
    hub.repositories["owner/many"] = Repository(files)
    lines = everstream.refused("pull", "owner/many").splitlines()
    assert [line.strip() for line in lines] == [
        "owner/many has 2 models; name one of them:",
        "owner/many:a.pth  5 kB",
        "owner/many:in/b.pth  6 kB",
    ]
    assert everstream.pull("owner/many", "--file", "in/b.pth").name == "b.pth"
    assert everstream.pull("owner/many:a.pth").name == "a.pth"
    assert hub.gets() == [("in/b.pth", 0), ("a.pth", 0)]
    assert "has no file 'c.pth'" in everstream.refused("pull", "owner/many", "--file", "c.pth")


def test_what_a_repository_lacks_is_said(everstream: Commands, hub: Hub) -> None:
    hub.repositories["owner/text"] = Repository({"README.md": b"x"})
    hub.repositories["owner/bert"] = Repository(
        {"config.json": b'{"model_type": "bamba"}', "model.safetensors": bytes(9999)}
    )
    assert "has no model that can be loaded" in everstream.refused("pull", "owner/text")
    assert "bamba models are not supported" in everstream.refused("pull", "owner/bert")
    assert [path for path, _ in hub.gets()] == ["config.json"]


def test_file_without_a_place_or_a_digest_is_passed_over(
    everstream: Commands, hub: Hub, cache: Path
) -> None:
    """A hub cannot make this machine write outside of the cache."""
    files = {f"{name}.pth": os.urandom(5000) for name in ("../../../out", "/out", "in/../../out")}
    hub.repositories["owner/bad"] = Repository({**files, "good.pth": b"x" * 5000})
    assert everstream.pull("owner/bad").name == "good.pth"
    hub.repositories["owner/bad"].stated = {"good.pth": {"sha256": "../../../out"}}
    everstream.run("models", "rm", "owner/bad")
    assert "has no model" in everstream.refused("pull", "owner/bad")
    assert [path.name for path in cache.rglob("*out*")] == []


@pytest.mark.parametrize("num_bytes", [100, 5000], ids=["small", "large"])
@pytest.mark.parametrize("what", ["etags", "commits"])
def test_header_that_would_name_a_file_elsewhere_is_refused(
    everstream: Commands, hub: Hub, cache: Path, what: str, num_bytes: int
) -> None:
    repository = hub.repositories["owner/bad"] = Repository({"a.pth": bytes(num_bytes)})
    setattr(repository, what, {"a.pth": "../../../../escaped"})
    message = everstream.refused("pull", "owner/bad")
    assert "owner/bad: a.pth is not available from the hub: its " in message
    assert list(cache.parent.rglob("*escaped*")) == []


def test_two_pulls_of_one_file_share_the_download(
    everstream: Commands, hub: Hub, cache: Path
) -> None:
    hub.repositories["owner/one"] = Repository({"one.pth": os.urandom(5000)}, num_readers=2)
    environment = {**os.environ, **hub.environment(cache)}
    words = [sys.executable, "-m", "server.cli.main", "pull", "owner/one"]
    pulls = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) for _ in "12"]
    found = {pull.communicate()[0] for pull in pulls}
    assert [each.path for each in hub.asked if each.origin == "storage"] == ["one.pth"]
    assert found == {f"{everstream.pull('owner/one')}\n".encode()}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["pull", "owner/none"], "there is no such repository"),
        (["generate", "x", "--model", "owner/none"], "there is no such repository"),
        (["eval", "owner/none", "--data", "README.md"], "there is no such repository"),
        (["export", "owner/none", "OUT"], "there is no such repository"),
        (["quantize", "owner/none", "OUT"], "there is no such repository"),
        (["pull", "owner/gated"], "it is gated"),
        (["pull", "owner/gated", "--revision", "v9"], "it has no revision 'v9'"),
        (["pull", "owner/gated@v1", "--revision", "v1"], "--revision is given twice"),
        (["pull", "owner"], "a name is OWNER/NAME[@REVISION][:FILE]"),
        (["pull", "owner/gated:../x.pth"], "'../x.pth' is not a file of a repository"),
        (["models", "rm", "owner/none"], "nothing is on disk"),
        (["models", "rm", "owner/none:x.pth"], "nothing is on disk"),
        (["models", "rm", "owner/none:../../x"], "is not a file of a repository"),
        (["models", "rm", "everstream-stories"], "only a pulled OWNER/NAME[:FILE]"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    everstream: Commands, hub: Hub, words: list[str], reason: str
) -> None:
    hub.repositories["owner/gated"] = Repository({"a.pth": bytes(9999)}, gated=True)
    message = everstream.refused(*words)
    assert reason in message
    assert len(message.splitlines()) == 1


def test_token_opens_a_gated_repository_and_stays_with_the_hub(
    everstream: Commands, hub: Hub
) -> None:
    hub.repositories["owner/gated"] = Repository({"a.pth": bytes(9999)}, gated=True)
    assert everstream.refused("pull", "owner/gated", HF_TOKEN="hf_wrong") == (
        "owner/gated is not available from the hub: the hub answered 401:"
        " Invalid credentials in Authorization header"
    )
    hub.asked.clear()
    assert everstream.pull("owner/gated", HF_TOKEN=TOKEN).read_bytes() == bytes(9999)
    assert {each.token for each in hub.asked if each.origin == "hub"} == {TOKEN}
    assert {each.token for each in hub.asked if each.origin == "storage"} == {None}


def test_model_on_disk_is_used_offline_and_another_one_fails_in_one_line(
    everstream: Commands, hub: Hub, cache: Path, models: Path
) -> None:
    hub.add("owner/native", models / "native")
    everstream.pull("owner/native", "--revision", "v1")
    hub.asked.clear()
    offline = hub.environment(cache) | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    with commands(offline) as others:
        found = others.run("inspect", "owner/native@v1:small.pth")
        assert found.status == 0, found.stderr
        assert "rwkv7" in found.stdout
        assert others.refused("inspect", "owner/native") == (
            "owner/native is not available from the hub: "
            "it is not on disk, and HF_HUB_OFFLINE is set"
        )
    assert hub.asked == []


def test_hub_that_cannot_be_reached_is_one_line(cache: Path, hub: Hub) -> None:
    with commands(hub.environment(cache) | {"HF_ENDPOINT": "http://127.0.0.1:1"}) as others:
        message = others.refused("inspect", "owner/nothing")
    assert message.startswith("owner/nothing is not available from the hub: ")
    assert len(message.splitlines()) == 1


def test_newer_commit_keeps_the_files_that_did_not_change(everstream: Commands, hub: Hub) -> None:
    repository = Repository({"a.pth": os.urandom(5000), "b.pth": os.urandom(5000)})
    hub.repositories["owner/two"] = repository
    everstream.pull("owner/two:a.pth")
    repository.files["b.pth"] = os.urandom(6000)
    newer = everstream.pull("owner/two:b.pth")
    assert newer.with_name("a.pth").read_bytes() == repository.files["a.pth"]
    assert hub.gets() == [("a.pth", 0), ("b.pth", 0)]


def test_path_on_disk_wins_over_a_name(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "fla").symlink_to(models / "fla")
    monkeypatch.chdir(tmp_path)
    assert locate("owner/fla") == Path("owner/fla")


def test_library_of_the_hub_finds_what_was_pulled(
    everstream: Commands, hub: Hub, cache: Path, models: Path
) -> None:
    hub.add("owner/fla", models / "fla")
    folder = everstream.pull("owner/fla")
    hub.asked.clear()
    code = """
import huggingface_hub as hub
print(hub.hf_hub_download("owner/fla", "config.json"))
print(hub.snapshot_download("owner/fla", allow_patterns="*.safetensors", local_files_only=True))
"""
    environment = {**os.environ, **hub.environment(cache)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == [str(folder / "config.json"), str(folder)], done.stderr
    assert hub.gets() == []


def test_real_model_is_equal_in_both_forms(models: Path) -> None:
    ids = torch.arange(1, 20).unsqueeze(0)
    native, fla = (load_checkpoint(models / name) for name in ("native/small.pth", "fla"))
    assert torch.equal(native.model.parallel(ids), fla.model.parallel(ids))
