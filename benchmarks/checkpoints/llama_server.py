"""llama.cpp's server as a library, for the process of `benchmarks.checkpoints.edited`.

    python benchmarks/checkpoints/llama_server.py FILE FOLDER THREADS CONTEXT

Prints its address, and ends with its input. Slots are saved in FOLDER.
"""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    """Serves until the input ends."""
    file, folder, threads, context = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = file, f"{folder}/"
    params.n_ctx, params.n_parallel, params.warmup = int(context), 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
