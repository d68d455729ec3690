"""`deploy/ray/kuberay.yaml`: fields, pods, certificates, and who reaches the ports of Ray."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from server.config import ServerConfig
from tests.deploy.manifests import (
    DEPLOY,
    Manifest,
    check,
    confined,
    containers_of,
    manifests_of,
    name_of,
    of_kind,
    pod_of,
    secrets_of,
)
from tests.deploy.network_policies import Pod, reaches
from tests.deploy.rayservice_schema import RAY_SERVICE

MANIFESTS = manifests_of(DEPLOY / "ray" / "kuberay.yaml")
OF_KUBERNETES = [one for one in MANIFESTS if one["kind"] != "RayService"]
SERVICE = of_kind(MANIFESTS, "RayService")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
TEMPLATES = {
    "head": CLUSTER["headGroupSpec"]["template"],
    **{group["groupName"]: group["template"] for group in CLUSTER["workerGroupSpecs"]},
}

RAY = {"app.kubernetes.io/name": "everstream-ray"}
HEAD = Pod({**RAY, "app.kubernetes.io/component": "head"})
WORKER = Pod({**RAY, "app.kubernetes.io/component": "worker"}, {"serve": 8000})
STORE = Pod({"everstream.store": "postgresql"})
NEIGHBOUR = Pod({"app.kubernetes.io/name": "something-else"})
INGRESS = Pod({}, namespace={"everstream.clients": "allowed"})
OPERATOR = Pod(
    {"app.kubernetes.io/name": "kuberay-operator"}, namespace={"everstream.operator": "allowed"}
)
#: Ray's own: GCS, dashboard, client, one of the agents' and one of the workers'.
PORTS = (6379, 8265, 10001, 52365, 10002)


def test_service_fits_its_schema() -> None:
    jsonschema.validate(SERVICE, RAY_SERVICE)


@pytest.mark.parametrize("place", ["spec", "spec.rayClusterConfig", "spec.upgradeStrategy"])
def test_a_misspelt_field_does_not_fit(place: str) -> None:
    service = inner = copy.deepcopy(SERVICE)
    for name in place.split("."):
        inner = inner[name]
    inner["workerGroupsSpec"] = 1
    with pytest.raises(jsonschema.ValidationError, match="workerGroupsSpec"):
        jsonschema.validate(service, RAY_SERVICE)


@pytest.mark.parametrize("manifest", OF_KUBERNETES, ids=name_of)
def test_manifest_fits_its_schema(manifest: Manifest) -> None:
    check(manifest)


@pytest.mark.parametrize("name", TEMPLATES)
def test_pod_fits_its_schema(name: str) -> None:
    check(pod_of(TEMPLATES[name]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_may_do_nothing_that_they_do_not_need(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers_of(pod):
        assert confined(container)
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ray_encrypts_and_asks_for_certificates(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    (container,) = pod["containers"]
    settings = {one["name"]: one.get("value") for one in container["env"]}
    assert settings["RAY_USE_TLS"] == "1"
    files = {settings[f"RAY_TLS_{what}"] for what in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")}
    assert files == {"/tls/tls.crt", "/tls/tls.key", "/tls/ca.crt"}
    # The authority's key is not where Ray runs.
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert "tls" in mounted
    assert "tls-authority" not in mounted
    assert secrets_of(container) == {
        *("EVERSTREAM_STORE", "EVERSTREAM_API_KEYS", "EVERSTREAM_SIGNING_KEY")
    }
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_ray_is_the_one_that_is_tested_here() -> None:
    constraints = (DEPLOY.parent / "constraints.txt").read_text("utf-8")
    pinned = re.search(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert pinned is not None
    assert CLUSTER["rayVersion"] == pinned[1]
    images = {one["image"] for pod in TEMPLATES.values() for one in containers_of(pod["spec"])}
    assert len(images) == 1


def test_it_serves_what_serve_run_does() -> None:
    (here,) = yaml.safe_load_all(SERVICE["spec"]["serveConfigV2"])
    (there,) = manifests_of(DEPLOY / "ray" / "serve.yaml")
    assert here["applications"]
    for ours, theirs in zip(here["applications"], there["applications"], strict=True):
        names = ("name", "import_path", "route_prefix")
        assert [ours.get(name) for name in names] == [theirs.get(name) for name in names]
    # Pods are reached by their addresses, processes of one machine by its loopback.
    assert here["http_options"]["host"] == "0.0.0.0"


def test_replicas_fit_into_the_pods() -> None:
    (config,) = yaml.safe_load_all(SERVICE["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    settings = ServerConfig.load({}, **application["args"])
    assert settings.threads is not None
    (group,) = CLUSTER["workerGroupSpecs"]
    num_cpus = int(group["rayStartParams"]["num-cpus"])
    (container,) = group["template"]["spec"]["containers"]
    assert num_cpus == int(container["resources"]["requests"]["cpu"])
    assert settings.num_replicas[1] * settings.threads <= num_cpus * group["minReplicas"]


@pytest.mark.parametrize(
    ("source", "target", "port", "expected"),
    [
        (INGRESS, WORKER, 8000, True),
        (NEIGHBOUR, WORKER, 8000, False),
        (OPERATOR, HEAD, 8265, True),
        (OPERATOR, HEAD, 8000, True),
        (OPERATOR, HEAD, 6379, False),
        (OPERATOR, WORKER, 8265, False),
        *((INGRESS, pod, port, False) for pod in (HEAD, WORKER) for port in PORTS),
        *((NEIGHBOUR, pod, port, False) for pod in (HEAD, WORKER) for port in PORTS),
        *((WORKER, HEAD, port, True) for port in PORTS),
        *((HEAD, WORKER, port, True) for port in PORTS),
        (INGRESS, HEAD, 8000, False),
        (WORKER, STORE, 5432, True),
        (WORKER, NEIGHBOUR, 5432, False),
    ],
)
def test_network_policies_allow_only_known_peers(
    source: Pod, target: Pod, port: int, expected: bool
) -> None:
    policies = [one for one in MANIFESTS if one["kind"] == "NetworkPolicy"]
    assert reaches(policies, source, target, port) is expected


def test_policies_are_about_the_pods() -> None:
    for pod, name in ((HEAD, "head"), (WORKER, "replicas")):
        assert TEMPLATES[name]["metadata"]["labels"].items() >= pod.labels.items()


def openssl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["openssl", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A folder with the two files of its secret, made as docs/operate/ray.md does it."""
    folder = tmp_path / "authority"
    folder.mkdir()
    made = openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"),
        *("-days", 3650, "-subj", "/CN=everstream-ray", "-addext", "keyUsage=critical,keyCertSign"),
        *("-keyout", folder / "tls.key", "-out", folder / "tls.crt"),
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("part", ["head", "worker"])
def test_each_pod_has_a_certificate_of_its_own_names(
    tmp_path: Path, authority: Path, part: str
) -> None:
    tls = tmp_path / "tls"
    tls.mkdir()
    script = tmp_path / "certificate.sh"
    script.write_text(of_kind(MANIFESTS, "ConfigMap")["data"]["certificate.sh"], "utf-8")
    environment = {
        "PATH": "/usr/bin:/bin",
        "POD_IP": "10.1.2.3",
        "FQ_RAY_IP": "a-head-svc.default.svc.cluster.local",
        "TLS_FOLDER": str(tls),
        "TLS_AUTHORITY": str(authority),
    }
    made = subprocess.run(
        ["sh", script, part], env=environment, check=False, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert (tls / "tls.key").stat().st_mode & 0o077 == 0

    def is_for(*name: str) -> bool:
        asked = ("verify", "-x509_strict", "-CAfile", tls / "ca.crt", *name, tls / "tls.crt")
        return openssl(*asked).returncode == 0

    for purpose in ("sslserver", "sslclient"):
        assert is_for("-purpose", purpose, "-verify_ip", "10.1.2.3")
    assert is_for("-verify_ip", "127.0.0.1")
    assert is_for("-verify_hostname", "localhost")
    assert not is_for("-verify_ip", "10.1.2.4")
    # Only the head can say that it is the head.
    assert is_for("-verify_hostname", environment["FQ_RAY_IP"]) is (part == "head")
