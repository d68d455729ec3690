"""Which service a request is for."""

from __future__ import annotations

from fastapi import Request

from server.api.errors import ModelNotFound
from server.api.service import Service


def service_of(request: Request) -> Service:
    """The service of the app that ``request`` came to."""
    service: Service = request.app.state.service
    return service


def service_for(request: Request, model: str | None) -> Service:
    """The service of ``model``, or of the default one. Raises `ModelNotFound`."""
    service = service_of(request)
    if model is not None and model != service.model.name:
        raise ModelNotFound
    return service
