"""The `docker` commands of the pages: read, as there is no container engine where tests run."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib

import pytest
from typer import Context
from typer.main import get_group

from server.cli.main import app
from server.config import ServerConfig
from tests.deploy.manifests import manifests_of
from tests.docs.blocks import ROOT, USERS_PAGES, shell_lines

DRAIN_S = ServerConfig.model_fields["drain_timeout_s"].default
COMMANDS = [
    (path.name, line)
    for path in USERS_PAGES
    for line in shell_lines(path)
    if line.startswith("docker ")
]


def parsed(line: str) -> argparse.Namespace:
    """A command by the flags of Docker that the pages use; others end the test."""
    program = argparse.ArgumentParser(exit_on_error=False)
    commands = program.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    build.add_argument("--tag", required=True)
    build.add_argument("context")
    run = commands.add_parser("run")
    run.add_argument("--rm", action="store_true")
    run.add_argument("--stop-timeout", type=float, required=True)
    run.add_argument("-p", dest="port", required=True)
    run.add_argument("-v", dest="volumes", action="append", default=[])
    run.add_argument("image")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser("push").add_argument("image")
    compose = commands.add_parser("compose")
    compose.add_argument("--file", required=True)
    compose.add_argument("--profile")
    compose.add_argument("up", choices=["up"])
    compose.add_argument("--build", action="store_true")
    return program.parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_docker_commands_name_what_there_is(page: str, line: str) -> None:
    given = parsed(line)
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    if given.command == "compose":
        (compose,) = manifests_of(ROOT / given.file)
        profiles = [each.get("profiles", ()) for each in compose["services"].values()]
        assert given.profile is None or any(given.profile in each for each in profiles)
        return
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    image = given.tag if given.command == "build" else given.image
    assert re.fullmatch(rf"(REGISTRY/)?everstream:{version}", image), page
    if given.command == "run":
        # Docker's own default, 10 s, ends where the drain does.
        assert given.stop_timeout >= DRAIN_S + 15, page
        assert f"EXPOSE {given.port.rpartition(':')[2]}" in dockerfile
        mounted = {volume.split(":")[1] for volume in given.volumes}
        assert all(path in dockerfile or path in given.arguments for path in mounted)
        check_server_arguments(given.arguments)


def check_server_arguments(arguments: list[str]) -> None:
    if arguments:
        group = get_group(app)
        command = group.get_command(Context(group), arguments[0])
        assert command is not None
        command.make_parser(Context(command)).parse_args(list(arguments[1:]))
