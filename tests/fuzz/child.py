"""Reads files of strangers in a process of its own, with little memory, and says what came of it.

For each line of standard input, a JSON object with the fields of `tests.fuzz.run.Case`, it writes
one of a list: what came of it, and the message. It must start no process and write no file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import typer

from model.checkpoint import load_checkpoint
from model.files import FileError, read_file
from model.weights import StoredWeights
from server.api.auth import limits_by_name, read_keys
from server.cli import state as state_commands
from server.config import ModelSource, ServerConfig, read_config_file
from server.constraints.grammar import Vocabulary
from server.engine.engine import EngineConfig
from server.errors import RequestError
from server.models.backend import BackendError, open_backend
from server.models.build import ModelBuilder, read_state
from server.store.base import Identity
from server.store.states import import_session

MORE_MEMORY, CPU_S = 1 << 30, 20

#: What no file may cause. The interpreter reports it.
FORBIDDEN = (
    *("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"),
    *("socket.connect", "socket.bind", "os.remove", "os.rename", "os.mkdir", "os.symlink"),
)


class Forbidden(BaseException):
    """A file has caused something that no file may."""


def read_model(path: Path, about: Any) -> None:
    """As ``everstream serve`` does, and every weight on the way."""
    checkpoint = ModelBuilder(ServerConfig()).read(ModelSource("m", str(path)))
    tokenizer = checkpoint.tokenizer
    tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    Vocabulary(tokens, tokenizer.eos_token_id, tokenizer.encode_exact)
    tokenizer.decode(tokenizer.encode("Once upon a time\n\n<|endoftext|>", allow_special=True))
    if checkpoint.config.constant_state:
        open_backend(checkpoint, "native", "float32", 1).engine(1, EngineConfig(new_id=str))
    elif isinstance(checkpoint.weights, StoredWeights):
        for name in checkpoint.weights:
            checkpoint.weights[name]


def read_named_state(path: Path, about: Any) -> None:
    """As ``--state`` does, and ``everstream state inspect``."""
    checkpoint, identity = load_checkpoint(about["model"]), Identity(**about["identity"])
    with redirect_stderr(StringIO()) as errors, redirect_stdout(StringIO()):
        try:
            state_commands.inspect_command(path)
        except typer.Exit:
            raise RequestError(errors.getvalue().removesuffix("\n")) from None
    try:
        read_state(path, identity, checkpoint.config)
    except RequestError as error:
        raise RequestError(f"{path}: {error.message}") from error


def read_session(path: Path, about: Any) -> None:
    data, identity = read_file(path, 1 << 26), Identity(**about["identity"])
    for trust_unsigned in (True, False):
        import_session(data, identity, b"key", trust_unsigned=trust_unsigned)


def read_keys_file(path: Path, about: Any) -> None:
    limits_by_name(path, read_keys(path))


def read_settings(path: Path, about: Any) -> None:
    read_config_file(path, ServerConfig.model_fields)


ENTRIES: dict[str, Callable[[Path, Any], None]] = {
    "model": read_model,
    "state": read_named_state,
    "session": read_session,
    "keys": read_keys_file,
    "settings": read_settings,
}


def attempt(entry: str, path: Path, about: Any) -> tuple[str, str]:
    """What came of a file: ``loaded``, ``refused`` or ``fell``, with the message."""
    _limit_cpu()
    try:
        ENTRIES[entry](path, about)
    except (FileError, RequestError, BackendError) as error:
        return "refused", str(error)
    except OSError as error:  # as `server.cli.main` has it
        if error.filename is None:
            return "fell", traceback.format_exc()
        return "refused", f"{error.filename}: {error.strerror}"
    except BaseException:  # also a panic in an extension
        return "fell", traceback.format_exc()
    return "loaded", ""


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, used + MORE_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event in FORBIDDEN or (event == "open" and (arguments[2] or 0) & writes):
        raise Forbidden(f"{event}{arguments!r:.200}")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    warm = json.loads(sys.stdin.readline())
    for case in warm:  # imports what is imported when it is asked for
        print(json.dumps(attempt(case["entry"], Path(case["path"]), case["about"])), file=answers)
    answers.flush()
    _limit_memory()
    sys.addaudithook(_watch)
    for line in sys.stdin:
        case = json.loads(line)
        answer = attempt(case["entry"], Path(case["path"]), case["about"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
