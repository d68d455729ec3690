"""A cluster of our own is open only to itself."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
from pathlib import Path

import grpc
import pytest

from tests.server.cluster.ray.clusters import HANGS_S, OnRay
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(HANGS_S)


def address_of(listening: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    host = listening.rpartition(":")[0].strip("[]").partition("%")[0]
    address = ipaddress.ip_address("::" if host == "*" else host)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def test_every_port_is_on_the_loopback(on_ray: OnRay) -> None:
    listening = on_ray.listening()
    names = set(listening.values())
    assert {"ray::ServeReplica:everstream:everstream", "ray::ProxyActor"} <= names, names
    assert any(name.endswith("gcs_server") for name in names)
    assert any(name.endswith("raylet") for name in names)
    outside = {at: who for at, who in listening.items() if not address_of(at).is_loopback}
    assert not outside


async def test_hangup_does_not_end_it(on_ray: OnRay) -> None:
    """One process reads its keys again at that."""
    os.kill(on_ray.server.pid, signal.SIGHUP)
    await eventually(lambda: "keys are reloaded only by a restart" in on_ray.server.log())
    assert on_ray.server.get("/health")[0] == 200


def test_there_is_no_dashboard(on_ray: OnRay) -> None:
    names = set(on_ray.processes().values())
    assert not any("Dashboard" in name and "Agent" not in name for name in names), names
    assert not any(at.endswith(":8265") for at in on_ray.listening())


#: One method of the cluster's own server, and one of a replica's, which would unpickle.
METHODS = [
    ("gcs_server", "/ray.rpc.NodeInfoGcsService/CheckAlive"),
    ("ray::ServeReplica", "/ray.serve.ASGIService/HandleRequest"),
]


@pytest.mark.parametrize(("process", "method"), METHODS)
def test_who_has_no_token_is_refused(on_ray: OnRay, process: str, method: str) -> None:
    ports = [at.rpartition(":")[2] for at, who in on_ray.listening().items() if process in who]
    answers = set()
    for port in ports:
        for headers in ([], [("authorization", f"Bearer {'0' * 64}")]):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(method)(b"", metadata=headers, timeout=30)
                answers.add(refused.value.code())
    # A replica has a second server, Ray's own, which does not know the method.
    assert grpc.StatusCode.UNAUTHENTICATED in answers
    assert answers <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


def test_who_has_the_token_is_heard(on_ray: OnRay) -> None:
    """Else the refusals above would show nothing."""
    process, method = METHODS[0]
    (at,) = [at for at, who in on_ray.listening().items() if process in who]
    headers = [("authorization", f"Bearer {on_ray.token()}")]
    with grpc.insecure_channel(f"127.0.0.1:{at.rpartition(':')[2]}") as channel:
        channel.unary_unary(method)(b"", metadata=headers, timeout=30)


def test_files_of_the_cluster_are_out_of_reach(on_ray: OnRay) -> None:
    """A process that can write to its sockets is one of it."""
    table = Path(f"/proc/{on_ray.server.pid}/net/unix").read_text()
    folders = set(re.findall(r"/tmp/es-ray-[^/\s]+", table))
    ours = [Path(folder) for folder in folders if on_ray.uses(folder)]
    assert len(ours) == 1
    status = ours[0].stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.getuid())
