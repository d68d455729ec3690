"""Bits per byte of models in bfloat16, int8 and int4, and of llama.cpp's files of four bits.

``python -m benchmarks.studies.quantization NAME=FOLDER ... --calibration TEXT --text TEXT
--llama-python PYTHON`` quantises each model in a temporary folder, and reads the same windows of
512 tokens with every form. llama.cpp gets the float32 weights in GGUF, which it quantises itself,
and the calibrated ones as Q4_0.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.report import Figures, Result, command_line, show_figures
from benchmarks.round_trip.__main__ import Job, read_by_peer, read_on_native
from model.checkpoint import Checkpoint, load_checkpoint
from model.checkpoint_files import weight_files
from model.evaluation import documents
from model.export import WRITERS, writer_of
from model.export.cli import export_command
from model.native.runtime import Runtime
from model.quantization.quantize import save_int4
from model.tokenizer import Tokenizer

WINDOW = 512
#: What llama.cpp makes of float32 by itself.
KINDS = ("Q4_0", "Q4_K_M")


def make_job(tokenizer: Tokenizer, text: Path, max_bytes: int, num_documents: int) -> Job:
    """Windows of the first ``max_bytes`` of each of the first documents, each after one token."""
    strings, windows = [], []
    for document in itertools.islice(documents(text), num_documents):
        string = document.encode()[:max_bytes].decode("utf-8", "ignore")
        ids = [tokenizer.eos_token_id, *tokenizer.encode(string)]
        windows += [ids[at : at + WINDOW + 1] for at in range(0, len(ids) - 1, WINDOW)]
        strings.append(string)
    num_bytes = sum(len(string.encode()) for string in strings)
    return Job([], windows, [[tokenizer.eos_token_id]], 1, num_bytes)


def native_rows(
    source: str, folder: Path, calibration: Path, job: Job
) -> Iterator[tuple[str, Figures]]:
    """Each form on the native runtime; ``folder`` gets the int4 ones, of which bytes are those."""
    original, short = load_checkpoint(source), folder / "bfloat16"
    export_command(source, short, "everstream", "bfloat16")
    yield "float32", _native(original, "float32", job)
    yield "bfloat16", _native(original, "bfloat16", job) | {"bytes": _num_bytes(short)}
    yield "int8", _native(original, "int8", job)
    for name, text in (("int4", None), ("int4, calibrated", calibration)):
        save_int4(folder / name, original, text)
        row = _native(load_checkpoint(folder / name), "int4", job)
        yield name, row | {"bytes": _num_bytes(folder / name)}


def llama_rows(source: str, folder: Path, python: Path, job: Job) -> Iterator[tuple[str, Figures]]:
    """The GGUF forms in llama.cpp, the calibrated one from where `native_rows` left it."""
    wide = folder / "float32.gguf"
    export_command(source, wide, "gguf", "float32")
    yield "llama.cpp, float32", _by_llama(wide, python, job)
    program = Path(__file__).parent / "llama_quantize.py"
    for kind in KINDS:
        file = folder / f"{kind}.gguf"
        command = [str(python), str(program), str(wide), str(file), kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield f"llama.cpp, {kind}", _by_llama(file, python, job)
    calibrated, file = load_checkpoint(folder / "int4, calibrated"), folder / "calibrated.gguf"
    writer_of(calibrated, "gguf")(file, calibrated, "q4_0")
    yield "llama.cpp, calibrated Q4_0", _by_llama(file, python, job)


def _native(checkpoint: Checkpoint, dtype: str, job: Job) -> Figures:
    runtime = Runtime(checkpoint.config, checkpoint.weights, dtype)
    return {"bits_per_byte": read_on_native(runtime, job).nats / math.log(2) / job.num_bytes}


def _by_llama(file: Path, python: Path, job: Job) -> Figures:
    nats = read_by_peer(python, "llama", file, job).nats
    return {"bits_per_byte": nats / math.log(2) / job.num_bytes, "bytes": file.stat().st_size}


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def with_losses(rows: Figures) -> Figures:
    """The rows with what each has more than the first one."""
    exact = next(iter(rows.values()))["bits_per_byte"]
    return {name: row | {"loss": row["bits_per_byte"] - exact} for name, row in rows.items()}


def measure(source: str, options: argparse.Namespace) -> Figures:
    """Every form of one model."""
    original = load_checkpoint(source)
    job = make_job(original.tokenizer, options.text, options.max_bytes, options.documents)
    rows: Figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows |= native_rows(source, folder, options.calibration, job)
        if options.llama_python and "gguf" in WRITERS.get(original.config.attention, {}):
            rows |= llama_rows(source, folder, options.llama_python, job)
    return {"model": original.config.to_dict(), "bytes": job.num_bytes, "forms": with_losses(rows)}


def main(argv: Iterable[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", help="NAME=FOLDER, or the name of a bundled model")
    parser.add_argument("--calibration", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to measure on")
    parser.add_argument("--llama-python", type=Path, help="Python interpreter with llama_cpp")
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--max-bytes", type=int, default=1200, help="of each document")
    options = parser.parse_args(None if argv is None else list(argv))
    result = Result("quantization", options.output)
    texts = {"calibration": options.calibration.name, "text": options.text.name}
    models: Figures = {}
    for given in options.models:
        name, _, folder = given.rpartition("=")
        models[name or folder] = measure(folder, options)
        result.save({**texts, "models": models})
    show_figures("bits per byte", {name: model["forms"] for name, model in models.items()})
    result.finish({**texts, "models": models})


if __name__ == "__main__":
    main()
