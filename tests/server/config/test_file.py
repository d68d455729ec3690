"""`--config FILE`: what wins over what, and what is said of a file that cannot be used."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from server.config import ConfigError, ModelSource, ServerConfig
from tests.docs.pages import page


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "everstream.toml"


def load(file: Path, text: str, **flags: object) -> ServerConfig:
    file.write_text(text)
    return ServerConfig.load({}, config=file, **flags)


def refusal(file: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, text)
    return str(caught.value)


def test_every_kind_of_setting_can_be_in_the_file(file: Path) -> None:
    text = """
port = 9000
state_memory = "2GiB"
session_ttl_s = 2.5
continue_on_start = true
api_keys = ["one", "two"]
model = ["small=runs/small", "large=runs/large"]
"""
    config = load(file, text)
    assert (config.port, config.state_memory, config.session_ttl_s) == (9000, 2 << 30, 2.5)
    assert config.continue_on_start
    assert config.api_keys == ("one", "two")
    assert [source.name for source in config.model] == ["small", "large"]


def test_flag_wins_over_variable_over_file_over_default(file: Path) -> None:
    file.write_text("port = 1\nthreads = 1\nmax_waiting = 1\n")
    variables = {"EVERSTREAM_PORT": "2", "EVERSTREAM_THREADS": "2", "EVERSTREAM_CONFIG": str(file)}
    config = ServerConfig.load(variables, port=3)
    assert (config.port, config.threads, config.max_waiting) == (3, 2, 1)
    assert config.session_ttl_s == ServerConfig().session_ttl_s


def test_flag_that_names_a_file_wins_over_the_variable(file: Path, tmp_path: Path) -> None:
    file.write_text("port = 1\n")
    variables = {"EVERSTREAM_CONFIG": str(tmp_path / "none.toml")}
    assert ServerConfig.load(variables, config=file).port == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 70000", "{file}: port: input should be less than or equal to 65535"),
        ('state_memory = "lots"', "{file}: state_memory: must be a size such as 512MiB or 2GiB"),
        ("api_keys = [1]", "{file}: api_keys: input should be a valid string"),
        ('api_keys = ["s3cret\\n"]', "{file}: api_keys: a key must be printable ASCII"),
        ("porte = 1", "--config: {file}: porte: unknown setting; is port meant?"),
        ("qqq = 1", "--config: {file}: qqq: unknown setting"),
        ('config = "other.toml"', "--config: {file}: config: unknown setting"),
        ("[server]\nport = 1", "--config: {file}: server: unknown setting"),
        ("[store]\npath = 1", "--config: {file}: store: must be a string, a number"),
        ("port = ", "--config: {file}: not TOML: Invalid value (at end of document)"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(file: Path, text: str, words: str) -> None:
    message = refusal(file, text)
    assert message.startswith(words.format(file=file))
    assert "\n" not in message
    assert "s3cret" not in message


def test_a_bad_flag_is_not_blamed_on_the_file(file: Path) -> None:
    file.write_text("port = 1\n")
    with pytest.raises(ConfigError, match=re.escape("--port (EVERSTREAM_PORT): ")):
        ServerConfig.load({}, config=file, port=70_000)


def test_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"--config: {file}: No such file"):
        ServerConfig.load({}, config=file)


def test_file_that_is_no_text_is_named(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML: not UTF-8"):
        ServerConfig.load({}, config=file)


def test_example_of_the_page_can_be_loaded(file: Path) -> None:
    (text,) = re.findall(r"(?s)```toml\n(.*?)```", page("settings.md"))
    config = load(file, text)
    values = tomllib.loads(text)
    assert config.model_fields_set == values.keys() | {"config", "store"}
    assert config.allowed_origins == tuple(values["allowed_origins"])


def test_served_name_is_the_models_and_leaves_its_sessions_where_they_are() -> None:
    plain = ServerConfig.load({}, model=("runs/mine",))
    named = ServerConfig.load({}, model=("runs/mine",), served_model_name="gpt-4o")
    assert named.model == (ModelSource("gpt-4o", "runs/mine"),)
    assert named.store == plain.store
    bundled = ServerConfig.load({}, served_model_name="gpt-4o")
    assert bundled.model == (ModelSource("gpt-4o", None),)


@pytest.mark.parametrize("model", [("a=runs/a",), ("runs/a", "b=runs/b")])
def test_served_name_is_for_one_model_without_a_name(model: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--served-model-name is for one model"):
        ServerConfig.load({}, model=model, served_model_name="x")


def test_served_name_must_be_a_name() -> None:
    with pytest.raises(ConfigError, match=r"--served-model-name \(EVERSTREAM_SERVED_MODEL_NAME\)"):
        ServerConfig.load({}, served_model_name="no/slash")


def test_world_writable_file_is_refused(file: Path) -> None:
    file.write_text("port = 9000\n")
    file.chmod(0o646)
    with pytest.raises(ConfigError, match="everybody may write it; chmod 600"):
        ServerConfig.load({}, config=file)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o660, 1)])
def test_world_readable_keys_are_a_warning(
    file: Path, mode: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    for text, num_warnings in (('api_keys = ["one"]', warned), ("port = 9000", 0)):
        file.write_text(text)
        file.chmod(mode)
        caplog.clear()
        ServerConfig.load({}, config=file)
        assert len(caplog.records) == num_warnings
        assert '"one"' not in caplog.text
