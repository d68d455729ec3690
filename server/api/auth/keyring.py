"""The server's keys: hashes in memory, and what the bearer of each may do."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from server.api.auth.keys_file import ANYONE, KeysFileError, Limits, limits_by_name, read_keys
from server.api.auth.scopes import ALL_SCOPES, CLIENT_SCOPES, Scope, ScopeMissing
from server.api.auth.tenants import Clock, Tenant, Tenants
from server.api.errors import InvalidApiKey

Grant = tuple[Tenant, frozenset[Scope]]


class Caller:
    """The bearer of one key. It outlives a reload, which may change what it may do."""

    def __init__(self, tenant: Tenant, scopes: frozenset[Scope]) -> None:
        self.tenant = tenant
        self.scopes = scopes
        self.revoked = False
        self._ends: set[Callable[[], None]] = set()

    def revoke(self) -> None:
        """Ends what runs for it: see `watched`."""
        self.revoked = True
        for end in list(self._ends):
            end()

    @contextmanager
    def watched(self, end: Callable[[], None]) -> Iterator[None]:
        """Calls ``end`` where the key is revoked meanwhile."""
        self._ends.add(end)
        try:
            yield
        finally:
            self._ends.discard(end)

    def request(self, *wanted: Scope) -> None:
        """Counts a request that wants one of these scopes.

        Call it for each HTTP request and for each message of a socket. Raises
        `InvalidApiKey` where the key was taken out meanwhile, `ScopeMissing` or
        `RateLimited`.
        """
        self.require(*wanted)
        self.tenant.request()

    def require(self, *wanted: Scope) -> None:
        """Raises as `request` does for one of these scopes, and counts nothing."""
        if self.revoked:
            raise InvalidApiKey
        if self.scopes.isdisjoint(wanted):
            raise ScopeMissing(frozenset(wanted))


class Keyring:
    """Knows the caller behind a key. Without any key everybody is the same one.

    ``keys`` and ``admin_keys`` come from flags: each is a tenant of its own, named by
    its hash, without limits; the former may do all but administer. Raises
    `KeysFileError`.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        keys_file: Path | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.tenants = Tenants(clock)
        self._file = keys_file
        self._flags = {digest_of(key): CLIENT_SCOPES for key in keys}
        self._flags |= {digest_of(key): ALL_SCOPES for key in admin_keys}
        self._callers: dict[bytes, Caller] = {}
        self._anyone: Caller | None = None
        if self._file is None and not self._flags:
            self._anyone = Caller(self.tenants.put(ANYONE, Limits()), ALL_SCOPES)
        self.reload()

    def caller(self, key: str | None) -> Caller | None:
        """The bearer of ``key``, or None. Looks at every key, found or not."""
        if self._anyone is not None:
            return self._anyone
        wanted = digest_of(key or "")
        found = [
            caller
            for digest, caller in self._callers.items()
            if hmac.compare_digest(wanted, digest)
        ]
        return found[0] if found else None

    def reload(self) -> None:
        """Reads the file again, if there is one. Raises `KeysFileError` and changes nothing.

        Tenants keep what they have used. A key that is no longer there is refused
        from its next request or message on.
        """
        grants = self._grants()
        known, self._callers = self._callers, {}
        for digest, (tenant, scopes) in grants.items():
            caller = known.get(digest)
            if caller is None or caller.tenant is not tenant:
                caller = Caller(tenant, scopes)
            caller.scopes = scopes
            self._callers[digest] = caller
        for caller in set(known.values()) - set(self._callers.values()):
            caller.revoke()

    def _grants(self) -> dict[bytes, Grant]:
        entries = () if self._file is None else read_keys(self._file)
        limits = {} if self._file is None else limits_by_name(self._file, entries)
        for number, entry in enumerate(entries, 1):
            if entry.digest in self._flags:
                raise KeysFileError(f"{self._file}: key {number}: hash: is that of a flag as well")
        tenants = {name: self.tenants.put(name, stated) for name, stated in limits.items()}
        grants = {e.digest: (tenants[e.name], frozenset(e.scopes)) for e in entries}
        for digest, scopes in self._flags.items():
            grants[digest] = (self.tenants.put(digest.hex(), Limits()), scopes)
        return grants


def digest_of(key: str) -> bytes:
    """SHA-256. Keys have 256 random bits, so a slow hash would protect nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
