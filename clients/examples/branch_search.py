"""Searches for a good continuation: expand, score, and keep the best of many branches.

A branch is a kept session. Each round forks every branch, generates a few tokens
in each copy, scores the copies, keeps the best and deletes the others. A fork
costs the same after ten tokens and after a million.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from clients.api_key import ApiKey
from clients.python import AsyncClient, AsyncSession, EverstreamError, Token

#: Maximum concurrent requests, below the server's limit for one socket.
MAX_AT_ONCE = 32
SHOWN_CHARS = 54

T = TypeVar("T")


@dataclass(frozen=True)
class Branch:
    """A session, and the text that it has generated since the prompt.

    ``logprob`` is the sum over its ``tokens``; branches are ranked by ``score``.
    """

    session: AsyncSession
    text: str = ""
    tokens: int = 0
    logprob: float = 0.0
    score: float = -math.inf
    is_done: bool = False


@dataclass(frozen=True)
class Search:
    """Each of ``rounds`` forks every branch ``forks`` times and keeps the ``keep`` best.

    With an ``ending`` the score of a branch is the mean log-probability of that text
    after the branch; otherwise that of the branch's own tokens.
    """

    client: AsyncClient
    keep: int
    forks: int
    num_tokens: int
    rounds: int
    temperature: float
    ending: str | None
    seed: int

    async def run(self, prompt: str, console: Console) -> list[Branch]:
        """Returns the best branches, best first; the caller must delete their sessions."""
        root = await self.client.create_session()
        await root.append(prompt)
        best, seeds = [Branch(root)], itertools.count(self.seed)
        for number in range(1, self.rounds + 1):
            growing = [branch for branch in best if not branch.is_done]
            if not growing:
                break
            grown = await _gather(
                [
                    self._grow(parent, copy, next(seeds))
                    for parent in growing
                    for copy in await parent.session.fork(self.forks)
                ]
            )
            done = [branch for branch in best if branch.is_done]
            ranked = sorted([*done, *grown], key=lambda branch: branch.score, reverse=True)
            best, rest = ranked[: self.keep], ranked[self.keep :]
            await _gather([branch.session.delete() for branch in (*growing, *rest)])
            console.print(table_of(f"round {number} of {self.rounds}", best, len(ranked)))
        return best

    async def _grow(self, parent: Branch, copy: AsyncSession, seed: int) -> Branch:
        """Generates tokens in ``copy``, a fork of the parent's session, and scores it."""
        generation = copy.generate(
            max_tokens=self.num_tokens, temperature=self.temperature, seed=seed
        )
        events = [event async for event in generation]
        tokens = [event.token_id for event in events if isinstance(event, Token)]
        logprob = parent.logprob + sum(await _logprobs(parent.session, tokens))
        num_tokens = parent.tokens + len(tokens)
        score = logprob / num_tokens
        if self.ending is not None:
            expected = await _logprobs(copy, self.ending)
            score = sum(expected) / len(expected)
        finished = generation.finished
        return Branch(
            copy,
            parent.text + "".join(event.text for event in events),
            num_tokens,
            logprob,
            score,
            is_done=finished is not None and finished.finish_reason == "stop",
        )


async def _logprobs(session: AsyncSession, text: str | Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of ``text`` after the session's own, which does not change."""
    (copy,) = await session.fork()
    scored = await copy.append(text, logprobs=True)
    await copy.delete()
    assert scored.logprobs is not None, scored
    return scored.logprobs


async def _gather(work: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits all of ``work``, `MAX_AT_ONCE` at a time; the results are in order."""
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def wait(one: Awaitable[T]) -> T:
        async with room:
            return await one

    return await asyncio.gather(*(wait(one) for one in work))


def table_of(title: str, branches: Sequence[Branch], num_all: int) -> Table:
    """A table of the branches that were kept, best first."""
    table = Table(title=f"{title}: the best {len(branches)} of {num_all}", title_justify="left")
    for name in ("score", "tokens"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("its end", no_wrap=True)
    for branch in branches:
        end = " ".join(branch.text.split())[-SHOWN_CHARS:]
        shown = "".join(char for char in end if char.isprintable())
        table.add_row(f"{branch.score:.3f}", str(branch.tokens), shown.replace("[", r"\["))
    return table


def main(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "Once upon a time",
    keep: Annotated[int, typer.Option(min=1, help="Number of branches kept after each round.")] = 4,
    forks: Annotated[int, typer.Option(min=1, help="Number of copies of each branch.")] = 4,
    tokens: Annotated[
        int, typer.Option(min=1, help="Number of tokens that each copy generates in a round.")
    ] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 6,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the copies.")] = 0.9,
    ending: Annotated[
        str | None, typer.Option(help="Text that the story should lead to.", show_default=False)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the search; the same seed gives the same search.")
    ] = 1,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Search for the best continuation of a text on a running server."""
    console = Console(highlight=False)

    async def search() -> None:
        async with AsyncClient(url, api_key) as client:
            plan = Search(client, keep, forks, tokens, rounds, temperature, ending, seed)
            best = await plan.run(prompt, console)
            console.print(f"\n{prompt}{best[0].text}", markup=False)
            await _gather([branch.session.delete() for branch in best])

    try:
        asyncio.run(search())
    except EverstreamError as error:
        typer.echo(f"branch_search: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
