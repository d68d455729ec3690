"""The models of a server by name, the versions that still end what they run, and their changes.

All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from model.checkpoint import Checkpoint
from server.config import ModelSource
from server.engine.types import EngineStats
from server.errors import ModelNotFound, RequestError, SessionNotFound, invalid
from server.models.service import Service
from server.models.storage import Home
from server.observability.metrics import NO_STATS, Metrics, Scrape, totals
from server.runtime.async_engine import AsyncEngine, Draining
from server.runtime.commands import TenantAccount
from server.sessions.loader import OtherVersion

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


# -------------------------------------------------------------------------------------------------
# Models are loaded, replaced and unloaded while the server runs.
#
# Loading happens in a thread, while everything else is served. What is replaced or unloaded
# takes no new work, ends what it runs, saves its kept sessions, and gives its memory back.

logger = logging.getLogger("everstream.models")

#: Of an absolute path, up to its last part.
_FOLDERS = re.compile(r"(?<![\w./:])/(?:[^/\s:,;'\"]+/)+")

#: After a cancel each request still ends at the boundary of a step.
CANCEL_TIMEOUT_S = 2.0
#: For saving the sessions of a version.
SAVE_TIMEOUT_S = 60.0


class LoadingRefused(RequestError):
    """The operator has named no folder to load from."""

    code = "loading_refused"
    message = "this server loads no models from a path: it was started without one"


class ModelExists(RequestError):
    """A model of this name is served."""

    code = "model_exists"
    message = "name: a model of this name is served; reload it instead"
    param = "name"


class ModelChanging(RequestError):
    """Another change of the models is in progress."""

    code = "model_changing"
    message = "another model is being loaded; try again later"


class LastModel(RequestError):
    """Without it there would be nothing to serve."""

    code = "last_model"
    message = "the last model cannot be unloaded"


class ModelBroken(RequestError):
    """There is no model at this place that can be served."""

    code = "model_broken"

    def __init__(self, message: str) -> None:
        super().__init__(message, "path")


class Builder(Protocol):
    """See `server.models.build.ModelBuilder`. Every method blocks and raises `RequestError`."""

    def read(self, source: ModelSource) -> Checkpoint: ...
    def build(
        self,
        source: ModelSource,
        checkpoint: Checkpoint,
        taken: Mapping[Path, str],
        metrics: Metrics,
    ) -> Version: ...
    def refreshed(
        self, version: Version, source: ModelSource, checkpoint: Checkpoint
    ) -> Version: ...


@dataclass(frozen=True, slots=True)
class Reloaded:
    """``changed`` is False where the weights were the same: nothing was replaced."""

    version: Version
    changed: bool


class ModelChanges:
    """Belongs to the event loop of ``models``. One change at a time."""

    def __init__(
        self, models: Models, builder: Builder, model_dir: Path | None, retire_timeout_s: float
    ) -> None:
        self._models, self._builder = models, builder
        self._model_dir, self._retire_timeout_s = model_dir, retire_timeout_s
        self._unnamed = {v.name for v in models.versions if not v.source.is_named}
        self._is_changing = False
        self._retiring: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str) -> Version:
        """Serves the model at ``path`` in the models' folder as ``name``. Raises `RequestError`.

        Nothing has changed where it raises.
        """
        with self._change():
            if name in self._models.current:
                raise ModelExists
            source = ModelSource(name, self._path(path), is_named=name not in self._unnamed)
            checkpoint = await asyncio.to_thread(self._builder.read, source)
            version = await self._start(source, checkpoint, Metrics())
            self._models.current[name] = version
        logger.info("model %s was loaded", name)
        return version

    async def reload(self, name: str, path: str | None = None) -> Reloaded:
        """Serves what is now at the model's place, or at ``path``. Raises `RequestError`.

        New work goes to the new version; what the old one runs ends there. With the same
        weights there is no new version: its sessions continue, and what is no part of a
        state is taken again.
        """
        with self._change():
            old = self._current(name)
            source = old.source if path is None else old.source._replace(source=self._path(path))
            checkpoint = await asyncio.to_thread(self._builder.read, source)
            if checkpoint.digest == old.service.model.digest:
                same = self._builder.refreshed(old, source, checkpoint)
                self._models.current[name] = same
                return Reloaded(same, changed=False)
            version = await self._start(source, checkpoint, old.async_engine.metrics)
            self._models.current[name] = version
            self._retire(old, OtherVersion)
        logger.info("model %s was replaced by another version", name)
        return Reloaded(version, changed=True)

    def unload(self, name: str) -> None:
        """Takes a model out. Raises `RequestError`."""
        with self._change():
            version = self._current(name)
            if len(self._models.current) == 1:
                raise LastModel
            del self._models.current[name]
            self._retire(version, ModelNotFound)
        logger.info("model %s was unloaded", name)

    async def close(self) -> None:
        """Before the models stop: nothing is waited for any more."""
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    @contextmanager
    def _change(self) -> Iterator[None]:
        if self._models.is_draining:
            raise Draining
        if self._is_changing:
            raise ModelChanging
        self._is_changing = True
        try:
            yield
        except ModelBroken as error:
            logger.warning("a model cannot be served: %s", error.message)
            raise ModelBroken(_without_folders(error.message)) from error
        finally:
            self._is_changing = False

    def _current(self, name: str) -> Version:
        if name not in self._models.current:
            raise ModelNotFound
        return self._models.current[name]

    def _path(self, path: str) -> str:
        """A folder under that of the models, whatever links there are on the way."""
        if self._model_dir is None:
            raise LoadingRefused
        root = self._model_dir.resolve()
        try:
            folder = (root / path).resolve()
            files = [file.resolve() for file in folder.iterdir()]
        except (OSError, ValueError, RuntimeError):  # a NUL in it, or a loop of links
            raise invalid("path", "is not a folder among the server's models") from None
        if not all(place.is_relative_to(root) for place in (folder, *files)):
            raise invalid("path", "is not a folder among the server's models")
        return str(folder)

    async def _start(
        self, source: ModelSource, checkpoint: Checkpoint, metrics: Metrics
    ) -> Version:
        models = self._models
        taken = {v.home.path: v.service.model.digest for v in models.versions if v.home}
        version = await asyncio.to_thread(self._builder.build, source, checkpoint, taken, metrics)
        try:
            await models.start_version(version)
        except BaseException:
            await models.stop_version(version)
            raise
        if models.is_draining:
            await models.stop_version(version)
            raise Draining
        return version

    # Leaving

    def _retire(self, version: Version, refusal: Callable[[], RequestError]) -> None:
        version.async_engine.begin_retirement(refusal)
        self._models.retiring.append(version)
        task = asyncio.create_task(self._let_end(version))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _let_end(self, version: Version) -> None:
        async_engine = version.async_engine
        if not await _within(self._retire_timeout_s, async_engine.finished()):
            logger.warning(
                "model %s: ending the requests that still run on an old version", version.name
            )
        if async_engine.durable:
            await _within(SAVE_TIMEOUT_S, async_engine.retire())
        async_engine.requests.cancel_all()
        await _within(CANCEL_TIMEOUT_S, async_engine.drained())
        stats = await async_engine.stats()
        if not await self._models.stop_version(version):
            logger.error("model %s: an old version did not stop", version.name)
        self._models.retired(version, stats)
        logger.info("model %s: an old version was stopped", version.name)


def _without_folders(message: str) -> str:
    """``message`` with the last part of each absolute path in it: clients see no more of them."""
    return _FOLDERS.sub("", message)


async def _within(timeout_s: float, work: Coroutine[Any, Any, None]) -> bool:
    """Whether ``work`` ends in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        return False
    return True
