"""`deploy/systemd`: what the unit says, against the server and, where there is one, systemd."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from server.config import PREFIX, ServerConfig
from tests.deploy.manifests import DEPLOY

UNIT = DEPLOY / "systemd" / "everstream.service"
TEMPLATE = DEPLOY / "systemd" / "everstream@.service"
DEPLOYMENT = (DEPLOY.parent / "docs/operate/deploy.md").read_text("utf-8")


def settings_of(text: str) -> dict[str, dict[str, list[str]]]:
    """Section -> name -> values. Raises `AssertionError` for a line that is no part of a unit."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            found[section] = defaultdict(list)
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals and name.isalnum() and section, line
            found[section][name].append(value)
    return found


@pytest.fixture(scope="module")
def unit() -> dict[str, dict[str, list[str]]]:
    found = settings_of(UNIT.read_text())
    assert set(found) == {"Unit", "Service", "Install"}
    return found


def test_environment_is_of_settings_and_loads(unit: dict[str, dict[str, list[str]]]) -> None:
    pairs = [line.partition("=") for line in unit["Service"]["Environment"]]
    ours = {name: value for name, _, value in pairs if name.startswith(PREFIX)}
    assert ServerConfig.load(ours).store == "/var/lib/everstream"
    assert unit["Service"]["StateDirectory"] == ["everstream"]
    assert unit["Service"]["EnvironmentFile"] == ["-/etc/everstream/environment"]


def test_drain_fits_the_time_to_stop_and_a_bad_setting_is_not_tried_again(
    unit: dict[str, dict[str, list[str]]],
) -> None:
    service = unit["Service"]
    (stop_s,) = map(float, service["TimeoutStopSec"])
    assert stop_s >= ServerConfig().drain_timeout_s + 15
    assert (service["KillSignal"], service["KillMode"]) == (["SIGTERM"], ["mixed"])
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"] == ["2"]


def test_service_is_confined(unit: dict[str, dict[str, list[str]]]) -> None:
    service = unit["Service"]
    expected = {
        **dict.fromkeys(("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome"), "yes"),
        "ProtectSystem": "strict",
        "CapabilityBoundingSet": "",
        "UMask": "0077",
    }
    assert {name: service[name] for name in expected} == {n: [v] for n, v in expected.items()}
    # Code is compiled when the package is installed; children bound their memory themselves.
    assert "@resources" not in "".join(service["SystemCallFilter"])


@pytest.mark.parametrize(
    ("unit_file", "name", "arguments"),
    [
        (UNIT, "everstream.service", ["serve"]),
        (TEMPLATE, "everstream@8001.service", ["serve", "--port", "%i"]),
    ],
    ids=["unit", "template"],
)
def test_systemd_takes_the_unit(
    unit_file: Path, name: str, arguments: list[str], tmp_path: Path
) -> None:
    """Its own check, where it is installed; the program is one that is there."""
    (command,) = settings_of(unit_file.read_text())["Service"]["ExecStart"]
    assert command.split()[1:] == arguments
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        copy = tmp_path / name
        copy.write_text(unit_file.read_text().replace(command, shutil.which("true") or ""))
        command = f"{analyze} verify {copy}"
        done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_page_installs_what_the_unit_starts(unit: dict[str, dict[str, list[str]]]) -> None:
    (command,) = unit["Service"]["ExecStart"]
    folder = Path(command.split()[0]).parent.parent
    assert f"python3 -m venv {folder}" in DEPLOYMENT
    assert "deploy/systemd/everstream.service /etc/systemd/system/" in DEPLOYMENT


def test_template_is_the_unit_with_a_port_and_a_folder_of_its_own() -> None:
    """All instances are one user, so that they share the cache of models."""
    plain, template = (settings_of(file.read_text()) for file in (UNIT, TEMPLATE))
    changed = {
        (section, name)
        for section, settings in template.items()
        for name, values in settings.items()
        if plain[section].get(name) != values
    }
    assert changed == {
        ("Unit", "Description"),
        *(("Service", name) for name in ("ExecStart", "EnvironmentFile", "Environment")),
        *(("Service", name) for name in ("User", "StateDirectory")),
    }
    assert all(plain[section].keys() <= template[section].keys() for section in plain)
    service = template["Service"]
    assert service["StateDirectory"] == ["everstream/%i"]
    assert "EVERSTREAM_STORE=/var/lib/everstream/%i" in service["Environment"]
    assert (service["User"], service["CacheDirectory"]) == (["everstream"], ["everstream"])
    assert service["EnvironmentFile"] == [
        "-/etc/everstream/environment",
        "-/etc/everstream/environment.%i",
    ]
    assert "everstream@8001 everstream@8002" in DEPLOYMENT
