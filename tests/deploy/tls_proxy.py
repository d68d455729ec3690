"""What tests of proxies share: a certificate, a client that trusts it, and a wait for a port."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.reliability.servers import LOCAL, STUCK_S
from tests.waiting import wait_until

NAME = "chat.example"


@dataclass(frozen=True)
class TlsProxy:
    """Answers at ``port``; ``trust`` is what a client needs to believe its certificate."""

    port: int
    trust: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://{LOCAL}:{self.port}"

    @property
    def socket_url(self) -> str:
        return f"wss://{LOCAL}:{self.port}"


@asynccontextmanager
async def client_of(proxy: TlsProxy, address: str = LOCAL) -> AsyncIterator[httpx.AsyncClient]:
    """A client that connects from ``address``."""
    transport = httpx.AsyncHTTPTransport(verify=proxy.trust, local_address=address)
    async with httpx.AsyncClient(
        base_url=proxy.url, transport=transport, timeout=STUCK_S
    ) as client:
        yield client


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed one of the loopback and of `NAME`, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={NAME}"),
            *("-addext", f"subjectAltName=IP:{LOCAL},DNS:{NAME}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when ``process`` takes connections."""

    def connects() -> bool:
        try:
            socket.create_connection((LOCAL, port)).close()
        except OSError:
            assert process.poll() is None, "it does not start"
            return False
        return True

    wait_until(connects)
