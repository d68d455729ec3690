"""Adds to a table what a model makes of its texts: how odd each is, and how near to another.

Needs pandas. The table is a CSV file, or a `pandas.DataFrame` where these
functions are called; many texts go to the server in one request.
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

#: Each takes one of the server's sessions while it is read.
MAX_AT_ONCE = 8

T = TypeVar("T")


def bits_per_byte(client: Client, texts: pd.Series) -> pd.Series:
    """Of information in each byte of each text, to the model; high is odd. NaN for no text."""

    def scored(some: Sequence[str]) -> list[float]:
        scores = client.score("", some)  # "" is the start of a text
        return [
            -score.logprob / math.log(2) / len(text.encode())
            for score, text in zip(scores, some, strict=True)
        ]

    return column(texts, scored).rename("bits_per_byte")


def nearness(client: Client, texts: pd.Series, to: str) -> pd.Series:
    """The cosine between what the model makes of each text and of ``to``. NaN for no text."""
    (wanted,) = client.embed(to)

    def compared(some: Sequence[str]) -> list[float]:
        return [dot(wanted, vector) for vector in client.embed(some)]

    return column(texts, compared).rename("nearness")


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """The cosine of two vectors of length 1."""
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def column(texts: pd.Series, ask: Callable[[Sequence[str]], list[float]]) -> pd.Series:
    """What ``ask`` says of the texts, `MAX_AT_ONCE` at a time, each at its row."""
    filled = texts[texts.notna() & (texts != "")]
    found = [value for some in pieces(filled.tolist()) for value in ask(some)]
    return pd.Series(found, index=filled.index, dtype=float).reindex(texts.index)


def pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items, `MAX_AT_ONCE` at a time."""
    for begin in range(0, len(items), MAX_AT_ONCE):
        yield items[begin : begin + MAX_AT_ONCE]


def main(
    path: Annotated[Path, typer.Argument(help="A CSV file.", exists=True, dir_okay=False)],
    name: Annotated[str, typer.Option("--column", help="The one with the texts.")] = "text",
    near: Annotated[
        str | None, typer.Option(help="Also tell how near each is to this.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table there [the terminal].")] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Add the bits per byte of a column of texts, oddest first."""
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
