"""Adds columns to a table of texts: how unlikely each text is, and how similar to another.

Needs pandas. The table is a CSV file, or a `pandas.DataFrame` if the functions are
called from Python. Each request to the server has several texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from clients.api_key import ApiKey
from clients.python import Client, EverstreamError

try:
    import pandas as pd  # type: ignore[import-untyped]
except ImportError as error:
    raise SystemExit("this example needs pandas: pip install pandas") from error

#: Texts per request; each uses one of the server's sessions while it is read.
MAX_AT_ONCE = 8

T = TypeVar("T")


def bits_per_byte(client: Client, texts: pd.Series) -> pd.Series:
    """Bits of information per byte of each text; high is unlikely. NaN for a missing text."""

    def scored(some: Sequence[str]) -> list[float]:
        scores = client.score("", some)  # "" is the start of a text
        return [
            -score.logprob / math.log(2) / len(text.encode())
            for score, text in zip(scores, some, strict=True)
        ]

    return column(texts, scored).rename("bits_per_byte")


def nearness(client: Client, texts: pd.Series, to: str) -> pd.Series:
    """Cosine similarity of the embeddings of each text and of ``to``. NaN for a missing text."""
    (wanted,) = client.embed(to)

    def compared(some: Sequence[str]) -> list[float]:
        return [dot(wanted, vector) for vector in client.embed(some)]

    return column(texts, compared).rename("nearness")


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Cosine similarity of two vectors of length 1."""
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def column(texts: pd.Series, ask: Callable[[Sequence[str]], list[float]]) -> pd.Series:
    """Calls ``ask`` with `MAX_AT_ONCE` texts at a time; the results are in the texts' rows."""
    filled = texts[texts.notna() & (texts != "")]
    found = [value for some in pieces(filled.tolist()) for value in ask(some)]
    return pd.Series(found, index=filled.index, dtype=float).reindex(texts.index)


def pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields the items, `MAX_AT_ONCE` at a time."""
    for begin in range(0, len(items), MAX_AT_ONCE):
        yield items[begin : begin + MAX_AT_ONCE]


def main(
    path: Annotated[Path, typer.Argument(help="CSV file.", exists=True, dir_okay=False)],
    name: Annotated[
        str, typer.Option("--column", help="Name of the column with the texts.")
    ] = "text",
    near: Annotated[
        str | None, typer.Option(help="Also add the similarity to this text.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Add the bits per byte of a column of texts, least likely first."""
    table = pd.read_csv(path)
    if name not in table:
        raise typer.BadParameter(f"the columns are {', '.join(table)}", param_hint="--column")
    texts = table[name].astype("string")
    try:
        with Client(url, api_key) as client:
            table["bits_per_byte"] = bits_per_byte(client, texts)
            if near is not None:
                table["nearness"] = nearness(client, texts, near)
    except EverstreamError as error:
        typer.echo(f"frame: {error}", err=True)
        raise typer.Exit(1) from error
    table = table.sort_values("bits_per_byte", ascending=False)
    text = table.to_csv(out, index=False, float_format="%.4f")
    if text is not None:
        print(text, end="")


if __name__ == "__main__":
    typer.run(main)
