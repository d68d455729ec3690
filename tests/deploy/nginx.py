"""A real nginx with the configuration of `deploy/nginx`, on ports of the loopback."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.manifests import DEPLOY
from tests.deploy.tls_proxy import TlsProxy, make_certificate, wait_for
from tests.reliability.servers import LOCAL, STUCK_S
from tests.requirements import program
from tests.reserved_port import ReservedPort

CONFIGURATION = DEPLOY / "nginx" / "nginx.conf"
PROGRAM = program("nginx")


@contextmanager
def nginx_before(folder: Path, *upstreams: int, **replaced: str) -> Iterator[TlsProxy]:
    """Runs nginx before two servers, or one; ``replaced`` are values of its settings.

    Apart from them only ports and files differ from what the page has.
    """
    assert PROGRAM is not None
    with ReservedPort() as http, ReservedPort() as https:
        certificate, key = make_certificate(folder)
        text = CONFIGURATION.read_text("utf-8")
        for old, new in {
            "listen 80;": f"listen {LOCAL}:{http.number};",
            "listen 443 ": f"listen {LOCAL}:{https.number} ",
            "/etc/nginx/chat.example.pem": str(certificate),
            "/etc/nginx/chat.example.key": str(key),
            "/var/log/nginx/access.log": str(folder / "access.log"),
            "127.0.0.1:8001": f"{LOCAL}:{upstreams[0]}",
            "127.0.0.1:8002": f"{LOCAL}:{upstreams[-1]}",
            "http {": f"http {{\n{_temporary(folder)}",
        }.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        for name, value in replaced.items():
            text, num = re.subn(rf"(?m)^(\s*{name}) .*;$", rf"\1 {value};", text)
            assert num == 1, name
        file = folder / "nginx.conf"
        file.write_text(text)
        own = f"daemon off; pid {folder / 'pid'}; error_log {folder / 'error.log'};"
        if os.geteuid() == 0:  # else its workers could not read the folder
            own += " user root;"
        process = subprocess.Popen([PROGRAM, "-e", "stderr", "-c", str(file), "-g", own])
        try:
            wait_for(https.number, process)
            yield TlsProxy(https.number, ssl.create_default_context(cafile=str(certificate)))
        finally:
            process.terminate()
            process.wait(STUCK_S)


def _temporary(folder: Path) -> str:
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return "".join(f"    {name}_temp_path {folder / name};\n" for name in names)
