"""Behind a proxy: whose address a client has, and what the log says of what a proxy hides."""

from __future__ import annotations

import logging

import pytest
from websockets.exceptions import InvalidStatus

from server.api.connections import SPARE, ConnectionTable
from server.api.gate import TrustedProxies
from tests.server.harness import running

PROXIES = TrustedProxies(["192.0.2.1", "10.0.0.0/8", "2001:db8::/64"])


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("192.0.2.1", ["198.51.100.7"], "198.51.100.7"),
        ("192.0.2.1", ["6.6.6.6, 198.51.100.7, 10.1.2.3"], "198.51.100.7"),
        ("192.0.2.1", ["6.6.6.6", "198.51.100.7"], "198.51.100.7"),
        ("192.0.2.1", ["198.51.100.7:443"], "198.51.100.7"),
        ("2001:db8::5", ["[2001:db8:1::9]:443"], "2001:db8:1::9"),
        ("::ffff:192.0.2.1", ["2001:db8:1::9"], "2001:db8:1::9"),
        ("192.0.2.1", ["10.0.0.1,10.0.0.2"], "10.0.0.1"),  # all of them are proxies
        ("192.0.2.1", ["198.51.100.7, unknown"], "192.0.2.1"),
        ("192.0.2.1", [""], "192.0.2.1"),
        ("192.0.2.1", [], "192.0.2.1"),
        ("198.51.100.7", ["6.6.6.6"], "198.51.100.7"),  # no proxy: it may have invented it
    ],
)
def test_client_is_the_last_address_that_no_proxy_has(
    peer: str, forwarded_for: list[str], client: str
) -> None:
    assert PROXIES.client_of(peer, forwarded_for) == client


def test_peer_without_an_address_is_no_proxy() -> None:
    assert "" not in PROXIES
    assert "10.0.0.9" in PROXIES


async def test_log_of_requests_has_the_client_of_a_trusted_proxy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "everstream.access")
    headers = {"x-forwarded-for": "198.51.100.7"}
    for proxies in ((), ("127.0.0.0/8",)):
        async with running(access_log=True, trusted_proxies=proxies) as server:
            await server.http.get("/v1/models", headers=headers)
    clients = [vars(record)["client"] for record in caplog.records if "client" in vars(record)]
    assert clients == ["127.0.0.1", "198.51.100.7"]


async def test_bound_of_an_address_is_that_of_the_client_behind_a_proxy() -> None:
    async with running(trusted_proxies=("127.0.0.1",), max_connections_per_address=1) as server:
        one, other = ({"x-forwarded-for": f"198.51.100.{number}"} for number in (1, 2))
        async with server.socket(additional_headers=one):
            refused = await server.http.get("/v1/models", headers=one)
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert (await server.http.get("/v1/models", headers=other)).status_code == 200


def test_connections_of_a_proxy_are_bounded_as_those_of_all() -> None:
    table = ConnectionTable(40, max_per_address=1, proxies=PROXIES)
    address = table.address_of_peer("10.0.0.1")
    assert all(table.add(address) for _ in range(40))
    other = table.address_of_peer("198.51.100.7")
    assert [table.add(other) is not None for _ in range(1 + SPARE + 1)][-2:] == [True, False]


async def test_refused_origin_and_host_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as server:
        with pytest.raises(InvalidStatus):
            async with server.socket(origin="https://chat.example"):
                pass
        await server.http.get("/v1/models", headers={"host": "upstream"})
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    host = f"127.0.0.1:{server.port}"
    assert said[0].startswith(f"origin 'https://chat.example' refused, Host is '{host}'")
    assert "--allow-origin" in said[0]
    assert "--allow-host" in said[1]


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "Via"])
async def test_proxy_before_a_server_without_keys_is_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for keys, num in (((), 1), (("secret",), 0)):
        caplog.clear()
        async with running(api_keys=keys) as server:
            for _ in range(2):
                await server.http.get("/health", headers={name: "198.51.100.7"})
        said = [record.getMessage() for record in caplog.records if "has no keys" in record.msg]
        assert len(said) == num
