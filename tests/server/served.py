"""The real server around real, tiny models in folders, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import connect

from server.api.app import create_app
from server.config import ModelSource, ServerConfig, model_source
from server.http.server import bind
from server.models.build import Measure, build_models, measured_costs
from server.models.registry import Models, Version
from tests.reliability.servers import STUCK_S, socket_to
from tests.server.harness import PromptServer
from tests.waiting import eventually

#: A generation that continues until it is told not to, or until the test ends.
ENDLESS = {"max_tokens": 1_000_000, "ignore_eos": True, "temperature": 0.9, "seed": 7}


@dataclass(frozen=True)
class Served:
    """A server at work, and its models."""

    models: Models
    http: httpx.AsyncClient
    port: int

    def socket(self, **options: Any) -> connect:
        return socket_to(f"ws://127.0.0.1:{self.port}/v1/stream", **options)

    async def complete(self, prompt: str | list[int] = "Once", **body: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 20, "seed": 3, "ignore_eos": True, **body}
        answer: dict[str, Any] = (await self.http.post("/v1/completions", json=body)).json()
        return answer

    async def text(self, prompt: str | list[int] = "Once", **body: Any) -> str:
        answer = await self.complete(prompt, **body)
        assert "choices" in answer, answer
        return str(answer["choices"][0]["text"])

    async def retired(self) -> None:
        """Returns when no old version is left."""

        async def is_retired() -> bool:
            return not self.models.retiring

        await eventually(is_retired)

    def version(self, name: str) -> Version:
        return self.models.current[name]


@asynccontextmanager
async def served(
    *models: str | ModelSource, measure: Measure = measured_costs, **settings: Any
) -> AsyncIterator[Served]:
    """A server of ``models``, each as a flag has it. Ends with every thread joined."""
    config = ServerConfig(
        model=tuple(model_source(m) if isinstance(m, str) else m for m in models),
        **{"threads": 1, "max_sessions": 8, "speculation": "off", **settings},
    )
    built, builder = await asyncio.to_thread(build_models, config, measure=measure)
    app = create_app(built, config, "0.0.0", builder=builder)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = PromptServer(app, config)
    done = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{port}"
    # Without HTTPS: reading the certificates of the world takes 20 ms of processor time.
    async with httpx.AsyncClient(base_url=url, timeout=STUCK_S, verify=False) as http:
        try:
            assert (await http.get("/ready")).status_code == 200  # its threads have started
            yield Served(built, http, port)
        finally:
            await http.aclose()
            server.stop()
            server.stop()
            await done
