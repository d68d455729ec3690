"""States in a real server that speaks S3, which is killed, paused and lied to."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from server.store.base import StoreFailed
from server.store.postgres.s3 import S3Objects
from tests.reserved_port import LOCAL, ReservedPort
from tests.s3_server import KEY, SECRET, S3Server

#: So short that a test need not wait for long, where nothing is going to answer. A call that
#: does not end fails its test as each hang does, by pytest's timeout.
SHORT_S = 1.0


def opened(server: S3Server, bucket: str, **options: str) -> S3Objects:
    return S3Objects(server.url(bucket, **options), {})


def test_objects_are_where_the_url_says(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    opened(s3, bucket, prefix="deep/er").put("a/b", [b"1"])
    opened(s3, bucket, prefix="").put("c", [b"2"])
    assert s3.objects(bucket) == {"deep/er/a/b", "c"}


def test_killed_server_fails_and_has_all_when_it_is_back(own_s3: S3Server) -> None:
    objects = opened(own_s3, own_s3.new_bucket())
    objects.put("before", [b"1"])
    own_s3.kill()
    with pytest.raises(StoreFailed):
        objects.put("meanwhile", [b"2"])
    with pytest.raises(StoreFailed):
        objects.get("before")
    with pytest.raises(StoreFailed):
        objects.delete(["before"])
    own_s3.start()
    assert objects.get("before") == b"1"
    objects.put("after", [b"3"])
    assert objects.get("after") == b"3"


def test_hung_server_fails_in_bounded_time_and_may_go_on(own_s3: S3Server) -> None:
    bucket = own_s3.new_bucket()
    objects = opened(own_s3, bucket)
    objects.put("before", [b"1"])
    own_s3.pause()
    hurried = S3Objects(own_s3.url(bucket), {}, SHORT_S)
    with pytest.raises(StoreFailed):
        hurried.get("before")
    with pytest.raises(StoreFailed):
        hurried.put("meanwhile", [b"2"])
    with pytest.raises(StoreFailed):
        hurried.delete(["another"])  # may come to pass when it continues
    own_s3.go_on()
    assert objects.get("before") == b"1"


def test_refused_connection_fails_in_bounded_time(s3: S3Server) -> None:
    with ReservedPort() as port:
        url = s3.url("bucket", endpoint=f"http://{LOCAL}:{port.number}")
        with (
            socket.create_server((LOCAL, port.number)),  # takes connections, and says nothing
            pytest.raises(StoreFailed),
        ):
            S3Objects(url, {}, SHORT_S).get("a")
        with pytest.raises(StoreFailed):
            S3Objects(url, {}, SHORT_S).get("a")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"secret_access_key": "not-this-one"}, "AWS_SECRET_ACCESS_KEY"),
        ({"access_key_id": "nobody"}, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_keys_are_named_and_not_shown(
    s3: S3Server, options: dict[str, str], named: str
) -> None:
    objects = opened(s3, s3.new_bucket(), **options)
    for attempt in (
        lambda: objects.put("a", [b"1"]),
        lambda: objects.get("a"),
        lambda: objects.delete(["a"]),
    ):
        with pytest.raises(StoreFailed, match=named) as caught:
            attempt()
        assert SECRET not in str(caught.value)
        assert "not-this-one" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_missing_bucket_is_no_missing_object(s3: S3Server) -> None:
    objects = opened(s3, "no-such-bucket")
    with pytest.raises(StoreFailed, match="no-such-bucket"):
        objects.get("a")
    with pytest.raises(StoreFailed, match="no-such-bucket"):
        objects.put("a", [b"1"])


@pytest.mark.parametrize(
    "url",
    [
        "http://bucket/prefix",
        "s3://",
        "s3:///prefix",
        f"s3://{KEY}:{SECRET}@bucket/prefix",
        f"s3://bucket/prefix?secret={SECRET}",
        f"s3://bucket/?endpoint=http://{KEY}:{SECRET}@127.0.0.1",
        "s3://bucket/?endpoint=127.0.0.1:9000",
    ],
)
def test_url_that_is_none_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match=r"s3://|endpoint") as caught:
        S3Objects(url, {})
    assert SECRET not in str(caught.value)


def test_environment_is_enough(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    objects = S3Objects(f"s3://{s3.new_bucket()}", s3.environment)
    objects.put("a", [b"1"])
    assert objects.get("a") == b"1"


def test_tls_is_used_and_its_authority_is_checked(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    server = S3Server(tls=(certificate, key))
    try:
        server.start()
        url = server.url(server.new_bucket())
        objects = S3Objects(url, {"AWS_CA_BUNDLE": str(certificate)})
        objects.put("a", [b"1"])
        assert objects.get("a") == b"1"
        with pytest.raises(StoreFailed):
            S3Objects(url, {}, SHORT_S).get("a")
    finally:
        server.close()
