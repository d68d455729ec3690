"""Which files of weight changes a model is loaded with; `model.foreign.lora` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Lora(NamedTuple):
    """``files`` are merged in their order; a folder is one of the package ``peft``.

    ``alpha`` is that of LoRA files that do not state theirs, as those of RWKV-PEFT.
    """

    files: tuple[Path, ...] = ()
    alpha: float | None = None


NO_LORA = Lora()
