"""Published files, read as a user's would be, and compared with what their publishers computed.

``python -m benchmarks.published_files FOLDER...`` looks for the files of `FILES` below the folders,
which the user has cloned or unpacked. It exits 1 where a model's numbers are not the published
ones, and 2 where no file is found. ``--output`` writes what was found.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.report import RESULTS, Figures, Result, command_line, show, table
from model.checkpoint import Checkpoint, load_checkpoint
from model.native.runtime import Runtime
from model.weights import num_parameters

Logits = npt.NDArray[np.float32]
Backend = Literal["native", "torch"]
BACKENDS: tuple[Backend, ...] = ("native", "torch")

RESULT = RESULTS / "published_files.json"


@dataclass(frozen=True)
class PublishedFile:
    """``name`` is that of the file, ``source`` where it comes from.

    The last token of ``prompt`` has the logits that ``expected`` gives, [vocabulary], of which the
    path of the file is the argument. No number may differ by more than ``tolerance``.
    """

    name: str
    family: str
    source: str
    prompt: str
    expected: Callable[[Path], Logits]
    tolerance: float


def next_to(name: str) -> Callable[[Path], Logits]:
    """Logits in a file of float32 next to the model's."""
    return lambda path: np.fromfile(path.with_name(name), "<f4")


FILES = tuple(
    PublishedFile(
        name=f"tiny-rwkv-7v0-834K-{dtype}.bin",
        family="RWKV-7",
        source="rwkv.cpp, `tests`",
        prompt='"in',
        expected=next_to("expected-logits-7v0-834K.bin"),
        tolerance=1e-6,
    )
    for dtype in ("FP32", "FP16")
)


def logits_of(checkpoint: Checkpoint, ids: Sequence[int], backend: Backend) -> Logits:
    """Those after the last of ``ids``, computed in float32, [vocabulary]."""
    if backend == "torch":
        with torch.no_grad():
            return np.asarray(checkpoint.model.parallel(torch.tensor([ids]))[0, -1].numpy())
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32", 1)
    runtime.run(runtime.empty_pool(1), [0], [0], [ids], [runtime.draw()])
    return runtime.logits()[0]


def compared(file: PublishedFile, path: Path) -> Figures:
    """What a file is, and how far each backend's logits are from the published ones."""
    checkpoint = load_checkpoint(path)
    ids = checkpoint.tokenizer.encode(file.prompt)
    expected = file.expected(path)
    differences = {
        backend: float(np.abs(logits_of(checkpoint, ids, backend) - expected).max())
        for backend in BACKENDS
    }
    return {
        "name": file.name,
        "family": file.family,
        "source": file.source,
        "sha256": _digest(path),
        "parameters": num_parameters(checkpoint.config),
        "largest_logit": float(np.abs(expected).max()),
        "largest_difference": differences,
        "tolerance": file.tolerance,
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_equal(figures: Figures) -> bool:
    """Whether no backend's logits differ by more than the tolerance, or are not finite."""
    return all(each <= figures["tolerance"] for each in figures["largest_difference"].values())


def found_below(folders: Sequence[Path]) -> dict[str, Path]:
    """The first file of each name of `FILES` below the folders."""
    names = {file.name for file in FILES}
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.name in names and path.is_file():
                found.setdefault(path.name, path)
    return found


def main() -> int:
    """The exit status: see the module's docstring."""
    parser = command_line(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    options = parser.parse_args()
    result, paths = Result("published_files", options.output), found_below(options.folders)
    for file in FILES:
        if file.name not in paths:
            print(f"{file.name} of {file.source} is not there", file=sys.stderr)
    if not paths:
        return 2
    files = [compared(file, paths[file.name]) for file in FILES if file.name in paths]
    shown = table("Largest difference from the published logits", ("file", *BACKENDS))
    for each in files:
        shown.add_row(each["name"], *(f"{each['largest_difference'][b]:.1e}" for b in BACKENDS))
    show(shown)
    result.finish({"files": files})
    return 0 if all(map(is_equal, files)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
