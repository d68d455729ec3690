"""`deploy/kubernetes/cluster`, against Kubernetes' schemas, itself and the server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.observability.metrics import NO_STATS, Metrics, Scrape, render
from tests.deploy.manifests import (
    DEPLOY,
    Manifest,
    check,
    confined,
    containers_of,
    kustomized,
    manifests_of,
    name_of,
    of_kind,
    resources_of,
    secrets_of,
)
from tests.deploy.network_policies import Pod, reaches
from tests.requirements import needs_program

CLUSTER = DEPLOY / "kubernetes" / "cluster"
EXAMPLE = DEPLOY / "kubernetes" / "example-postgresql"
#: Values for somebody else's chart.
VALUES = CLUSTER / "prometheus-adapter.yaml"
ALL = [*kustomized(CLUSTER), *kustomized(EXAMPLE)]
SETTINGS = (DEPLOY.parent / "docs/operate/settings.md").read_text("utf-8")

REPLICA = Pod({"app.kubernetes.io/name": "everstream-cluster"}, {"http": 8000})
STORE = Pod({"everstream.store": "postgresql"})
NEIGHBOUR = Pod({"app.kubernetes.io/name": "something-else"})
INGRESS = Pod({}, namespace={"everstream.clients": "allowed"})
STRANGER = Pod(REPLICA.labels, namespace={"kubernetes.io/metadata.name": "elsewhere"})
NAMES = Pod({"k8s-app": "kube-dns"}, namespace={"kubernetes.io/metadata.name": "kube-system"})


@pytest.fixture
def deployment() -> Manifest:
    return of_kind(kustomized(CLUSTER), "Deployment")


@pytest.fixture
def pod(deployment: Manifest) -> Manifest:
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: Manifest) -> Manifest:
    (only,) = pod["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("folder", [CLUSTER, EXAMPLE], ids=lambda folder: folder.name)
def test_every_file_is_in_the_kustomization(folder: Path) -> None:
    files = set(folder.iterdir()) - {folder / "kustomization.yaml", VALUES}
    assert {file.name for file in files} == set(resources_of(folder))


@pytest.mark.parametrize("manifest", ALL, ids=name_of)
def test_manifest_fits_its_schema(manifest: Manifest) -> None:
    check(manifest)


def test_a_misspelt_field_does_not_fit(deployment: Manifest) -> None:
    deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailble"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)


@needs_program("kubectl", "kubernetes-client")
@pytest.mark.parametrize("folder", [CLUSTER, EXAMPLE], ids=lambda folder: folder.name)
def test_kubectl_renders_what_is_tested_here(folder: Path) -> None:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rendered = {name_of(one): one for one in yaml.safe_load_all(done.stdout)}
    assert rendered == {name_of(one): one for one in kustomized(folder)}


def test_what_selects_pods_selects_those_of_the_deployment(deployment: Manifest) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    found = {name_of(one): one for one in kustomized(CLUSTER)}
    selectors = [
        found["Service/everstream-cluster"]["spec"]["selector"],
        found["PodDisruptionBudget/everstream-cluster"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy/everstream-cluster"]["spec"]["podSelector"]["matchLabels"],
        deployment["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector == REPLICA.labels for selector in selectors)
    assert labels.items() >= REPLICA.labels.items()
    target = found["HorizontalPodAutoscaler/everstream-cluster"]["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "everstream-cluster"}


def test_pods_of_the_single_replica_are_others(deployment: Manifest) -> None:
    alone = of_kind(kustomized(DEPLOY / "kubernetes"), "StatefulSet")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert not alone["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_new_replica_is_ready_before_an_old_one_stops(deployment: Manifest) -> None:
    assert deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert of_kind(kustomized(CLUSTER), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_a_pod_gets_longer_than_its_drain(pod: Manifest, container: Manifest) -> None:
    settings = {one["name"]: one.get("value") for one in container["env"]}
    drain_s = float(settings["EVERSTREAM_DRAIN_TIMEOUT_S"] or 0)
    sleep = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    pause_s = float(sleep.partition("sleep(")[2].rstrip(")"))
    # With one period of the probe over, endpoints are without it before the drain begins.
    assert pause_s > container["readinessProbe"]["periodSeconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + 15


def test_probes_use_their_endpoints(container: Manifest) -> None:
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    paths = [container[probe]["httpGet"]["path"] for probe in probes]
    assert paths == ["/health", "/health", "/ready"]


def test_the_container_is_that_of_the_image(pod: Manifest, container: Manifest) -> None:
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text("utf-8")
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in dockerfile
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in dockerfile


def test_settings_are_those_of_the_server(container: Manifest) -> None:
    for setting in container["env"]:
        assert f"`{setting['name']}`" in SETTINGS


def test_credentials_come_from_secrets() -> None:
    replica = of_kind(kustomized(CLUSTER), "Deployment")
    database = of_kind(kustomized(EXAMPLE), "StatefulSet")
    secrets = {
        name
        for manifest in (replica, database)
        for container in containers_of(manifest["spec"]["template"]["spec"])
        for name in secrets_of(container)
    }
    assert secrets == {
        *("EVERSTREAM_STORE", "EVERSTREAM_API_KEYS", "EVERSTREAM_SIGNING_KEY"),
        "POSTGRES_PASSWORD",
    }
    assert not [one for one in ALL if one["kind"] == "Secret"]
    for manifest in ALL:
        assert "://" not in yaml.safe_dump(manifest), name_of(manifest)


@pytest.mark.parametrize(
    ("folder", "kind"), [(CLUSTER, "Deployment"), (DEPLOY / "kubernetes", "StatefulSet")]
)
def test_pod_has_as_many_threads_as_processors_that_it_requests(folder: Path, kind: str) -> None:
    (container,) = of_kind(kustomized(folder), kind)["spec"]["template"]["spec"]["containers"]
    (threads,) = [one for one in container["env"] if one["name"] == "EVERSTREAM_THREADS"]
    assert threads["valueFrom"] == {"resourceFieldRef": {"resource": "requests.cpu"}}
    # Kubernetes rounds up.
    assert container["resources"]["requests"]["cpu"].isdigit()


@pytest.mark.parametrize("manifest", ["Deployment", "StatefulSet"])
def test_pods_may_do_nothing_that_they_do_not_need(manifest: str) -> None:
    pod = of_kind(ALL, manifest)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers_of(pod):
        assert confined(container)
        assert container["resources"]["limits"]["memory"]
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}


def metrics_of_pods() -> list[str]:
    metrics = of_kind(kustomized(CLUSTER), "HorizontalPodAutoscaler")["spec"]["metrics"]
    return [one["pods"]["metric"]["name"] for one in metrics]


def test_replicas_are_counted_by_metrics_of_the_server() -> None:
    page = render([Scrape("a-model", Metrics(), [NO_STATS])], 0).decode()
    gauges = re.findall(r"^# TYPE (\S+) gauge$", page, re.MULTILINE)
    assert set(metrics_of_pods()) <= set(gauges)


def test_the_adapter_gives_those_metrics_and_no_others() -> None:
    (values,) = manifests_of(VALUES)
    (rule,) = values["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert pattern is not None
    page = render([Scrape("a-model", Metrics(), [NO_STATS])], 0).decode()
    names = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    # Prometheus anchors its patterns.
    assert {n for n in names if re.fullmatch(pattern[1], n)} == set(metrics_of_pods())


@pytest.mark.parametrize(
    ("source", "target", "port", "expected"),
    [
        (INGRESS, REPLICA, 8000, True),
        (INGRESS, REPLICA, 22, False),
        (NEIGHBOUR, REPLICA, 8000, False),
        (REPLICA, REPLICA, 8000, False),
        (STRANGER, REPLICA, 8000, False),
        (REPLICA, STORE, 5432, True),
        (REPLICA, STORE, 22, False),
        (STORE, STORE, 5432, True),
        (NEIGHBOUR, STORE, 5432, False),
        (INGRESS, STORE, 5432, False),
        (STRANGER, STORE, 5432, False),
        (REPLICA, NAMES, 53, True),
        (REPLICA, NAMES, 443, False),
        (REPLICA, NEIGHBOUR, 5432, False),
        (REPLICA, STRANGER, 443, False),
    ],
)
def test_network_policies_allow_only_known_peers(
    source: Pod, target: Pod, port: int, expected: bool
) -> None:
    policies = [one for one in kustomized(CLUSTER) if one["kind"] == "NetworkPolicy"]
    assert reaches(policies, source, target, port) is expected


def test_the_example_is_what_the_replicas_may_reach() -> None:
    template: Any = of_kind(kustomized(EXAMPLE), "StatefulSet")["spec"]["template"]
    assert template["metadata"]["labels"].items() >= STORE.labels.items()
