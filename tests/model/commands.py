"""Commands of ``everstream`` in this process: their output, or the line that names a mistake."""

from __future__ import annotations

from typer.testing import CliRunner

from server.cli.main import app


def everstream(*words: object) -> str:
    """What a command that succeeds prints."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object) -> str:
    """The one line that a command says of a mistake, without the program's name.

    ``serve`` gets a free port: it may listen before it finds the mistake.
    """
    port = ("--port", "0") if words[0] == "serve" else ()
    result = CliRunner().invoke(app, [str(word) for word in (*words, *port)])
    assert result.exit_code == 2, result.output
    name, _, message = result.stderr.partition(": ")
    assert name == "everstream", result.stderr
    assert message.count("\n") == 1, message
    return message.removesuffix("\n")
