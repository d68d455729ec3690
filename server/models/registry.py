"""The models of a server by name, and the versions that still end what they run.

All of it belongs to one event loop. `server.models.changes` loads and unloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from server.config.values import ModelSource
from server.engine.types import EngineStats
from server.errors import ModelNotFound, RequestError, SessionNotFound
from server.models.service import Service
from server.models.storage import Home
from server.observability.metrics import NO_STATS, Scrape, totals
from server.runtime.async_engine import AsyncEngine
from server.runtime.commands import TenantAccount

#: Sessions of which it is remembered whose they are.
MAX_SEEN = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A model as it was loaded at one time; ``home`` None keeps sessions in memory."""

    source: ModelSource
    service: Service
    home: Home | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def async_engine(self) -> AsyncEngine:
        return self.service.async_engine


class Models:
    """``died`` is set when the engine or the store of any version has died.

    The first one is the default. One that is ``retiring`` takes no new work.
    """

    def __init__(self, versions: Iterable[Version], continue_unfinished: bool = False) -> None:
        self.died = asyncio.Event()
        self.is_draining = False
        self.current = {version.name: version for version in versions}
        self.retiring: list[Version] = []
        self._continue_unfinished = continue_unfinished
        self._tenants: Mapping[str, TenantAccount] = {}
        self._watching: dict[AsyncEngine, asyncio.Task[None]] = {}
        self._stopping: set[AsyncEngine] = set()
        #: By session and owner: of another's nothing is known.
        self._seen: dict[tuple[str, str], Version] = {}
        self._ended: dict[str, EngineStats] = {}
        assert self.current, "there is no model"

    @classmethod
    def only(cls, service: Service, continue_unfinished: bool = False) -> Models:
        """One model, without a place to load it from again."""
        source = ModelSource(service.model.name, None)
        return cls([Version(source, service)], continue_unfinished)

    @property
    def default(self) -> Service:
        return next(iter(self.current.values())).service

    @property
    def versions(self) -> list[Version]:
        """Those that are served, and those that still end what they run."""
        return [*self.current.values(), *self.retiring]

    def service(self, name: str) -> Service:
        """The model called ``name``. Raises `ModelNotFound`."""
        if name not in self.current:
            raise ModelNotFound
        return self.current[name].service

    @property
    def max_state_bytes(self) -> int:
        """Of one session, of any model."""
        return max(version.service.model.state_bytes_per_session for version in self.versions)

    async def holding(self, session: str, owner: str, name: str | None = None) -> Service:
        """The version that has ``session``, of any model or of the one called ``name``.

        Where none has it, it is one whose answer says so. Raises `RequestError`.
        """
        among = [each for each in self.versions if name in (None, each.name)]
        if not among:
            raise ModelNotFound
        if len(among) == 1 and among[0] not in self.retiring:
            return among[0].service
        found = self._seen.get((session, owner))
        if found not in among:
            found = await self._find(among, session, owner)
        return found.service

    async def _find(self, among: list[Version], session: str, owner: str) -> Version:
        unknown: RequestError | None = None
        for version in among:
            try:
                if await version.service.sessions.has(session, owner):
                    self._remember((session, owner), version)
                    return version
            except RequestError as error:  # its store fails, and the others may know
                unknown = error
        if unknown is not None:
            raise unknown
        for version in among:
            await version.service.sessions.loader.check_elsewhere(session, owner)
        if among[0] in self.retiring:  # it refuses whatever is asked
            raise SessionNotFound
        return among[0]

    def _remember(self, key: tuple[str, str], version: Version) -> None:
        if len(self._seen) >= MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = version

    # Life

    def limit(self, tenants: Mapping[str, TenantAccount]) -> None:
        """Gives the owners in ``tenants`` their limits, in every model."""
        self._tenants = tenants
        for version in self.versions:
            version.async_engine.tenants = tenants

    async def start(self) -> None:
        for version in self.versions:
            await self.start_version(version)

    async def start_version(self, version: Version) -> None:
        """Starts the threads of one that is, or will be, among the versions."""
        version.async_engine.tenants = self._tenants
        await version.async_engine.start()
        await version.service.sessions.start(self._continue_unfinished)
        self._watching[version.async_engine] = asyncio.create_task(
            self._watch(version.async_engine)
        )

    async def stop(self) -> None:
        await asyncio.gather(*(self.stop_version(version) for version in self.versions))

    async def stop_version(self, version: Version) -> bool:
        """Ends its threads, which gives its memory back; False if they did not end in time."""
        self._stopping.add(version.async_engine)
        if (watching := self._watching.pop(version.async_engine, None)) is not None:
            watching.cancel()
        await version.service.sessions.save_prefixes()
        ended = await version.async_engine.stop()
        await version.service.close()
        return ended

    def retired(self, version: Version, stats: EngineStats) -> None:
        """Takes out one that has ended; its counts stay."""
        self.retiring.remove(version)
        self._stopping.discard(version.async_engine)
        self._seen = {key: each for key, each in self._seen.items() if each is not version}
        before = self._ended.pop(version.name, NO_STATS)
        if any(each.name == version.name for each in self.versions):
            self._ended[version.name] = totals(before, stats)

    async def _watch(self, async_engine: AsyncEngine) -> None:
        await async_engine.died.wait()
        self.died.set()

    # How it is

    @property
    def healthy(self) -> bool:
        return all(async_engine.healthy for async_engine in self._serving())

    @property
    def ready(self) -> bool:
        """Whether every model takes new work."""
        return self.healthy and all(version.async_engine.ready for version in self.current.values())

    @property
    def takes_sockets(self) -> bool:
        """Whether a new socket is of use."""
        return all(async_engine.takes_sockets for async_engine in self._serving())

    def _serving(self) -> Iterator[AsyncEngine]:
        """Those that have not been told to end."""
        async_engines = (version.async_engine for version in self.versions)
        return (
            async_engine for async_engine in async_engines if async_engine not in self._stopping
        )

    async def scrapes(self) -> list[Scrape]:
        """The counts of each model, over all of its versions."""
        found: dict[str, Scrape] = {}
        for version in self.versions:
            name, async_engine = version.name, version.async_engine
            before = found.get(name)
            earlier = before.engines if before else [self._ended.get(name, NO_STATS)]
            works = async_engine.store_works and (before is None or before.store_works)
            found[name] = Scrape(
                name, async_engine.metrics, [*earlier, await async_engine.stats()], works
            )
        return list(found.values())

    async def rebalance(self, max_sessions: int) -> int:
        """Evicts at most so many sessions, which other replicas may load; returns how many."""
        moved = 0
        for version in list(self.current.values()):
            if version.async_engine.durable and moved < max_sessions:
                moved += await version.async_engine.evict(max_sessions - moved)
        return moved

    # The drain

    def begin_drain(self) -> None:
        """Refuses new work from here on; what runs continues."""
        self.is_draining = True
        for version in self.versions:
            version.async_engine.begin_drain()

    async def retire(self) -> None:
        """Saves all kept sessions of what keeps them for good: see `AsyncEngine.retire`."""
        await asyncio.gather(
            *(v.async_engine.retire() for v in self.versions if v.async_engine.durable)
        )

    async def drained(self) -> None:
        """Returns when no request has a reader."""
        for version in self.versions:
            await version.async_engine.drained()

    def cancel_all(self) -> None:
        for version in self.versions:
            version.async_engine.requests.cancel_all()
