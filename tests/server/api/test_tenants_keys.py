"""The file of keys and the ring: what is read, what is refused, and what a reload changes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from server.api.auth import (
    ALL_SCOPES,
    Caller,
    KeyEntry,
    Keyring,
    KeysFileError,
    Limits,
    RateLimited,
    digest_of,
    read_keys,
)
from server.api.errors import InvalidApiKey
from server.cli.keys import key_command
from tests.docs.pages import names, page, rows, section
from tests.server.api.keys import ALICE, BOB, ROOT


def entry(name: str, key: str, scopes: str = '"generate"', limits: str = "") -> str:
    table = (
        f'[[key]]\nname = "{name}"\nhash = "sha256:{digest_of(key).hex()}"\nscopes = [{scopes}]\n'
    )
    return table + (f"[key.limits]\n{limits}\n" if limits else "")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "keys.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def caller(keyring: Keyring, key: str) -> Caller:
    found = keyring.caller(key)
    assert found is not None, key
    return found


# The file


def test_file_gives_each_key_its_tenant_scopes_and_limits(write: Callable[[str], Path]) -> None:
    limits = 'requests_per_minute = 60\nmax_stored_bytes = "2GiB"\nmax_sessions = 0'
    text = entry("alice", ALICE, '"generate", "sessions"', limits) + entry("root", ROOT, '"admin"')
    keyring = Keyring(keys_file=write(text))
    alice, root = caller(keyring, ALICE), caller(keyring, ROOT)
    assert (alice.tenant.name, alice.scopes) == ("alice", {"generate", "sessions"})
    assert alice.tenant.limits == Limits(
        requests_per_minute=60, max_stored_bytes=2 << 30, max_sessions=0
    )
    assert (root.tenant.name, root.scopes) == ("root", {"admin"})
    assert root.tenant.limits == Limits()
    assert keyring.caller("wrong") is keyring.caller(None) is keyring.caller("") is None


def test_keys_of_one_tenant_share_its_limits(write: Callable[[str], Path]) -> None:
    text = entry("alice", ALICE) + entry("alice", BOB, limits="max_running = 1")
    keyring = Keyring(keys_file=write(text))
    assert caller(keyring, ALICE).tenant is caller(keyring, BOB).tenant
    assert caller(keyring, ALICE).tenant.limits == Limits(max_running=1)


def test_flags_and_file_go_together(write: Callable[[str], Path]) -> None:
    keyring = Keyring((BOB,), (ROOT,), write(entry("alice", ALICE)))
    names = {caller(keyring, key).tenant.name for key in (ALICE, BOB, ROOT)}
    assert names == {"alice", digest_of(BOB).hex(), digest_of(ROOT).hex()}


def changed(**fields: str | None) -> str:
    """A right table with ``fields`` in the place of its own; None takes one out."""
    lines = {
        "name": '"alice"',
        "hash": f'"sha256:{"a" * 64}"',
        "scopes": '["generate"]',
        **fields,
    }
    return "[[key]]\n" + "".join(f"{k} = {v}\n" for k, v in lines.items() if v is not None)


LIMITS = "\n[key.limits]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no [[key]] table"),
        ("key = []", "has no [[key]] table"),
        ("key = 3", "has no [[key]] table"),
        ("key = [3]", "key 1: "),
        ("keys = []", "keys: is unknown"),
        ("[[key]\n", "is not TOML"),
        (changed(name=None), "key 1: name: is missing"),
        (changed(name='"Alice"'), "key 1: name: must be 1 to 63 of a-z"),
        (changed(name='"alice\\n"'), "key 1: name: must be"),
        (changed(name='"anyone"'), "key 1 (anyone): name: "),
        (changed(name=f'"{"a" * 64}"'), "key 1: name: must be"),
        (changed(hash=None), "key 1 (alice): hash: is missing"),
        (changed(hash='"secret"'), "key 1 (alice): hash: must be sha256:"),
        (changed(hash=f'"sha256:{"A" * 64}"'), "key 1 (alice): hash: must be sha256:"),
        (changed(hash=f'"md5:{"a" * 32}"'), "key 1 (alice): hash: must be sha256:"),
        (changed(scopes=None), "key 1 (alice): scopes: is missing"),
        (changed(scopes="[]"), "key 1 (alice): scopes: must not be empty"),
        (changed(scopes='["write"]'), "key 1 (alice): scopes.0: must be 'generate', "),
        (changed(scopes='"generate"'), "key 1 (alice): scopes: "),
        (changed(key='"secret"'), "key 1 (alice): key: is no field of this table"),
        (changed(limits="3"), "key 1 (alice): limits: "),
        (changed() + LIMITS + "speed = 1", "key 1 (alice): limits.speed: is no field"),
        *(
            (changed() + LIMITS + f"{field} = -1", f"key 1 (alice): limits.{field}: ")
            for field in Limits.model_fields
        ),
        *(
            (changed() + LIMITS + f"{field} = {value}", f"key 1 (alice): limits.{field}: ")
            for field in ("max_running", "max_sessions", "max_stored_bytes")  # one of each type
            for value in ("1.5", "true", "nan", '"many"', "9007199254740993", "[1]")
        ),
        (changed() + LIMITS + "max_running = 0", "key 1 (alice): limits.max_running: must be"),
        (changed() + LIMITS + 'max_running = "1"', "key 1 (alice): limits.max_running: must be"),
        (changed() + LIMITS + 'max_stored_bytes = "2 cows"', "limits.max_stored_bytes: must be a"),
        (changed() + changed(name='"bob"'), "key 2 (bob): hash: is that of key 1"),
        (
            entry("alice", "a", limits="max_running = 1")
            + entry("bob", "b", limits="max_running = 3")
            + entry("alice", "c", limits="max_running = 2"),
            "key 3 (alice): limits: another key of alice",
        ),
    ],
)
def test_mistake_in_the_file_is_named(
    write: Callable[[str], Path], text: str, message: str
) -> None:
    path = write(text)
    with pytest.raises(KeysFileError) as refused:
        Keyring(keys_file=path)
    said = str(refused.value)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "secret" not in said and "\n" not in said


def test_file_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="No such file"):
        Keyring(keys_file=tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysFileError, match="is not TOML"):
        read_keys(tmp_path / "bytes.toml")


def test_key_in_the_place_of_a_name_is_not_repeated(write: Callable[[str], Path]) -> None:
    path = write(changed(name='"es-SecretSecret"'))
    with pytest.raises(KeysFileError) as refused:
        Keyring(keys_file=path)
    assert "Secret" not in str(refused.value)


def test_key_that_is_a_flag_as_well_is_a_mistake(write: Callable[[str], Path]) -> None:
    with pytest.raises(KeysFileError, match="hash: is that of a flag"):
        Keyring((ALICE,), keys_file=write(entry("alice", ALICE)))


def test_page_shows_a_right_file_and_every_limit_and_scope(write: Callable[[str], Path]) -> None:
    text = page("tenants.md")
    (example,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    keyring = Keyring(keys_file=write(example))
    assert set(keyring.tenants) == {"alice", "operator"}
    assert None not in keyring.tenants["alice"].limits.model_dump().values()
    limits = [names(row[0])[0] for row in rows(section(text, "Limits"))]
    assert limits == list(Limits.model_fields)
    assert {names(row[0])[0] for row in rows(section(text, "Scopes"))} == ALL_SCOPES


# Reading it again


def test_reload_brings_new_keys_scopes_and_limits(write: Callable[[str], Path]) -> None:
    keyring = Keyring(keys_file=write(entry("alice", ALICE, limits="requests_per_minute = 1")))
    alice = caller(keyring, ALICE)
    alice.request("generate")
    write(entry("alice", ALICE, '"read"', "requests_per_minute = 2") + entry("bob", BOB))
    keyring.reload()
    assert caller(keyring, ALICE) is alice
    assert alice.scopes == {"read"}
    with pytest.raises(RateLimited) as refused:  # the bucket is as empty as it was
        alice.request("read")
    assert refused.value.retry_after_s <= 30.001
    assert caller(keyring, BOB).tenant.name == "bob"


def test_key_that_is_taken_out_is_refused_on_open_sockets_too(
    write: Callable[[str], Path],
) -> None:
    keyring = Keyring(keys_file=write(entry("alice", ALICE) + entry("bob", BOB)))
    alice = caller(keyring, ALICE)
    alice.request("generate")
    write(entry("bob", BOB))
    keyring.reload()
    assert keyring.caller(ALICE) is None
    with pytest.raises(InvalidApiKey):
        alice.request("generate")
    caller(keyring, BOB).request("generate")


def test_restored_key_does_not_reopen_sockets(write: Callable[[str], Path]) -> None:
    keyring = Keyring(keys_file=write(entry("alice", ALICE) + entry("bob", BOB)))
    alice = caller(keyring, ALICE)
    for text in (entry("bob", BOB), entry("alice", ALICE)):
        write(text)
        keyring.reload()
    assert alice.revoked
    caller(keyring, ALICE).request("generate")


def test_key_moved_to_another_tenant_revokes_its_old_caller(
    write: Callable[[str], Path],
) -> None:
    keyring = Keyring(keys_file=write(entry("alice", ALICE)))
    alice = caller(keyring, ALICE)
    write(entry("bob", ALICE))
    keyring.reload()
    assert alice.revoked
    assert caller(keyring, ALICE).tenant.name == "bob"


def test_mistake_at_reload_changes_nothing(write: Callable[[str], Path]) -> None:
    keyring = Keyring((BOB,), keys_file=write(entry("alice", ALICE, limits="max_running = 1")))
    alice = caller(keyring, ALICE)
    for text in ("", entry("alice", ALICE, '"read"') + "[", entry("alice", BOB)):
        write(text)
        with pytest.raises(KeysFileError):
            keyring.reload()
        assert caller(keyring, ALICE) is alice
        assert not alice.revoked
        assert alice.scopes == {"generate"}
        assert alice.tenant.limits == Limits(max_running=1)


# The command


def key(*args: str) -> Result:
    app = typer.Typer()
    app.command()(key_command)
    return CliRunner().invoke(app, args)


def test_new_key_opens_what_its_table_says(write: Callable[[str], Path]) -> None:
    results = [key("alice"), key("root", "--scope", "admin", "--scope", "read")]
    keys = [result.stderr.splitlines()[-1] for result in results]
    keyring = Keyring(keys_file=write("".join(result.stdout for result in results)))
    assert caller(keyring, keys[0]).tenant.name == "alice"
    assert caller(keyring, keys[0]).scopes == {"generate", "sessions", "read"}
    assert caller(keyring, keys[1]).scopes == {"admin", "read"}


def test_new_key_is_shown_once_and_has_256_bits() -> None:
    results = [key("alice") for _ in range(20)]
    shown = [result.stderr.splitlines()[-1] for result in results]
    assert len(set(shown)) == 20
    for text, result in zip(shown, results, strict=True):
        assert len(text.removeprefix("es-")) == 43  # base64 of 32 bytes
        assert text not in result.stdout
        (table,) = tomllib.loads(result.stdout)["key"]
        assert KeyEntry.model_validate(table).digest == digest_of(text)


@pytest.mark.parametrize(
    "args", [("Alice",), ("",), ("anyone",), ("a" * 64,), ('a"b',), ("alice", "--scope", "all")]
)
def test_key_for_what_the_file_would_refuse_is_not_made(args: tuple[str, ...]) -> None:
    result: Any = key(*args)
    assert result.exit_code == 2
    assert "es-" not in result.output
