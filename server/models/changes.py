"""Models are loaded, replaced and unloaded while the server runs.

Loading happens in a thread, while everything else is served. What is replaced or unloaded
takes no new work, ends what it runs, saves its kept sessions, and gives its memory back.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from model.checkpoint import Checkpoint
from server.config.values import ModelSource
from server.errors import ModelNotFound, RequestError, invalid
from server.models.registry import Models, Version
from server.observability.metrics import Metrics
from server.runtime.async_engine import Draining
from server.sessions.loader import OtherVersion

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
