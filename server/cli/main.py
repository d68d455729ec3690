"""The command ``everstream``: the group of all commands, each imported when it is asked for."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from model.files import one_line
from server.cli import options

# -------------------------------------------------------------------------------------------------
# The group of all commands: each is imported when it is asked for.
#
# ``everstream serve`` must not wait for the imports of ``everstream train``, so heavy imports are
# inside the commands as well. For every command, an error that the user can fix is one line on
# standard error and exit status 2.


#: name -> (module, function). A name of two words is in a group; a group's own name runs alone.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("server.cli.serve", "serve"),
    "generate": ("server.cli.generate", "generate"),
    "inspect": ("server.cli.inspect", "inspect"),
    "tokenizer": ("model.training.cli", "tokenizer_command"),
    "train": ("model.training.cli", "train_command"),
    "average": ("model.training.cli", "average_command"),
    "eval": ("model.training.cli", "eval_command"),
    "export": ("model.export.cli", "export_command"),
    "pull": ("model.hub.cli", "pull_command"),
    "models": ("model.hub.cli", "models_command"),
    "models rm": ("model.hub.cli", "remove_command"),
    "quantize": ("model.quantization.cli", "quantize_command"),
    "convert": ("model.convert.cli", "convert_command"),
    "chat": ("clients.chat.cli", "chat"),
    "bench": ("clients.bench.cli", "bench"),
    "key": ("server.cli.keys", "key_command"),
    "state make": ("server.cli.state", "make_command"),
    "state inspect": ("server.cli.state", "inspect_command"),
    "store check": ("server.cli.store", "check_command"),
    "store backup": ("server.cli.store", "backup_command"),
    "store new-id": ("server.cli.store", "new_id_command"),
    "store compact": ("server.cli.store", "compact_command"),
    "store export": ("server.cli.store", "export_command"),
}

GROUPS = {
    "store": "Check, back up, repair and export a folder of kept sessions.",
    "state": "Make and inspect initial states of sessions.",
}


#: A package that not every install has -> the extra that brings it.
EXTRAS = {
    "torch": "train",
    "matplotlib": "train",
    "huggingface_hub": "hub",
    "opentelemetry": "otel",
    "psycopg": "postgres",
    "ray": "ray",
    "obstore": "s3",
}

PROGRAM = "everstream"

#: Exit statuses: the output's reader has left; invalid usage or an error that the user can fix; the
#: user pressed Ctrl-C.
UNREAD, USAGE, INTERRUPTED = 1, 2, 130

#: Errors of a write, which name no file: to a disk that is full or broken.
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: The base of what typer raises for a bad command line, by whichever version.
_ClickException: Any = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """The commands of `COMMANDS`.

    The types of contexts and commands are click's or typer's own, by typer's version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        words = {tuple(name.split()): place for name, place in COMMANDS.items()}
        found = {name: place for name, place in words.items() if name[0] == cmd_name}
        if not found:
            return super().get_command(ctx, cmd_name)
        about = GROUPS.get(cmd_name)
        app = typer.Typer(
            name=cmd_name,
            help=about,
            no_args_is_help=about is not None,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
        )
        for name, (module, function) in found.items():
            command = getattr(import_module(module), function)
            if len(name) < max(map(len, found)):  # the group's name alone
                app.callback(invoke_without_command=True, help=getdoc(command))(command)
            else:
                app.command(name[-1])(command)
        return get_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """An unknown name is refused with the names that are close to it."""
        try:
            return super().resolve_command(ctx, args)
        except _ClickException as error:
            close = get_close_matches(args[0], self.list_commands(ctx))
            if close:
                names = ", ".join(map(repr, close))
                error.message = f"{error.message.rstrip('.')}. Did you mean {names}?"
            raise

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command; an error that the user can fix becomes one line."""
        extra |= {"standalone_mode": False, "prog_name": PROGRAM}
        _write_any_text()
        try:
            status = super().main(*args, **extra) or 0
            print(end="", flush=True)  # nothing, where there is no standard output
        except _ClickException as error:
            status = _show(error)
        except typer.Abort:
            status = INTERRUPTED
        except ModuleNotFoundError as error:
            status = _missing(error)
        except OSError as error:
            status = _failed(error)
        if standalone_mode:
            sys.exit(status)
        return status


def _write_any_text() -> None:
    """What the terminal's encoding does not have is written as ``?``, in all commands."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _failed(error: OSError) -> int:
    if error.filename is not None:  # a file that the user has named
        return _complain(f"{error.filename}: {error.strerror}")
    if error.errno not in (errno.EPIPE, *_UNWRITTEN):
        raise error
    status = UNREAD  # as after `| head`, whose reader has what it wants
    if error.errno != errno.EPIPE:
        with contextlib.suppress(OSError):  # standard error may be what is full
            status = USAGE
            _complain(f"cannot write: {error.strerror}")
    for stream in (sys.stdout, sys.stderr):
        # What is left in its buffer must not fail once more at the end of the process.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def _show(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return USAGE
    context = getattr(error, "ctx", None)
    more = f" See '{context.command_path} --help'." if context is not None else ""
    message = error.format_message().rstrip(".")
    return _complain(f"{message}{'' if message.endswith('?') else '.'}{more}")


def _missing(error: ModuleNotFoundError) -> int:
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    return _complain(
        f"this needs {package}, which is not installed: pip install 'everstream[{EXTRAS[package]}]'"
    )


def _complain(message: str) -> int:
    typer.echo(f"everstream: {one_line(message)}", err=True)
    return USAGE


# -------------------------------------------------------------------------------------------------
# The command ``everstream``. Its commands are in files of their own: see `server.cli.main`.


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point of the command ``everstream``."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"everstream {options.version()}")
        raise typer.Exit


@app.callback()
def everstream(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Tokens for ever, at constant memory."""


if __name__ == "__main__":
    main()
