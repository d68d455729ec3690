"""`deploy/kubernetes/published-model` with both kinds of pods, by the page's kustomization."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from model.hub.names import parse_name
from tests.deploy.manifests import DEPLOY, Manifest, check, of_kind
from tests.deploy.network_policies import Pod, reaches
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.pages import page
from tests.requirements import needs_program

PLACE = "deploy/kubernetes"
(KUSTOMIZATION,) = (
    block.text
    for block in blocks_of(ROOT / "docs" / "operate" / "kubernetes.md")
    if block.language == "yaml"
)
NAMES = Pod({"k8s-app": "kube-dns"}, namespace={"kubernetes.io/metadata.name": "kube-system"})

needs_kubectl = needs_program("kubectl", "kubernetes-client")


def rendered(folder: Path, resources: str) -> list[Manifest]:
    """With a copy of the manifests in ``folder``, which kustomize may not leave."""
    shutil.copytree(DEPLOY, folder / "deploy")
    text = KUSTOMIZATION.replace(f"{PLACE}/cluster", resources).replace("PATH/", "")
    (folder / "kustomization.yaml").write_text(text, "utf-8")
    command = ["kubectl", "kustomize", folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(done.stdout))


@needs_kubectl
@pytest.mark.parametrize(
    ("resources", "kind"), [(PLACE, "StatefulSet"), (f"{PLACE}/cluster", "Deployment")]
)
def test_pod_downloads_the_model_into_a_volume(tmp_path: Path, resources: str, kind: str) -> None:
    manifests = rendered(tmp_path, resources)
    for manifest in manifests:
        check(manifest)
    template = of_kind(manifests, kind)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "models"]
    assert f"HF_HOME={mount['mountPath']}" in (ROOT / "Dockerfile").read_text("utf-8")
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "models"]
    claim = of_kind(manifests, "PersistentVolumeClaim")["metadata"]["name"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim}
    settings = {one["name"]: one.get("value") for one in container["env"]}
    named = parse_name(str(settings["EVERSTREAM_MODEL"]))
    assert named is not None and named.file is not None
    assert settings["EVERSTREAM_MODEL"] in page("first-chat.md")


@needs_kubectl
@pytest.mark.parametrize(
    ("resources", "name"), [(PLACE, "everstream"), (f"{PLACE}/cluster", "everstream-cluster")]
)
@pytest.mark.parametrize(
    ("target", "port", "expected"),
    [
        (Pod({}, address="203.0.113.7"), 443, True),
        (Pod({}, address="203.0.113.7"), 80, False),
        (Pod({}, address="10.0.0.7"), 443, False),
        (Pod({}, address="169.254.169.254"), 443, False),
        (NAMES, 53, True),
        (Pod({"app.kubernetes.io/name": "something-else"}), 443, False),
    ],
)
def test_pod_reaches_the_hub_and_no_neighbour(
    tmp_path: Path, resources: str, name: str, target: Pod, port: int, expected: bool
) -> None:
    policies = [one for one in rendered(tmp_path, resources) if one["kind"] == "NetworkPolicy"]
    pod = Pod({"app.kubernetes.io/name": name}, {"http": 8000})
    assert reaches(policies, pod, target, port) is expected
