"""What a server answers to names that are none: ``python -m tests.reliability.hostile_names``.

Starts it, asks, and prints JSON: the status and code of each answer, and what the
kernel counted meanwhile. `quiet` runs it in a network of its own, which has a
loopback and leads nowhere.
"""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import json
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reliability.confined import unshare
from tests.reliability.servers import LOCAL, ROOT, ServerProcess
from tests.reliability.streams import answer, ask, socket_of
from tests.tiny import write_model

NAMES = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://192.0.2.1/model",
    "https://example.com/model.safetensors",
    "//192.0.2.1/share/model",
    "someone/some-model",
    "~root/model",
    "..",
    "sess_/../signing.key",
    "snapshots/00/0.safetensors",
    "$(id)",
    "a\\..\\b",
)
#: Of a path that is one segment: what a client may send where an id belongs.
ESCAPED = (
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "%2Fetc%2Fpasswd",
    "..%5c..%5cx",
    "http:%2f%2f192.0.2.1%2f",
    "%00",
)
PAGES = (
    "/static/../../server/main.py",
    "/static/%2e%2e/%2e%2e/pyproject.toml",
    "/static//etc/passwd",
)
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def over_http(port: int, method: str, path: str, body: object = None) -> tuple[int, str | None]:
    """Status and code of an answer; the path is sent as it is."""
    connection = http.client.HTTPConnection(LOCAL, port, timeout=120)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    try:
        return response.status, json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return response.status, None


def ask_over_http(port: int) -> dict[str, Any]:
    """Every route that takes a name."""
    answers: dict[str, Any] = {}
    for name in NAMES:
        for field in ("model", "session"):
            body = {"prompt": "hi", "max_tokens": 1, field: name}
            answers[f"{field} {name}"] = over_http(port, "POST", "/v1/completions", body)
    for name in ESCAPED:
        asked: tuple[tuple[str, str, Any], ...] = (
            ("GET", "", None),
            ("DELETE", "", None),
            ("GET", "/events", None),
            ("GET", "/export", None),
            ("POST", "/append", {"text": "hi"}),
            ("POST", "/fork", {"n": 1}),
            ("POST", "/rewind", {"at": 0}),
            ("POST", "/cancel", None),
        )
        for method, rest, body in asked:
            path = f"/v1/sessions/{name}{rest}"
            answers[f"{method} {path}"] = over_http(port, method, path, body)
    for path in PAGES:
        answers[path] = over_http(port, "GET", path)
    return answers


async def ask_over_socket(url: str) -> dict[str, Any]:
    """Every message that takes a session."""
    answers: dict[str, Any] = {}
    async with socket_of(url) as client:
        for name in NAMES:
            for type, more in (
                ("generate", {"prompt": "hi"}),
                ("append", {"text": "hi"}),
                ("resume", {"last_seq": 0}),
                ("fork", {}),
                ("rewind", {"at": 0}),
                ("delete", {}),
            ):
                await ask(client, type=type, request_id="r", session=name, **more)
                frame = await answer(client)
                assert frame["type"] == "error", frame
                answers[f"{type} {name}"] = (frame["status"], frame["error"]["code"])
    return answers


def counted() -> dict[str, int]:
    """What this network has seen: connections begun, datagrams sent, ways not found."""
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    values = {
        f"{names[0]}{name}": int(value)
        for names, row in zip(lines[::2], lines[1::2], strict=True)
        for name, value in zip(names[1:], row[1:], strict=True)
    }
    wanted = ("Tcp:ActiveOpens", "Udp:OutDatagrams", "Udp:NoPorts", "Ip:OutNoRoutes")
    return {name: values[name] for name in wanted}


def quiet(*arguments: str) -> Any:
    """What `main` prints in a network that leads nowhere."""
    command = [
        *unshare("--net"),
        sys.executable,
        "-m",
        "tests.reliability.hostile_names",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def raise_loopback() -> None:
    """Of a new network, whose loopback is down."""
    with socket.socket() as any_socket:
        request = struct.pack("16sh22x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def main() -> None:
    is_quiet = "--quiet" in sys.argv
    if is_quiet:
        raise_loopback()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        with ServerProcess("--model", model, "--store", folder / "store") as server:
            before = counted()
            if "--connect" in sys.argv:  # to show that it would be seen
                with socket.socket() as caller:
                    caller.connect_ex(("192.0.2.1", 80))
            answers = ask_over_http(server.port)
            num_connections = len(answers) + 1
            answers |= asyncio.run(ask_over_socket(server.stream_url))
            after = counted()
            assert server.stop() == 0, server.log()
            log = server.log()
    counts = {name: after[name] - before[name] for name in before}
    told = {"answers": answers, "num_connections": num_connections, "counts": counts, "log": log}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
