"""The manifests against Kubernetes' own schemas, and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import manifests_of

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
FOLDER = DEPLOY / "kubernetes"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
VERSION = "1.30"


def manifests() -> list[dict[str, Any]]:
    texts = [(FOLDER / name).read_text("utf-8") for name in KUSTOMIZATION["resources"]]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def of_kind(kind: str) -> dict[str, Any]:
    return next(manifest for manifest in manifests() if manifest["kind"] == kind)


@pytest.fixture
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("StatefulSet")["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    assert isinstance(only, dict)
    return only


def test_every_file_is_in_the_kustomization() -> None:
    files = {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])


def pods_in(value: object) -> Iterator[dict[str, Any]]:
    """The specifications of pods anywhere in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods_in(inner)


def test_no_service_sets_a_variable_of_a_pod() -> None:
    """One named everstream would set EVERSTREAM_PORT to an address."""
    files = DEPLOY.rglob("*.yaml")
    pods = [pod for file in files for pod in pods_in(manifests_of(file))]
    assert len(pods) >= 5
    assert all(pod.get("enableServiceLinks") is False for pod in pods)


@pytest.mark.parametrize("manifest", manifests(), ids=lambda manifest: manifest["kind"])
def test_manifest_fits_its_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_misspelt_field_does_not_fit(container: dict[str, Any]) -> None:
    manifest = of_kind("StatefulSet")
    manifest["spec"]["template"]["spec"]["terminationGraceSeconds"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_services_select_the_pods() -> None:
    labels = of_kind("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    for manifest in manifests():
        if manifest["kind"] == "Service":
            assert manifest["spec"]["selector"].items() <= labels.items()
            assert manifest["spec"]["ports"][0]["targetPort"] == "http"
    names = {m["metadata"]["name"] for m in manifests() if m["kind"] == "Service"}
    assert of_kind("StatefulSet")["spec"]["serviceName"] in names


def test_probes_use_their_endpoints(container: dict[str, Any]) -> None:
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }


def test_a_pod_gets_longer_than_its_drain(pod: dict[str, Any], container: dict[str, Any]) -> None:
    settings = {one["name"]: one.get("value") for one in container["env"]}
    drain_s = float(settings["EVERSTREAM_DRAIN_TIMEOUT_S"] or 0)
    sleep = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    pause_s = float(sleep.partition("sleep(")[2].rstrip(")"))
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + 15


def test_the_container_is_that_of_the_image(pod: dict[str, Any], container: dict[str, Any]) -> None:
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text("utf-8")
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in dockerfile
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in dockerfile
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "VOLUME /var/lib/everstream" in dockerfile
    assert mounts == {"/var/lib/everstream", "/tmp"}


def test_settings_are_those_of_the_server(container: dict[str, Any]) -> None:
    page = (DEPLOY.parent / "docs/operate/settings.md").read_text("utf-8")
    for setting in container["env"]:
        assert f"`{setting['name']}`" in page


def test_the_process_may_do_nothing_it_does_not_need(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
