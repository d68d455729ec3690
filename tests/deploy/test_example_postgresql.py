"""A real PostgreSQL under the rules of `deploy/kubernetes/example-postgresql`: TLS or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.deploy.manifests import DEPLOY, Manifest, kustomized, of_kind
from tests.postgres import USER, Postgres
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.tiny import write_model

EXAMPLE = kustomized(DEPLOY / "kubernetes" / "example-postgresql")
PASSWORD = "a word for the test"
NAME = "everstream-postgresql"


def container() -> Manifest:
    (only,) = of_kind(EXAMPLE, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def settings() -> dict[str, str]:
    """What the container's arguments set, as ``-c name=value``."""
    pairs = [setting for flag, setting in pairwise(container()["args"]) if flag == "-c"]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The volumes of the pod: a certificate for the name of the Service, and the rules."""
    folder = Path(tempfile.mkdtemp(prefix="everstream-example-"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-noenc", "-days", "365", "-subj", f"/CN={NAME}"),
            *("-addext", f"subjectAltName=DNS:{NAME}", "-keyout", "tls.key", "-out", "tls.crt"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / "pg_hba.conf").write_text(of_kind(EXAMPLE, "ConfigMap")["data"]["pg_hba.conf"])
    if os.geteuid() == 0:  # PostgreSQL runs as another user then
        folder.chmod(0o755)
        for file in folder.iterdir():
            shutil.chown(file, "root", "postgres")
            file.chmod(0o640)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def postgres(folder: Path) -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
        server.psql(f"CREATE DATABASE {USER}")
        server.psql(f"ALTER USER {USER} PASSWORD '{PASSWORD}'")
        for name, value in settings().items():
            path = folder / Path(value).name
            server.psql(f"ALTER SYSTEM SET {name} = '{path if value.startswith('/') else value}'")
        # It listens when it is there; under its rules `start` could not ask.
        server.stop()
        server.start()
        yield server
    finally:
        server.close()


def url_of(server: Postgres, folder: Path, password: str = PASSWORD) -> str:
    """As in the guide, and where its host's name leads."""
    address = {"hostaddr": "127.0.0.1", "port": server.port, "connect_timeout": 60}
    checked = {"sslmode": "verify-full", "sslrootcert": folder / "tls.crt"}
    query = urlencode({**checked, **address})
    return f"postgresql://{USER}:{quote(password)}@{NAME}/{USER}?{query}"


def is_encrypted(server: Postgres, folder: Path, **other: str) -> bool:
    """Connects as a replica does, but for what is ``other``."""
    with psycopg.connect(make_conninfo(url_of(server, folder), **other)) as connection:
        asked = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        found = connection.execute(asked).fetchone()
    assert found is not None
    return bool(found[0])


def test_the_url_of_the_guide_connects_over_tls(postgres: Postgres, folder: Path) -> None:
    assert is_encrypted(postgres, folder)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"sslmode": "disable"}, "no pg_hba.conf entry"),
        ({"password": "another"}, "password authentication failed"),
        ({"host": "elsewhere"}, "does not match host name"),
        ({"dbname": "postgres"}, "no pg_hba.conf entry"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_connections_are_refused(
    postgres: Postgres, folder: Path, what: dict[str, str], message: str
) -> None:
    with pytest.raises(psycopg.OperationalError, match=message):
        is_encrypted(postgres, folder, **what)


def test_a_replica_uses_tls_for_all_its_connections(
    postgres: Postgres, folder: Path, tmp_path: Path
) -> None:
    url, model = url_of(postgres, folder), write_model(tmp_path / "model")
    environment = {"EVERSTREAM_STORE": url}
    with ServerProcess("--model", f"tiny={model}", environment=environment) as server:
        asked = {"prompt": "Once", "max_tokens": 3, "keep": True}
        answer = httpx.post(
            f"{server.url}/v1/completions", json=asked, trust_env=False, timeout=STUCK_S
        )
        assert answer.status_code == 200, answer.text
        with psycopg.connect(url) as connection:
            query = (
                "SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
                "WHERE application_name = 'everstream'"
            )
            found = [ssl for (ssl,) in connection.execute(query)]
        assert found == [True, True], "one for the store, one that shows that it lives"
        assert PASSWORD not in server.log()


def test_wrong_password_ends_the_start_and_is_not_printed(postgres: Postgres, folder: Path) -> None:
    wrong = "not the word"
    environment = {**os.environ, "EVERSTREAM_STORE": url_of(postgres, folder, wrong)}
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "serve", "--port", "0"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "password authentication failed" in done.stderr
    assert wrong not in done.stderr + done.stdout
    assert quote(wrong) not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_the_server_is_the_one_that_the_guide_names() -> None:
    service = of_kind(EXAMPLE, "Service")
    assert service["metadata"]["name"] == NAME
    assert service["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]
    variables = {one["name"]: one.get("value") for one in container()["env"]}
    assert variables["POSTGRES_USER"] == variables["POSTGRES_DB"] == USER
