"""The client in Node: against the server, against a stub, its examples, types and package."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.clients.javascript.conftest import CLIENT, HERE, Node
from tests.exclusive import exclusive

README = (CLIENT / "README.md").read_text()
EXAMPLES = re.findall(r"```js\n(.*?)```", README, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def package(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's package as npm packs it, with types that the compiler makes of the code."""
    folder = tmp_path_factory.mktemp("package")
    with exclusive(CLIENT):  # the types are written there
        node.run_npm("pack", "--pack-destination", str(folder))
    (packed,) = folder.iterdir()
    return packed


@pytest.fixture
def project(node: Node, package: Path, tmp_path: Path) -> Path:
    """A project that has installed the client's package, and no more."""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    node.run_npm("install", "--offline", str(package), folder=tmp_path)
    return tmp_path


def test_scenarios_hold_in_node(node: Node, proxy_url: str) -> None:
    node.test("scenarios.test.mjs", EVERSTREAM_PROXY=proxy_url)


def test_client_handles_every_scripted_answer(node: Node) -> None:
    node.test("stubbed.test.mjs")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_readme_run(
    node: Node, project: Path, server_url: str, number: int
) -> None:
    assert ADDRESS in EXAMPLES[number]
    example = project / "example.mjs"
    # Now and then a text without a seed is over before its first character.
    text = EXAMPLES[number].replace("{ max_tokens", "{ seed: 1, max_tokens")
    example.write_text(text.replace(ADDRESS, server_url))
    # What `npm install ws` does, without a package index.
    shutil.copytree(CLIENT / "node_modules/ws", project / "node_modules/ws")
    assert node.run(example, folder=project).strip()


def test_typed_program_compiles_and_a_wrong_one_does_not(node: Node, project: Path) -> None:
    compiler = CLIENT / "node_modules/typescript/bin/tsc"
    flags = ("--strict", "--noEmit", "--module", "nodenext", "--lib", "es2022,dom")
    program = (HERE / "program.ts").read_text()
    (project / "program.ts").write_text(program)
    node.run(compiler, *flags, "program.ts", folder=project)
    wrong = {
        "max_tokens: 5": "maxTokens: 5",
        "event.token_id": "event.tokenId",
        "error.retryAfterS": "error.retry_after_s",
    }
    for right, name in wrong.items():
        assert right in program
        program = program.replace(right, name)
    (project / "program.ts").write_text(program)
    with pytest.raises(AssertionError) as refused:
        node.run(compiler, *flags, "program.ts", folder=project)
    said, _, _ = str(refused.value).partition("\nassert ")  # pytest repeats it at length
    assert said.count("error TS") == len(wrong)


def test_package_has_the_modules_and_their_types_alone(project: Path) -> None:
    installed = project / "node_modules" / "everstream"
    found = {str(file.relative_to(installed)) for file in installed.rglob("*") if file.is_file()}
    modules = {file.name for file in CLIENT.glob("*.js")}
    types = {f"types/{Path(name).stem}.d.ts" for name in modules}
    assert found == modules | types | {"package.json", "README.md"}


def test_lock_file_names_no_registry() -> None:
    lock = json.loads((CLIENT / "package-lock.json").read_text())
    packages = {name: one for name, one in lock["packages"].items() if name}
    assert all("integrity" in one and "resolved" not in one for one in packages.values())
    assert "dependencies" not in lock["packages"][""]
