"""The image as the Dockerfile describes it. `make lint` runs hadolint over it besides."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
PORT = "8000"


@pytest.fixture(scope="module")
def instructions() -> list[dict[str, Any]]:
    with (ROOT / "Dockerfile").open("rb") as file:
        steps: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    return [step for step in steps if step["instruction"] != "COMMENT"]


@pytest.fixture(scope="module")
def image(instructions: list[dict[str, Any]]) -> dict[str, str]:
    """The last value of each instruction in the last stage."""
    starts = [i for i, step in enumerate(instructions) if step["instruction"] == "FROM"]
    return {step["instruction"]: step["value"] for step in instructions[starts[-1] :]}


def test_image_is_built_in_stages(instructions: list[dict[str, Any]]) -> None:
    stages = [step["value"] for step in instructions if step["instruction"] == "FROM"]
    assert len(stages) == 2
    assert not any("latest" in stage for stage in stages)


def test_process_is_not_root(image: dict[str, str]) -> None:
    user = image["USER"].partition(":")[0]
    assert user.isdigit()
    assert int(user) > 0


def test_health_is_asked_at_the_served_port(image: dict[str, str]) -> None:
    command = json.loads(image["HEALTHCHECK"].partition("CMD ")[2])
    compile(command[-1], "HEALTHCHECK", "exec")
    assert "/health" in command[-1]
    assert image["EXPOSE"] == PORT
    assert f"EVERSTREAM_PORT={PORT}" in image["ENV"]


def test_command_is_the_installed_script(image: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (script,) = json.loads(image["ENTRYPOINT"])
    assert script in project["scripts"]
    assert json.loads(image["CMD"]) == ["serve"]


def test_everything_copied_is_there_and_not_ignored(instructions: list[dict[str, Any]]) -> None:
    copies = [step["value"].split()[:-1] for step in instructions if step["instruction"] == "COPY"]
    sources = {
        s.removeprefix("./") for copy in copies if "--from=builder" not in copy for s in copy
    }
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert sources | {"model/ops/cpu/cmake/CMakeLists.txt"} == let_in
    assert {source for source in let_in if not (ROOT / source).exists()} == set()


def test_torch_is_an_argument_and_left_out_by_default(instructions: list[dict[str, Any]]) -> None:
    arguments = [step["value"] for step in instructions if step["instruction"] == "ARG"]
    assert "TORCH=none" in arguments


def test_image_must_have_the_native_runtime(instructions: list[dict[str, Any]]) -> None:
    runs = [step["value"] for step in instructions if step["instruction"] == "RUN"]
    (install,) = (run for run in runs if "install --no-deps ." in run)
    assert "EVERSTREAM_REQUIRE_NATIVE=1" in install
    assert any("g++" in run for run in runs)


def test_image_has_the_base_of_the_model_that_it_serves(
    instructions: list[dict[str, Any]], image: dict[str, str]
) -> None:
    """In the folder that is copied, and that neither the volume nor `HF_HOME` hides."""
    (model,) = re.findall(r"EVERSTREAM_MODEL=(\S+)", image["ENV"])
    (assets,) = re.findall(r"HF_ASSETS_CACHE=(\S+)", image["ENV"])
    assert image["COPY"].split()[-1] == assets.removesuffix("/assets") == "/opt/everstream"
    runs = [step["value"] for step in instructions if step["instruction"] == "RUN"]
    fetch = f"HF_ASSETS_CACHE={assets} python -m model.hub.base model/bundled/{model}"
    assert any(fetch in run for run in runs)
    check = (ROOT / "deploy" / "check-install").read_text("utf-8")
    assert f"-m model.hub.base model/bundled/{model}" in check
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))
    for name in ("everstream", "replica"):
        served = compose["services"][name]["environment"]["EVERSTREAM_MODEL"]
        assert served == f"${{EVERSTREAM_MODEL:-{model}}}"


def test_image_can_share_a_store(instructions: list[dict[str, Any]]) -> None:
    arguments = [step["value"] for step in instructions if step["instruction"] == "ARG"]
    (chosen,) = (value for value in arguments if value.startswith("EXTRAS="))
    assert chosen == "EXTRAS=postgres,s3"
    runs = [step["value"] for step in instructions if step["instruction"] == "RUN"]
    (install,) = (run for run in runs if "deploy/requirements" in run)
    assert 'deploy/requirements "${EXTRAS}"' in install


def requirements(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "deploy" / "requirements"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("extras", ["", "postgres,s3", "postgres,ray,s3"])
def test_requirements_are_the_projects_and_those_of_the_extras(extras: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = [one for extra in extras.split(",") if extra for one in optional[extra]]
    assert requirements(extras).stdout.splitlines() == [*project["dependencies"], *wanted]
    assert "torch" not in requirements(extras).stdout


def test_requirements_of_an_extra_that_names_another_are_both() -> None:
    printed = requirements("train").stdout
    assert "matplotlib" in printed
    assert "\ntorch>" in printed
    assert "everstream" not in printed


def test_requirements_of_an_unknown_extra_are_an_error() -> None:
    done = requirements("postgres,postgrse")
    assert done.returncode == 1
    assert "no such extras: postgrse" in done.stderr


def test_compose_builds_this_image_and_gives_it_nothing_it_does_not_need() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))
    service = compose["services"]["everstream"]
    assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT.resolve()
    assert service["ports"] == [f"127.0.0.1:${{PORT:-{PORT}}}:{PORT}"]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True


def test_models_of_the_hub_have_a_volume(image: dict[str, str]) -> None:
    """The file system is read-only, and the process's user has no home."""
    (folder,) = re.findall(r"HF_HOME=(\S+)", image["ENV"])
    assert folder in image["RUN"]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text("utf-8"))
    for name in ("everstream", "replica"):
        assert f"models:{folder}" in compose["services"][name]["volumes"]
    assert "models" in compose["volumes"]
    unit = (ROOT / "deploy" / "systemd" / "everstream.service").read_text("utf-8")
    assert f"Environment=HF_HOME={folder}\n" in unit


PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def image_names() -> set[tuple[str, str]]:
    """Where an image of ours is built, run or asked for, and under which name."""
    image = r"(?<![\w/.-])(?:REGISTRY/)?(everstream(?:-ray)?(?::[\w.-]+)?)"
    found = set()
    for paths, pattern in (
        (PAGES, rf"docker build [^\n]*--tag {image}(?= )"),
        (PAGES, rf"docker run [^\n]*? {image}(?=\s)"),
        ((ROOT / "deploy").rglob("*.yaml"), rf"image: (?:&image )?{image}(?=\s)"),
    ):
        for path in paths:
            found |= {(path.name, name) for name in re.findall(pattern, path.read_text("utf-8"))}
    return found


def test_docs_and_manifests_name_one_image() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    files = {file for file, _ in image_names()}
    assert {"deploy.md", "compose.yaml", "statefulset.yaml", "deployment.yaml"} <= files
    assert {pair for pair in image_names() if pair[1].partition(":")[2] != version} == set()
    built = subprocess.run(
        ["make", "--dry-run", "docker"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"--tag everstream:{version} " in built.stdout


def test_every_docker_run_of_the_docs_keeps_the_sessions() -> None:
    lines = [line for path in PAGES for line in path.read_text("utf-8").splitlines()]
    runs = [line for line in lines if "docker run -" in line]
    assert len(runs) >= 2
    assert [line for line in runs if "-v everstream:/var/lib/everstream" not in line] == []
