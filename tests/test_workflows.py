"""The workflows of .github: no runner is here, so what can be read of them is checked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    return workflow


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_there_is_one_for_checks_wheels_and_image() -> None:
    assert [path.stem for path in FILES] == ["ci", "image", "wheels"]


def test_yaml_is_clean() -> None:
    command = [sys.executable, "-m", "yamllint", "--strict", str(FOLDER.parent)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_jobs_end_and_may_only_read(name: str) -> None:
    workflow = read(name)
    assert workflow["name"] == name
    assert workflow["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_actions_have_a_version_and_scripts_parse(name: str) -> None:
    for step in steps(read(name)):
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", step["uses"])
        else:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_paths_that_start_it_exist(name: str) -> None:
    starts = read(name)["on"]
    for path in (starts["pull_request"] or {}).get("paths", ()):
        assert list(ROOT.glob(path.removesuffix("/**"))), path


def test_ci_runs_only_the_check_script() -> None:
    scripts = [step.get("run", "") for step in steps(read("ci"))]
    assert [line.strip() for line in "\n".join(scripts).splitlines()].count(".ci/run") == 1
    assert "debian" in read("ci")["jobs"]["checks"]["container"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_wheels_are_for_both_architectures_and_every_python() -> None:
    matrix = read("wheels")["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    assert {each["architecture"] for each in matrix} == {"x86_64", "aarch64"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    built = project["tool"]["cibuildwheel"]
    assert built["build"] == "cp3*-manylinux*"
    assert project["project"]["requires-python"] == ">=3.11"  # cibuildwheel builds no older one
    assert built["environment"] == {"EVERSTREAM_REQUIRE_NATIVE": "1"}  # no wheel without it
    assert any("--backend native" in command for command in built["test-command"])


def test_image_is_built_from_the_dockerfile() -> None:
    scripts = "\n".join(step.get("run", "") for step in steps(read("image")))
    assert "docker build --tag everstream ." in scripts
    assert "docker run" in scripts
