"""Who calls: keys, what the bearer of each may do, and what each tenant has and may have."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import Scope as AsgiScope

from model.files import FileError, open_file, read_all
from server.api.errors import ForeignOrigin, InvalidApiKey, RouteNotFound
from server.config import ByteCount
from server.errors import RequestError

# -------------------------------------------------------------------------------------------------
# What a key may do, by route and by message. What is not declared here is refused.


Scope = Literal["generate", "sessions", "read", "metrics", "admin"]
ALL_SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
#: Of a key given as a flag.
CLIENT_SCOPES: frozenset[Scope] = ALL_SCOPES - {"admin"}

#: Of a route that needs no key. Over HTTP alone: every socket needs one.
OPEN: frozenset[Scope] = frozenset()

#: Every route by its template; one of the scopes is enough. With a route that is not here
#: the server does not start.
ROUTES: Mapping[str, frozenset[Scope]] = {
    "/": OPEN,
    "/health": OPEN,
    "/ready": OPEN,
    "/chat": OPEN,
    "/static": OPEN,
    "/v1/completions": frozenset({"generate"}),
    "/v1/messages": frozenset({"generate"}),
    "/v1/messages/count_tokens": frozenset({"generate", "read"}),
    "/v1/chat/completions": frozenset({"generate"}),
    "/v1/responses": frozenset({"generate"}),
    "/v1/responses/{response_id}": frozenset({"sessions"}),
    "/v1/responses/{response_id}/cancel": frozenset({"sessions"}),
    "/v1/responses/{response_id}/input_items": frozenset({"sessions"}),
    "/v1/embeddings": frozenset({"generate"}),
    "/v1/score": frozenset({"generate"}),
    "/tokenize": frozenset({"generate", "read"}),
    "/detokenize": frozenset({"generate", "read"}),
    "/tokenizer_info": frozenset({"read"}),
    "/v1/stream": frozenset({"generate"}),
    "/v1/sessions": frozenset({"sessions"}),
    "/v1/sessions/import": frozenset({"sessions"}),
    "/v1/sessions/{session}": frozenset({"sessions"}),
    "/v1/sessions/{session}/append": frozenset({"sessions"}),
    "/v1/sessions/{session}/cancel": frozenset({"sessions"}),
    "/v1/sessions/{session}/events": frozenset({"sessions"}),
    "/v1/sessions/{session}/export": frozenset({"sessions"}),
    "/v1/sessions/{session}/fork": frozenset({"sessions"}),
    "/v1/sessions/{session}/rewind": frozenset({"sessions"}),
    "/v1/sessions/{session}/stream": frozenset({"sessions"}),
    "/v1/sessions/{session}/text": frozenset({"sessions"}),
    "/v1/models": frozenset({"read"}),
    "/v1/models/{model}": frozenset({"read"}),
    "/completion": frozenset({"generate"}),
    "/infill": frozenset({"generate"}),
    "/apply-template": frozenset({"generate", "read"}),
    "/props": frozenset({"read"}),
    "/slots": frozenset({"read"}),
    "/api/chat": frozenset({"generate"}),
    "/api/generate": frozenset({"generate"}),
    "/api/embed": frozenset({"generate"}),
    "/api/embeddings": frozenset({"generate"}),
    "/api/version": frozenset({"read"}),
    "/api/tags": frozenset({"read"}),
    "/api/ps": frozenset({"read"}),
    "/api/show": frozenset({"read"}),
    "/api/pull": frozenset({"read"}),
    "/api/create": frozenset({"read"}),
    "/api/copy": frozenset({"read"}),
    "/api/push": frozenset({"read"}),
    "/api/delete": frozenset({"read"}),
    "/docs": frozenset({"read"}),
    "/openapi.json": frozenset({"read"}),
    "/asyncapi.json": frozenset({"read"}),
    "/metrics": frozenset({"metrics", "admin"}),
    "/v1/admin/tenants": frozenset({"admin"}),
    "/v1/admin/rebalance": frozenset({"admin"}),
    "/v1/admin/models": frozenset({"admin"}),
    "/v1/admin/models/{name}": frozenset({"admin"}),
    "/v1/admin/models/{name}/reload": frozenset({"admin"}),
    "/v1/admin/states": frozenset({"admin"}),
    "/v1/admin/states/{name}": frozenset({"admin"}),
}

#: What a client's messages on a socket want. Those that only give something back want nothing.
MESSAGES: dict[str, Scope | None] = {
    "create": "sessions",
    "generate": "generate",
    "append": "sessions",
    "resume": "sessions",
    "fork": "sessions",
    "rewind": "sessions",
    "delete": "sessions",
    "cancel": None,
    "detach": None,
}


class ScopeMissing(RequestError):
    """The key is right, and is not for this."""

    code = "scope_missing"

    def __init__(self, wanted: frozenset[Scope]) -> None:
        names = " or ".join(sorted(wanted))
        super().__init__(f"this key may not do that: it has no scope {names}")


class UndeclaredRoute(Exception):
    """A route without a row in `ROUTES`: our own mistake."""


class RouteTable:
    """Built once, from all routes. Raises `UndeclaredRoute`."""

    def __init__(
        self, routes: Iterable[BaseRoute], declared: Mapping[str, frozenset[Scope]] = ROUTES
    ) -> None:
        self._rows: dict[str, dict[re.Pattern[str], frozenset[Scope]]]
        self._rows = {"http": {}, "websocket": {}}
        for route in routes:
            kind = "websocket" if isinstance(route, WebSocketRoute) else "http"
            if not isinstance(route, Route | WebSocketRoute | Mount) or route.path not in declared:
                raise UndeclaredRoute(f"{kind} route {getattr(route, 'path', route)!r}: no scope")
            self._rows[kind][route.path_regex] = declared[route.path]

    def scopes_of(self, kind: str, path: str) -> list[frozenset[Scope]]:
        """For each template with this path, the scopes of which one opens it; empty without any.

        ``kind`` is "http" or "websocket". Where several templates have the path, all of
        them must be open to a caller.
        """
        rows = self._rows[kind].items()
        return [scopes for pattern, scopes in rows if pattern.fullmatch(path)]


# -------------------------------------------------------------------------------------------------
# The operator's file of keys: TOML, read strictly, and not one secret in it.
#
# A mistake ends the start, or leaves the running server as it was: the message names
# the file, the key and the field, and repeats no value.


keys_logger = logging.getLogger("everstream.keys")

#: Of a file; a key takes some 200.
MAX_BYTES = 1 << 22
#: No longer than that, so that no name is the hash that owns a flag's sessions.
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
HASH_PATTERN = r"^sha256:[0-9a-f]{64}$"
#: Who everybody is on a server without keys.
ANYONE = "anyone"

_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "is no field of this table",
    "too_short": "must not be empty",
}


class KeysFileError(FileError):
    """A file of keys that cannot be used. The message names file, key and field."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


Count = Annotated[int, Field(ge=1, le=2**53)]
CountOrNone = Annotated[int, Field(ge=0, le=2**53)]


class Limits(_Table):
    """What a tenant may have; None is no bound.

    ``max_running`` counts requests that compute or wait to, ``max_sessions`` kept
    sessions, ``max_stored_bytes`` what these have on disk.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_running: Count | None = None
    max_connections: Count | None = None
    max_sessions: CountOrNone | None = None
    max_stored_bytes: Annotated[ByteCount, Field(ge=0, le=2**53)] | None = None


class KeyEntry(_Table):
    """One ``[[key]]``: whose it is, what it may do, and the SHA-256 of the key itself."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    hash: Annotated[str, Field(pattern=HASH_PATTERN)]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    limits: Limits | None = None

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix("sha256:"))


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of a file, at least one. Raises `KeysFileError`."""
    try:
        with open_file(path) as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode)
            document = tomllib.loads(read_all(file, MAX_BYTES).decode())
    except OSError as error:
        raise KeysFileError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise KeysFileError(f"{path}: is not TOML in UTF-8: {_first_line(error)}") from None
    if unknown := sorted(document.keys() - {"key"}):
        raise KeysFileError(f"{path}: {unknown[0]}: is unknown; the file has [[key]] tables only")
    tables = document.get("key")
    if not isinstance(tables, list) or not tables:
        # No key at all would open the server to everybody.
        raise KeysFileError(f"{path}: has no [[key]] table")
    entries = [_entry(path, number, table) for number, table in enumerate(tables, 1)]
    _refuse_repeated_keys(path, entries)
    return tuple(entries)


def _check_mode(path: Path, mode: int) -> None:
    """Who can write the file can make an admin key; who can read it gets hashes and names.

    So the former is refused where it is everybody. The rest is a warning: Kubernetes mounts
    its secrets readable, and a shared group may be meant.
    """
    if mode & stat.S_IWOTH:
        raise KeysFileError(f"{path}: everybody may write it; chmod 600")
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        keys_logger.warning("%s: others may read it, or its group write it; chmod 600", path)


def limits_by_name(path: Path, entries: Sequence[KeyEntry]) -> dict[str, Limits]:
    """Each tenant's limits, which one of its keys states or several alike.

    Raises `KeysFileError` where two differ: a tenant has its limits once, however
    many keys it has.
    """
    stated: dict[str, Limits] = {}
    for number, entry in enumerate(entries, 1):
        if entry.limits is None:
            continue
        if stated.setdefault(entry.name, entry.limits) != entry.limits:
            where = _where(path, number, entry.name)
            raise KeysFileError(f"{where}: limits: another key of {entry.name} has different ones")
    return {entry.name: stated.get(entry.name, Limits()) for entry in entries}


def _entry(path: Path, number: int, table: Any) -> KeyEntry:
    name = table.get("name") if isinstance(table, dict) else None
    where = _where(path, number, name)
    try:
        entry = KeyEntry.model_validate(table)
    except ValidationError as error:
        problem: Any = error.errors(include_url=False, include_input=False)[0]
        raise KeysFileError(f"{where}: {_explain(problem)}") from None
    if entry.name == ANYONE:
        raise KeysFileError(f"{where}: name: {ANYONE!r} is who everybody is without keys")
    return entry


def _refuse_repeated_keys(path: Path, entries: Sequence[KeyEntry]) -> None:
    numbers: dict[bytes, int] = {}
    for number, entry in enumerate(entries, 1):
        first = numbers.setdefault(entry.digest, number)
        if first != number:
            where = _where(path, number, entry.name)
            raise KeysFileError(f"{where}: hash: is that of key {first} as well")


def _where(path: Path, number: int, name: object) -> str:
    """Shows ``name`` only if it is one: the file's author may have mistaken the fields."""
    known = isinstance(name, str) and re.fullmatch(NAME_PATTERN, name)
    return f"{path}: key {number} ({name})" if known else f"{path}: key {number}"


def _explain(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"] if part != "function-before")
    message = _MESSAGES.get(problem["type"], problem["msg"])
    if problem["type"] == "string_pattern_mismatch":
        message = {
            "name": "must be 1 to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first",
            "hash": "must be sha256: and 64 hexadecimal digits in lower case",
        }[field]
    message = message.removeprefix("Value error, ").replace("Input should be ", "must be ")
    return f"{field}: {message}" if field else message


def _first_line(error: Exception) -> str:
    """Where the mistake is, without the text around it."""
    return str(error).partition("\n")[0]


# -------------------------------------------------------------------------------------------------
# Who owns sessions: tenants, what each may have, and what each has at this moment.
#
# All but `Tenant.check_room` belongs to the event loop. Time is passed in as a clock.


Clock = Callable[[], float]

#: Of a rate limit.
PERIOD_S = 60.0
# Waits are stated in whole milliseconds; the margin is far above the error of the sums.
_MARGIN_S = 1e-6

# What ends when a client decides so has no exact time.
SOON_S = 1.0

#: Limits on how many there are, or how much, at one moment.
Room = Literal["max_running", "max_connections", "max_sessions", "max_stored_bytes"]


class RateLimited(RequestError):
    """The tenant has used up what it may have for now; in ``retry_after_s`` there is some."""

    code = "rate_limited"

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(f"the limit {limit} of this key's tenant is reached")
        self.retry_after_s = retry_after_s


class Bucket:
    """How much may be used in a minute: it fills steadily, begins full, and may go below zero.

    The generic cell rate algorithm: all that is kept is the moment at which the bucket
    will be full again.
    """

    def __init__(self) -> None:
        self._full_at_s = -math.inf

    def wait_s(self, now: float, per_minute: int) -> float:
        """Seconds until one unit is there, 0 where it is; after that wait it is there."""
        missing_s = max(0.0, self._full_at_s - now)
        wait_s = missing_s + PERIOD_S / per_minute - PERIOD_S
        if wait_s <= _MARGIN_S / 2:
            return 0.0
        return math.ceil((wait_s + _MARGIN_S) * 1000) / 1000

    def take(self, now: float, amount: int, per_minute: int) -> None:
        """Takes ``amount``, whether or not it is there."""
        self._full_at_s = max(self._full_at_s, now) + amount * PERIOD_S / per_minute


@dataclass
class Tenant:
    """An owner of sessions, with limits that a reload may change under it.

    ``name`` is the owner that the engine knows.
    """

    name: str
    limits: Limits
    clock: Clock
    num_connections: int = 0
    requests_total: int = 0
    refused_total: int = 0
    tokens_total: int = 0
    #: Held from a look at how many sessions there are until there is one more.
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _requests: Bucket = field(default_factory=Bucket)
    _tokens: Bucket = field(default_factory=Bucket)

    def request(self) -> None:
        """Counts a request or a message; raises `RateLimited` where it is one too many."""
        per_minute = self.limits.requests_per_minute
        if per_minute is not None:
            now = self.clock()
            self._refuse_unless_due("requests_per_minute", self._requests.wait_s(now, per_minute))
            self._requests.take(now, 1, per_minute)
        self.requests_total += 1

    def count(self) -> None:
        """Counts a message that is always handled; the next ones wait for it."""
        if (per_minute := self.limits.requests_per_minute) is not None:
            self._requests.take(self.clock(), 1, per_minute)
        self.requests_total += 1

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Holds one of the tenant's connections; raises `RateLimited` where none is left."""
        try:
            self.check_room("max_connections", self.num_connections + 1)
        except RateLimited:
            self.refused_total += 1
            raise
        self.num_connections += 1
        try:
            yield
        finally:
            self.num_connections -= 1

    def check_tokens(self) -> None:
        """Before work that computes: raises `RateLimited` while the token bucket is empty."""
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            wait_s = self._tokens.wait_s(self.clock(), per_minute)
            self._refuse_unless_due("tokens_per_minute", wait_s)

    def spend(self, num_tokens: int) -> None:
        """Counts computed tokens. The bucket may go below zero: the next work waits for it."""
        self.tokens_total += num_tokens
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            self._tokens.take(self.clock(), num_tokens, per_minute)

    def check_room(self, limit: Room, number: int) -> None:
        """Raises `RateLimited` where ``number`` is more than the limit.

        It changes nothing, so it may be called in any thread.
        """
        bound: int | None = getattr(self.limits, limit)
        if bound is not None and number > bound:
            raise RateLimited(limit, SOON_S)

    def _refuse_unless_due(self, limit: str, wait_s: float) -> None:
        if wait_s > 0:
            self.refused_total += 1
            raise RateLimited(limit, wait_s)


class Tenants(dict[str, Tenant]):
    """All tenants by name. One that was there once stays, for what it still has running."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def put(self, name: str, limits: Limits) -> Tenant:
        """The tenant of that name, new or with what it has used so far, under ``limits``."""
        tenant = self.setdefault(name, Tenant(name, limits, self._clock))
        tenant.limits = limits
        return tenant


# -------------------------------------------------------------------------------------------------
# The server's keys: hashes in memory, and what the bearer of each may do.


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


# -------------------------------------------------------------------------------------------------
# Who calls: a key for every request, scopes by route, and allowed origins.


logger = logging.getLogger("everstream.connections")

SUBPROTOCOL = "everstream.v1"
KEY_SUBPROTOCOL = "everstream.key."
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
#: How an open socket ends whose key is taken out.
REVOKED = (1008, "the key was revoked")
#: Of an origin or a host in a line of the log.
MAX_LOGGED_CHARS = 200
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Authenticator:
    """Finds the caller of a request, and admits it by the scopes of its route."""

    def __init__(self, keyring: Keyring, table: RouteTable, allowed_origins: Iterable[str]) -> None:
        self._keyring = keyring
        self._table = table
        self._allowed_origins = frozenset(allowed_origins)

    def admit(self, scope: AsgiScope, headers: Headers, held: ExitStack) -> None:
        """Puts ``caller`` and its ``owner`` into the scope's state, or raises.

        `ForeignOrigin`, `InvalidApiKey`, `ScopeMissing`, or `RateLimited` by its tenant's limits.
        One of the tenant's connections is ``held``. Where a path is open and no key is given, both
        are None.
        """
        caller = self._keyring.caller(_key(headers))
        state = scope["state"]
        state["caller"] = caller
        state["owner"] = None if caller is None else caller.tenant.name
        self._check_origin(scope, headers)
        wanted = self._table.scopes_of(scope["type"], scope["path"])
        if wanted != [OPEN]:
            if caller is None:
                raise InvalidApiKey
            for scopes in wanted:
                caller.require(*scopes)
            caller.tenant.request()
            if not wanted:  # any key sees the 404 of an unknown path
                raise RouteNotFound.at(scope["path"])
            held.enter_context(caller.tenant.connection())

    def _check_origin(self, scope: AsgiScope, headers: Headers) -> None:
        """A page of another origin must not use this server with its visitor's network."""
        if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
            return
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed_origins or origin in self._allowed_origins:
            return
        host = headers.get("host", "")
        if origin.partition("://")[2].lower() != host.lower():
            logger.warning(
                "origin %r refused, Host is %r: see --allow-origin; a proxy must forward the Host",
                origin[:MAX_LOGGED_CHARS],
                host[:MAX_LOGGED_CHARS],
            )
            raise ForeignOrigin


def _key(headers: Headers) -> str | None:
    """The key in a header; or that of a browser, which cannot set headers on a WebSocket."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    for name in ("api-key", "x-api-key"):
        if api_key := headers.get(name):
            return api_key
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        name = offered.strip()
        if name.startswith(KEY_SUBPROTOCOL):
            text = name.removeprefix(KEY_SUBPROTOCOL)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
            except (binascii.Error, ValueError):
                return None
    return None
