"""Prometheus and Grafana as `deploy/compose.yaml` starts them, with a real Prometheus.

Debian's package `prometheus` has both programs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.manifests import kustomized, of_kind
from tests.docs.blocks import blocks_of
from tests.reliability.servers import LOCAL, STUCK_S, ServerProcess
from tests.requirements import needs_program
from tests.reserved_port import ReservedPort

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD: dict[str, Any] = json.loads(
    (DEPLOY / "grafana" / "dashboards" / "everstream.json").read_text("utf-8")
)
DEADLINE_S = 90.0
#: Of compose.yaml, and of docs/operate/monitoring.md: for two servers, and for pods.
CONFIGURATIONS = [
    (PROMETHEUS / "prometheus.yml").read_text("utf-8"),
    *(
        block.text
        for block in blocks_of(DEPLOY.parent / "docs" / "operate" / "monitoring.md")
        if block.language == "yaml"
    ),
]

needs_prometheus = needs_program("prometheus")


def expressions() -> list[str]:
    """What the dashboard asks, as it would with all models."""
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [one.replace("$__rate_interval", "20s").replace("$model", ".*") for one in asked]


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    return services["services"]


@needs_prometheus
def test_alerts_are_valid() -> None:
    check_with_promtool("rules", PROMETHEUS / "alerts.yml")


@needs_prometheus
@pytest.mark.parametrize("text", CONFIGURATIONS, ids=["compose", "servers", "pods"])
def test_configuration_is_valid(text: str, tmp_path: Path) -> None:
    """With a file for the key, which has to exist; Debian's Prometheus does not know Kubernetes."""
    config = yaml.safe_load(text)
    (job,) = config["scrape_configs"]
    job.pop("kubernetes_sd_configs", None)
    key, file = tmp_path / "key", tmp_path / "prometheus.yml"
    key.write_text("es-key", "utf-8")
    job["authorization"]["credentials_file"] = str(key)
    if "rule_files" in config:
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    file.write_text(yaml.safe_dump(config), "utf-8")
    check_with_promtool("config", file)


def check_with_promtool(kind: str, file: Path) -> None:
    subprocess.run(["promtool", "check", kind, file], check=True, capture_output=True)


def test_pods_of_the_manifests_are_scraped() -> None:
    """They have the labels, the port and the annotations by which the page's job finds them."""
    (job,) = yaml.safe_load(CONFIGURATIONS[2])["scrape_configs"]
    keep = {
        rule["source_labels"][0].removeprefix("__meta_kubernetes_pod_"): rule["regex"]
        for rule in job["relabel_configs"]
        if rule["action"] == "keep"
    }
    named = {rule["target_label"] for rule in job["relabel_configs"] if "target_label" in rule}
    assert named == {"namespace", "pod"}
    for folder, kind in (("kubernetes", "StatefulSet"), ("kubernetes/cluster", "Deployment")):
        template = of_kind(kustomized(DEPLOY / folder), kind)["spec"]["template"]
        name = template["metadata"]["labels"]["app.kubernetes.io/name"]
        assert re.fullmatch(keep["label_app_kubernetes_io_name"], name)
        (port,) = template["spec"]["containers"][0]["ports"]
        assert re.fullmatch(keep["container_port_name"], port["name"])


def test_the_parts_find_each_other() -> None:
    scrape = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    host, _, port = scrape[0]["static_configs"][0]["targets"][0].partition(":")
    assert host in compose()
    assert compose()[host]["ports"][0].endswith(f":{port}")
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text("utf-8")
    )["datasources"][0]
    assert source["url"].removeprefix("http://").partition(":")[0] in compose()
    provider = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/everstream.yaml").read_text("utf-8")
    )["providers"][0]
    mounted = dict(volume.split(":")[:2] for volume in compose()["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    for folder in mounted:
        assert (DEPLOY / folder).is_dir()


def test_ports_are_open_to_this_machine_alone() -> None:
    ports = [port for service in compose().values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_panels_have_titles_places_and_questions() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        places.add((place["x"], place["y"]))
    assert len(places) == len(DASHBOARD["panels"])


@needs_prometheus
@pytest.mark.process
def test_server_with_keys_is_scraped_by_the_first_of_them(tmp_path: Path) -> None:
    keys = "es-first-key-of-a-test,es-second-key-of-a-test"
    flags = [word for key in keys.split(",") for word in ("--api-key", key)]
    deadline_s = time.monotonic() + DEADLINE_S
    with ServerProcess(*flags) as server, prometheus(tmp_path, server.port, keys) as url:
        values: list[Any] = []
        while not values and time.monotonic() < deadline_s:
            values = answer(url, "everstream_slots")
        assert answer(url, "up")[0]["value"][1] == "1"


@needs_prometheus
@pytest.mark.slow
def test_every_panel_shows_something(tmp_path: Path) -> None:
    with ServerProcess("--max-sessions", 4) as server, prometheus(tmp_path, server.port) as url:
        waiting, deadline_s = set(expressions()), time.monotonic() + DEADLINE_S
        while waiting and time.monotonic() < deadline_s:
            generate(server.port)
            waiting = {one for one in waiting if not answer(url, one)}
    assert not waiting


def generate(port: int) -> None:
    body = {"prompt": "Once upon a time there was a fox", "max_tokens": 8}
    httpx.post(
        f"http://{LOCAL}:{port}/v1/completions", json=body, timeout=STUCK_S
    ).raise_for_status()


def answer(url: str, expression: str) -> list[Any]:
    reply = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=STUCK_S)
    result: list[Any] = reply.raise_for_status().json()["data"]["result"]
    return result


@contextmanager
def prometheus(folder: Path, server_port: int, keys: str = "") -> Iterator[str]:
    """As compose.yaml starts it with ``keys``, but for addresses, paths and pace; its address."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"{LOCAL}:{server_port}"]}]
    shell, flag, script = compose()["prometheus"]["entrypoint"]
    for path, there in {
        job["authorization"]["credentials_file"]: folder / "key",
        "/etc/prometheus/prometheus.yml": folder / "prometheus.yml",
        "=/prometheus": f"={folder / 'data'}",
    }.items():
        assert script.count(path) == 1
        script = script.replace(path, str(there))
    job["authorization"]["credentials_file"] = str(folder / "key")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    with ReservedPort() as port:
        address = f"{LOCAL}:{port.number}"
        script = script.replace("$$", "$").rstrip()
        process = subprocess.Popen(
            [shell, flag, f"{script} --web.listen-address={address} --log.level=error"],
            env={**os.environ, "EVERSTREAM_API_KEYS": keys},
        )
        try:
            wait_ready(f"http://{address}", process)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    transport = httpx.HTTPTransport(retries=20)
    with httpx.Client(transport=transport, timeout=STUCK_S) as client:
        while client.get(f"{url}/-/ready").status_code != httpx.codes.OK:
            assert process.poll() is None
