"""The profile `cluster` of `deploy/compose.yaml`, and the balancers' configurations."""

from __future__ import annotations

import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import DEPLOY, manifests_of
from tests.deploy.tls_proxy import wait_for
from tests.docs.blocks import shell_lines
from tests.reliability.servers import FAKE, LOCAL, STUCK_S, ServerProcess
from tests.requirements import needs_program, program
from tests.reserved_port import ReservedPort

(COMPOSE,) = manifests_of(DEPLOY / "compose.yaml")
CLUSTER: dict[str, dict[str, Any]] = {
    name: service
    for name, service in COMPOSE["services"].items()
    if "cluster" in service.get("profiles", ())
}
HAPROXY = DEPLOY / "haproxy"
GUIDE = (DEPLOY.parent / "docs/operate/postgresql.md").read_text("utf-8")


def settings(file: Path, name: str) -> list[str]:
    """What follows ``name`` in the lines that begin with it."""
    return re.findall(rf"^\s*{name}\s+(.*)$", file.read_text("utf-8"), re.MULTILINE)


PROGRAM = str(program("haproxy"))
needs_haproxy = needs_program("haproxy")


@needs_haproxy
@pytest.mark.parametrize("file", sorted(HAPROXY.iterdir()), ids=lambda file: file.name)
def test_haproxy_takes_its_configuration(file: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "-c", "-f", str(file)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_haproxy
def test_stream_of_the_guide_comes_through_haproxy(tmp_path: Path) -> None:
    path = DEPLOY.parent / "docs" / "operate" / "postgresql.md"
    start, ask = (line for line in shell_lines(path) if line.startswith(("haproxy ", "curl ")))
    file = tmp_path / "local.cfg"
    text = (DEPLOY.parent / start.split()[-1]).read_text("utf-8")
    with ExitStack() as stack:
        port = stack.enter_context(ReservedPort()).number
        servers = [stack.enter_context(ServerProcess(program=FAKE)) for _ in range(3)]
        for shown, there in zip(
            range(8000, 8004), [port, *(server.port for server in servers)], strict=True
        ):
            assert text.count(f"{LOCAL}:{shown}") == 1
            text = text.replace(f"{LOCAL}:{shown}", f"{LOCAL}:{there}")
        file.write_text(text, "utf-8")
        _, *flags = start.replace("deploy/haproxy/local.cfg", str(file)).split()
        process = stack.enter_context(subprocess.Popen([PROGRAM, *flags]))
        stack.callback(process.kill)
        wait_for(port, process)
        ask = ask.replace(f"{LOCAL}:8000", f"{LOCAL}:{port}").replace(
            "curl", "curl --silent --fail"
        )
        answer = subprocess.run(
            ["bash", "-ec", ask], check=True, stdout=subprocess.PIPE, timeout=STUCK_S
        )
    assert answer.stdout.rstrip().endswith(b"data: [DONE]")


def test_balancers_differ_only_in_their_servers() -> None:
    local, compose = HAPROXY / "local.cfg", HAPROXY / "compose.cfg"
    for name in ("mode", "timeout", "retries", "option", "http-check", "balance"):
        assert settings(local, name) == settings(compose, name), name


def test_the_server_answers_as_the_balancer_asks() -> None:
    (check,) = settings(HAPROXY / "local.cfg", "http-check")
    # HAProxy's own default is HTTP/1.0 without a host, which the server refuses.
    _, _, method, _, path, _, version, _, name, value = check.split()
    with (
        ServerProcess(program=FAKE) as server,
        socket.create_connection((LOCAL, server.port)) as asking,
    ):
        asking.sendall(f"{method} {path} {version}\r\n{name}: {value}\r\n\r\n".encode())
        assert asking.recv(1 << 12).startswith(b"HTTP/1.1 200 ")


def test_the_guide_starts_the_processes_that_the_balancer_asks() -> None:
    asked = {server.rpartition(":")[2] for server in settings(HAPROXY / "local.cfg", "server")}
    assert set(re.findall(r"everstream serve --port (\d+)", GUIDE)) == asked


def test_the_balancer_finds_the_replicas() -> None:
    (template,) = settings(HAPROXY / "compose.cfg", "server-template")
    _, most, address = template.split()
    name, _, port = address.partition(":")
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text("utf-8")
    assert f"EXPOSE {port}" in dockerfile
    assert CLUSTER[name]["deploy"]["replicas"] <= int(most)
    (volume,) = CLUSTER["balancer"]["volumes"]
    assert (DEPLOY / volume.split(":")[0]).is_file()
    # Replicas are reached by the balancer alone.
    assert [name for name, service in CLUSTER.items() if "ports" in service] == ["balancer"]


def test_replicas_of_one_machine_do_not_each_take_all_processors() -> None:
    threads = CLUSTER["replica"]["environment"]["EVERSTREAM_THREADS"]
    assert threads == "${EVERSTREAM_THREADS:-1}"
    assert "EVERSTREAM_THREADS" in COMPOSE["services"]["everstream"]["environment"]


def test_the_database_is_for_the_replicas_alone() -> None:
    assert COMPOSE["networks"]["store"] == {"internal": True}
    within = {name for name, service in CLUSTER.items() if "store" in service.get("networks", ())}
    assert within == {"postgresql", "replica"}
    assert CLUSTER["postgresql"]["networks"] == ["store"]
    for service in COMPOSE["services"].values():
        assert not set(service.get("networks", ())) - {"default", "store"}


def test_replicas_find_the_database() -> None:
    url = CLUSTER["replica"]["environment"]["EVERSTREAM_STORE"]
    database = CLUSTER["postgresql"]["environment"]
    name, password = database["POSTGRES_USER"], database["POSTGRES_PASSWORD"]
    assert url == f"postgresql://{name}:{password}@postgresql/{database['POSTGRES_DB']}"
    # Without a password PostgreSQL does not start; there is none that everybody knows.
    assert password == "${POSTGRES_PASSWORD:-}"


def test_a_replica_is_as_confined_as_the_single_server() -> None:
    alone = COMPOSE["services"]["everstream"]
    replica = CLUSTER["replica"]
    for name in ("build", "image", "init", "read_only", "cap_drop", "security_opt"):
        assert replica[name] == alone[name], name
    assert replica["stop_grace_period"] == alone["stop_grace_period"]
