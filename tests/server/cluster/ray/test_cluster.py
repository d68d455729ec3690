from __future__ import annotations

import pytest
from ray import serve
from ray.serve._private import api, client

from server.cluster.ray import cluster
from server.cluster.ray.internals import wait_for_proxies
from server.config import ServerConfig


@pytest.fixture(autouse=True)
def limit_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test does to the limit is undone after it."""
    for module in (api, client):
        monkeypatch.setattr(module, "HTTP_PROXY_TIMEOUT", module.HTTP_PROXY_TIMEOUT)


class NeverStopped(cluster._Stop):
    def install(self) -> None:
        """Leaves the signals of the tests as they are."""


def test_serve_waits_for_its_proxies_as_long_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def wait(refs: list[object], timeout: float, **_: object) -> tuple[list[object], list[object]]:
        waited.append(timeout)
        return [], refs

    wait_for_proxies(0.25)
    monkeypatch.setattr(client.ray, "get", lambda _: {"proxy": _Handle()})
    monkeypatch.setattr(client.ray, "wait", wait)
    connected = client.ServeControllerClient.__new__(client.ServeControllerClient)
    connected._shutdown = False
    connected._controller = _Handle()
    with pytest.raises(TimeoutError, match=r"after 0\.25s"):
        connected.wait_for_proxies_serving()
    assert waited == [0.25]
    assert "HTTP_PROXY_TIMEOUT" in api.serve_start.__code__.co_names


def test_proxy_that_never_starts_is_an_error_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """TimeoutError is an OSError, which the command takes for a port in use."""
    limits: list[object] = []

    def start(**_: object) -> None:
        limits.extend([api.HTTP_PROXY_TIMEOUT, client.HTTP_PROXY_TIMEOUT])
        raise TimeoutError("HTTP proxies not available after 600s.")

    monkeypatch.setattr(serve, "start", start)
    with pytest.raises(cluster.RayError, match="Ray Serve does not start: HTTP proxies"):
        cluster._serve_until(NeverStopped(), ServerConfig.load({}, store="memory"), print)
    assert limits == [cluster.PROXY_START_S] * 2


def test_port_0_is_replaced_by_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would take it for a port."""
    ports: list[int] = []

    def start(http_options: dict[str, int], **_: object) -> None:
        ports.append(http_options["port"])
        raise TimeoutError

    monkeypatch.setattr(serve, "start", start)
    with pytest.raises(cluster.RayError):
        cluster._serve_until(NeverStopped(), ServerConfig.load({}, store="memory", port=0), print)
    assert ports[0] > 0


class _Handle:
    """A handle of an actor, any method of which may be called remotely."""

    def __getattr__(self, name: str) -> _Handle:
        return self

    def remote(self, **_: object) -> object:
        return self
