from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.cluster.ray.application import read_settings, settings_of
from server.config import ConfigError, ServerConfig


def test_what_was_chosen_is_read_back_as_it_was(tmp_path: Path) -> None:
    chosen = ServerConfig.load(
        {},
        model=(f"a={tmp_path}", f"b={tmp_path}"),
        api_keys=("one", "two"),
        state_memory="2GiB",
        drain_timeout_s=3,
        replicas="2-5",
        store="memory",
        speculation="off",
        max_tokens_limit=77,
        allowed_origins=("https://a.example",),
        keys_file=tmp_path / "keys.toml",
        state=(f"one={tmp_path}/f", f"b/two={tmp_path}/g"),
    )
    settings = json.loads(json.dumps(settings_of(chosen)))
    assert read_settings(settings) == chosen


def test_bundled_model_is_named_by_nobody() -> None:
    chosen = ServerConfig.load({}, store="memory")
    assert settings_of(chosen) == {"store": "memory"}
    assert read_settings(settings_of(chosen)).model == chosen.model


def test_paths_mean_the_same_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    chosen = ServerConfig.load(
        {}, model=("m", "n=m"), model_dir="models", store="memory", state=("a=f", "t=transposed:g")
    )
    settings = settings_of(chosen)
    assert settings["state"] == [f"a={tmp_path}/f", f"t=transposed:{tmp_path}/g"]
    assert settings["model"] == [f"{tmp_path}/m", f"n={tmp_path}/m"]
    assert settings["model_dir"] == f"{tmp_path}/models"


def test_hub_id_stays_as_it_is() -> None:
    chosen = ServerConfig.load({}, model=("someone/model",), store="memory")
    assert settings_of(chosen)["model"] == ["someone/model"]


def test_replica_is_not_told_where_the_proxy_listens() -> None:
    chosen = ServerConfig.load({}, host="0.0.0.0", port=1, ray=True, ray_address="a:1", store="m")
    assert settings_of(chosen) == {"store": "m"}


def test_variables_of_the_machine_fill_what_was_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVERSTREAM_API_KEYS", "hush")
    monkeypatch.setenv("EVERSTREAM_MAX_WAITING", "3")
    config = read_settings({"store": "memory", "max_waiting": 5})
    assert (config.api_keys, config.max_waiting) == (("hush",), 5)


def test_file_may_have_a_number_of_replicas() -> None:
    assert read_settings({"replicas": 3, "store": "memory"}).num_replicas == (3, 3)


@pytest.mark.parametrize(
    "settings", [{"replicas": "0"}, {"replicas": "3-2"}, {"replica": 2}, {"threads": 0}]
)
def test_what_cannot_be_is_an_error(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"replica|threads"):
        read_settings(settings)
