"""States in an object storage that speaks S3, one object for each.

The library reads the standard ``AWS_*`` variables itself: keys, region, session
tokens, and what the clouds' own ways of lending keys need. What the URL says goes
before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from server.store.base import Chunk, SnapshotBroken, StoreFailed

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

#: Objects that are on their way at the same time.
AT_ONCE = 8
TIMEOUT_S = 10.0

#: What may stand in the URL's query.
_OPTIONS = ("endpoint", "region", "access_key_id", "secret_access_key", "session_token")
#: In the order in which the library looks at them.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

#: A refusal's code -> what the user has to look at.
_REASONS = {
    "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID is not known there",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY is not the one of AWS_ACCESS_KEY_ID",
    "ExpiredToken": "AWS_SESSION_TOKEN has expired",
    "AccessDenied": "these keys have no right to it",
    "NoSuchBucket": "there is no such bucket",
    "AuthorizationHeaderMalformed": "AWS_REGION is not the bucket's",
    "PermanentRedirect": "AWS_REGION is not the bucket's",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
}


class S3Objects:
    """See `server.store.postgres.objects.Objects`. ``url`` is ``s3://BUCKET/PREFIX?OPTIONS``.

    A call that is not answered ends within about ``timeout_s``. ``environment`` is
    the process's own. Without TLS only where the endpoint says ``http://``; other
    authorities than the system's are in the file that ``AWS_CA_BUNDLE`` names.
    Raises `ValueError` for an invalid URL, and `OSError` for that file.
    """

    def __init__(
        self, url: str, environment: Mapping[str, str], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._bucket, prefix, config = _parse(url)
        here = next((environment[name] for name in _ENDPOINTS if environment.get(name)), "")
        endpoint = config.get("endpoint", here)
        _check_endpoint(endpoint)
        # A try that hangs takes 0.4 of the time, and none begins after 0.6 of it.
        client: ClientConfig = {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=0.2 * timeout_s),
            "timeout": timedelta(seconds=0.4 * timeout_s),
        }
        if bundle := environment.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = Path(bundle).read_bytes()
        retry: RetryConfig = {
            "max_retries": 3,
            "retry_timeout": timedelta(seconds=0.6 * timeout_s),
            "backoff": {"max_backoff": timedelta(seconds=0.1 * timeout_s)},
        }
        self._store = S3Store(
            self._bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            retry_config=retry,
        )

    def put(self, name: str, parts: Sequence[Chunk]) -> None:
        try:
            obstore.put(self._store, name, b"".join(parts), use_multipart=False)
        except (BaseError, OSError) as error:
            raise self._failed(error) from None

    def put_all(self, objects: Sequence[tuple[str, Sequence[Chunk]]]) -> None:
        if objects:
            with ThreadPoolExecutor(min(len(objects), AT_ONCE)) as threads:
                try:
                    for done in [threads.submit(self.put, *each) for each in objects]:
                        done.result()
                except BaseException:
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise

    def get(self, name: str) -> bytes:
        try:
            return bytes(obstore.get(self._store, name).bytes())
        except (BaseError, OSError) as error:
            # Something else that answers 404, such as a proxy, knows nothing of our objects.
            if _code(error) == "NoSuchKey":
                raise SnapshotBroken("its object is not there", detail=name) from None
            raise self._failed(error) from None

    def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            obstore.delete(self._store, list(names))
        except (BaseError, OSError) as error:
            if _code(error) != "NoSuchKey":
                raise self._failed(error) from None

    def close(self) -> None:
        """The library closes its connections when they have been idle."""

    def _failed(self, error: Exception) -> StoreFailed:
        """Says what is wrong in a line, without the library's own account of the request."""
        code = _code(error)
        line = str(error).partition("\n")[0]
        if code is not None:
            reason = f"{code}: {_REASONS[code]}" if code in _REASONS else code
        elif "/latest/api/token" in line or "/latest/meta-data/" in line:
            reason = "there are no keys: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        else:
            reason = line
        return StoreFailed("the object storage failed", detail=f"bucket {self._bucket}: {reason}")


def _parse(url: str) -> tuple[str, str, S3Config]:
    """Bucket, prefix and options. What it raises shows no part of the URL: it may have keys."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise ValueError("an object storage is s3://BUCKET or s3://BUCKET/PREFIX")
    if "@" in parts.netloc:
        raise ValueError("s3://: keys stand in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    config: S3Config = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise ValueError(f"s3://: {name} is none of {', '.join(_OPTIONS)}")
        config[name] = value  # type: ignore[literal-required]
    return parts.netloc, parts.path.strip("/"), config


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("the object storage's endpoint is https://HOST or http://HOST")
    if parts.username is not None:
        raise ValueError("the object storage's endpoint has no user in it")


def _code(error: Exception) -> str | None:
    """S3's own word for what went wrong, where it was S3 that answered."""
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found[1] if found else None
