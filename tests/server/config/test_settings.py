from __future__ import annotations

from pathlib import Path

import pytest
from typer import Context
from typer.main import get_group

from model.bundled_models import bundled_models
from model.checkpoint_files import Lora
from server.cli.main import app
from server.config import (
    SHARED_SAVE_INTERVAL,
    VARIABLE_ONLY,
    ConfigError,
    ModelSource,
    ServerConfig,
    StateFile,
    flag_of,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("3 TB", 3 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 Gib s", "1e9", "2XB", "nan"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_bytes(text)


def test_flags_win_over_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTREAM_PORT", "9000")
    monkeypatch.setenv("EVERSTREAM_HOST", "0.0.0.0")
    config = ServerConfig.load(port=7000, host=None)
    assert (config.port, config.host, config.drain_timeout_s) == (7000, "0.0.0.0", 10.0)


def test_variables_are_read_as_their_fields_are() -> None:
    environment = {
        "EVERSTREAM_THREADS": "3",
        "EVERSTREAM_BACKEND": "native",
        "EVERSTREAM_SESSION_TTL_S": "2.5",
        "EVERSTREAM_TYPO": "1",
        "PORT": "1",
    }
    config = ServerConfig.load(environment)
    assert (config.threads, config.backend, config.session_ttl_s) == (3, "native", 2.5)
    assert config.port == 8000


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_variable_is_the_default(empty: str) -> None:
    """Compose and Helm set variables to nothing. But nothing may open the server by that."""
    protecting = {"api_keys", "admin_keys", "keys_file", "signing_key"}
    names = ServerConfig.model_fields.keys() - protecting
    environment = {f"EVERSTREAM_{name.upper()}": empty for name in names}
    assert ServerConfig.load(environment) == ServerConfig.load({})
    for name in protecting | {"api_key", "admin_key"}:
        variable = f"EVERSTREAM_{name.upper()}"
        with pytest.raises(ConfigError, match=f"^{variable}: is set and empty"):
            ServerConfig.load({variable: empty})


def test_address_in_the_place_of_a_port_is_told_from_a_typo() -> None:
    """As Kubernetes sets it where a Service has the name of the variables."""
    with pytest.raises(ConfigError, match=r"--port \(EVERSTREAM_PORT\): is an address;.*Links: fa"):
        ServerConfig.load({"EVERSTREAM_PORT": "tcp://10.96.0.17:8000"})
    with pytest.raises(ConfigError, match=r"--port \(EVERSTREAM_PORT\): input should be"):
        ServerConfig.load({"EVERSTREAM_PORT": "http"})


def test_reasoning_is_a_word_or_a_number_of_tokens() -> None:
    for given in ("on", "off", "template", "500", 500, None):
        found = None if given is None else str(given)
        assert ServerConfig.load({}, reasoning=given).reasoning == found


def test_lists_come_from_the_environment_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTREAM_API_KEYS", "one, two,")
    monkeypatch.setenv("EVERSTREAM_ALLOWED_ORIGINS", "https://a.example")
    monkeypatch.setenv("EVERSTREAM_STATE_MEMORY", "2GiB")
    config = ServerConfig.load()
    assert config.api_keys == ("one", "two")
    assert config.allowed_origins == ("https://a.example",)
    assert config.state_memory == 2 << 30


def test_keys_are_not_in_repr() -> None:
    assert "hush" not in repr(ServerConfig(api_keys=("hush",)))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": 70_000}, "--port"),
        ({"threads": 0}, "--threads"),
        ({"reasoning": "0"}, "--reasoning"),
        ({"reasoning": "yes"}, "--reasoning"),
        ({"reasoning": "1e3"}, "--reasoning"),
        ({"max_sessions": 0}, "--max-sessions"),
        ({"state_memory": "lots"}, "--state-memory"),
        ({"session_ttl_s": 0}, "--session-ttl "),
        ({"session_ttl_s": float("nan")}, "--session-ttl "),
        ({"drain_timeout_s": -1}, "--drain-timeout "),
        ({"max_sessions": 1, "state_memory": "1GiB"}, "--max-sessions and --state-memory"),
        ({"allowed_origins": "example.com"}, "--allow-origin"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"dtype": "int2"}, "--dtype"),
        ({"backend": "cuda"}, "--backend"),
    ],
)
def test_bad_setting_is_named_by_its_flag(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerConfig.load(**flags)


def test_setting_without_a_flag_is_named_by_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"^EVERSTREAM_MAX_BODY_BYTES: ") as error:
        ServerConfig.load(max_body_bytes=1)
    assert "--" not in str(error.value)


def test_every_named_flag_exists() -> None:
    group = get_group(app)
    serve = group.get_command(Context(group), "serve")
    assert serve is not None
    flags = {option for parameter in serve.params for option in parameter.opts}
    fields = ServerConfig.model_fields.keys() - VARIABLE_ONLY
    assert {flag_of(field) for field in fields} <= flags


def test_bad_key_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig.load(api_keys="hush\x00hush")
    assert "hush" not in str(error.value)


def test_tokenizer_is_that_of_the_one_model() -> None:
    config = ServerConfig.load({}, model=("a.gguf",), tokenizer=Path("t.json"))
    assert config.model == (ModelSource("a.gguf", "a.gguf", tokenizer=Path("t.json")),)
    with pytest.raises(ConfigError, match="--tokenizer is for one model"):
        ServerConfig.load({}, model=("a=x", "b=y"), tokenizer=Path("t.json"))


def test_draft_model_is_for_one_model_that_drafts() -> None:
    config = ServerConfig.load({"EVERSTREAM_DRAFT_MODEL": "small"}, speculation="auto")
    assert config.draft_model == "small"
    with pytest.raises(ConfigError, match="--draft-model needs --speculation auto"):
        ServerConfig.load({}, speculation="off", draft_model="small")
    for several in ({"model": ("a=x", "b=y")}, {"model_dir": Path("models")}):
        with pytest.raises(ConfigError, match="--draft-model is for one model"):
            ServerConfig.load({}, speculation="auto", draft_model="small", **several)
    with pytest.raises(ConfigError, match="--draft-model"):
        ServerConfig.load({}, speculation="auto", draft_model="")


def test_flags() -> None:
    assert [flag_of(name) for name in ("api_keys", "max_sessions", "session_ttl_s")] == [
        "--api-key",
        "--max-sessions",
        "--session-ttl",
    ]


def test_model_is_a_path_or_has_a_name_of_its_own() -> None:
    assert ServerConfig().model == (ModelSource("everstream-stories", None),)
    assert ServerConfig.load(model=("runs/mine",)).model == (ModelSource("mine", "runs/mine"),)
    assert ServerConfig.load(model=("runs/mine", "b=runs/other")).model == (
        ModelSource("mine", "runs/mine"),
        ModelSource("b", "runs/other", is_named=True),
    )
    assert ServerConfig.load(model=("./lr=3",)).model == (ModelSource("lr=3", "./lr=3"),)
    variable = {"EVERSTREAM_MODEL": "a=x, b=owner/name"}
    assert [source.name for source in ServerConfig.load(variable).model] == ["a", "b"]


@pytest.mark.parametrize("models", [("a=x", "a=y"), ("x/a", "y/b"), ("x/a", "a=y"), ("",), ","])
def test_indistinguishable_models_are_refused(models: object) -> None:
    with pytest.raises(ConfigError, match="--model"):
        ServerConfig.load(model=models)


def test_bundled_models_have_their_names_among_others() -> None:
    stories = "everstream-stories"
    assert ServerConfig.load(model=(stories,)).model == (ModelSource(stories, stories),)
    assert ServerConfig.load(model=(stories, "b=y")).model == (
        ModelSource(stories, stories),
        ModelSource("b", "y", is_named=True),
    )
    assert ServerConfig.load(model=("runs/mine", stories)).model == (
        ModelSource("mine", "runs/mine"),
        ModelSource(stories, stories, is_named=True),
    )
    every = ServerConfig.load(model=tuple(bundled_models())).model
    assert [each.name for each in every] == list(bundled_models())
    assert [each.name for each in every if not each.is_named] == [stories]


def test_store_is_a_folder_of_the_unnamed_model_or_of_all() -> None:
    home = {"XDG_STATE_HOME": "/state"}
    for models, store in (
        (None, "/state/everstream/everstream-stories"),
        (("x/mine",), "/state/everstream/mine"),
        (("b=y", "x/mine"), "/state/everstream/mine"),
        (("a=x",), "/state/everstream"),
    ):
        assert ServerConfig.load(home, model=models).store == store
    assert ServerConfig.load(home, store="/there").store == "/there"


def test_states_are_saved_more_often_where_others_may_have_to_take_over() -> None:
    shared = "postgresql://everstream@localhost/everstream"
    assert ServerConfig.load({}).save_interval_tokens == 1024
    assert ServerConfig.load({}, store=shared).save_interval_tokens == SHARED_SAVE_INTERVAL
    chosen = {"EVERSTREAM_SAVE_INTERVAL_TOKENS": "512"}
    assert ServerConfig.load(chosen, store=shared).save_interval_tokens == 512


def test_states_belong_to_models() -> None:
    config = ServerConfig.load(
        {"EVERSTREAM_STATE": "a=one.state, m/b=x=y, n/a=~/other.pth"}, model=("m=x", "n=y")
    )
    assert config.states_of("m") == {"a": StateFile(Path("one.state")), "b": StateFile(Path("x=y"))}
    assert config.states_of("n") == {"a": StateFile(Path("~/other.pth").expanduser())}
    named = ServerConfig.load({}, model=("x",), served_model_name="m", state=("m/a=f", "b=g"))
    assert named.states_of("m") == {"a": StateFile(Path("f")), "b": StateFile(Path("g"))}


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (("a",), "NAME=FILE"),
        (("=f",), "NAME=FILE"),
        (("a=",), "NAME=FILE"),
        (("../a=f",), "NAME=FILE"),
        (("x/a=f",), "x/a: no model has this name"),
        (("a=f", "a=g"), "two states of a model have the same name"),
        (("a=f", "m/a=g"), "two states of a model have the same name"),
    ],
)
def test_state_that_cannot_be_is_refused(states: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig.load({}, model=("m=x", "n=y"), state=states)


def test_lora_is_for_one_model() -> None:
    config = ServerConfig.load({"EVERSTREAM_LORA": "a.pth, ~/b", "EVERSTREAM_LORA_ALPHA": "16"})
    assert config.model[0].lora == Lora((Path("a.pth"), Path("~/b").expanduser()), 16.0)
    with pytest.raises(ConfigError, match="--lora is for one model"):
        ServerConfig.load({}, model=("m=x", "n=y"), lora=("a.pth",))
    with pytest.raises(ConfigError, match="--lora-alpha needs --lora"):
        ServerConfig.load({}, lora_alpha=16.0)


def test_state_may_be_transposed() -> None:
    config = ServerConfig.load(
        {}, model=("m=x",), state=("a=transposed:~/x.pth", "b=./transposed:y")
    )
    assert config.states_of("m") == {
        "a": StateFile(Path("~/x.pth").expanduser(), transposed=True),
        "b": StateFile(Path("./transposed:y")),
    }


def test_two_states_of_a_served_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two states of a model have the same name"):
        ServerConfig.load({}, model=("x",), served_model_name="m", state=("a=f", "m/a=g"))


@pytest.mark.parametrize("proxy", ["proxy.lan", "10.0.0.0/33", "10.0.0.1:80", ""])
def test_proxy_is_an_address_or_a_network(proxy: str) -> None:
    with pytest.raises(ConfigError, match=r"^--trusted-proxy \(EVERSTREAM_TRUSTED_PROXIES\): "):
        ServerConfig.load({}, trusted_proxies=(proxy,))
    assert ServerConfig.load({"EVERSTREAM_TRUSTED_PROXIES": "10.0.0.0/8, ::1"}).trusted_proxies
