"""The manifests in `deploy`, as kubectl reads them, and Kubernetes' schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
#: Of Kubernetes: the oldest that the manifests are for.
VERSION = "1.30"

Manifest = dict[str, Any]


def manifests_of(file: Path) -> list[Manifest]:
    """All documents of a file."""
    return list(yaml.safe_load_all(file.read_text("utf-8")))


def resources_of(folder: Path) -> list[str]:
    """The files that a kustomization names, in its order."""
    (kustomization,) = manifests_of(folder / "kustomization.yaml")
    names: list[str] = kustomization["resources"]
    return names


def kustomized(folder: Path) -> list[Manifest]:
    """What a kustomization without transformations is: the documents of its files."""
    return [one for name in resources_of(folder) for one in manifests_of(folder / name)]


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    """The only one of that kind."""
    (found,) = [one for one in manifests if one["kind"] == kind]
    return found


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def check(manifest: Manifest) -> None:
    """Raises `kubernetes_validate.ValidationError`, for unknown fields, too."""
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def pod_of(template: Manifest) -> Manifest:
    """The pod that a template makes, as a manifest."""
    metadata = {"name": "of-a-template", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def containers_of(pod: Manifest) -> list[Manifest]:
    """All of a pod's specification, those that run first included."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


def secrets_of(container: Manifest) -> set[str]:
    """The variables that come from a secret."""
    return {
        one["name"]
        for one in container.get("env", ())
        if "secretKeyRef" in one.get("valueFrom", {})
    }


def confined(container: Manifest) -> bool:
    """Whether the process may do nothing that it does not need."""
    security: Manifest = container["securityContext"]
    return security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
