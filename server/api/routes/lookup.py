"""Which service a request is for.

It is held until the request has been answered: a version may be replaced meanwhile.
"""

from __future__ import annotations

from fastapi import Request

from server.models.registry import Models
from server.models.service import Service


def models_of(request: Request) -> Models:
    """The models of the app that ``request`` came to."""
    models: Models = request.app.state.models
    return models


def service_for(request: Request, model: str | None = None) -> Service:
    """The service of ``model``, or of the default one. Raises `ModelNotFound`."""
    models: Models = request.app.state.models
    service = models.default if model is None else models.service(model)
    request.state.held.enter_context(service.async_engine.use())
    return service


async def service_with(request: Request, session: str | None, model: str | None = None) -> Service:
    """The service that has ``session``; without a session, that of ``model``.

    A session is looked for in all models where none is named, in versions that still end
    what they run, too. Raises `RequestError`.
    """
    if session is None:
        return service_for(request, model)
    models: Models = request.app.state.models
    service = await models.holding(session, request.state.owner, model)
    request.state.held.enter_context(service.async_engine.use())
    return service
