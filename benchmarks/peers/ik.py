"""ik_llama.cpp as a contender: the sessions of `decode.llama_session` over its older interface.

Its package has no names for half of what is needed, so the functions are taken from its library.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.decode.peers import Point

ON, OFF = True, False  # of flash attention
_CONTEXT, _SEQUENCE, _POSITION = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32


def as_llama_cpp() -> ModuleType:
    """ik_llama.cpp by the names of the module ``llama_cpp``, as far as `decode.llama` uses them."""
    from ik_llama_cpp import _ctypes_api as ik

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(ik._lib, name)
        found.restype, found.argtypes = result, list(arguments)
        return found

    module = ModuleType("llama_cpp")
    for name in (
        *("llama_backend_init", "llama_model_default_params", "llama_context_default_params"),
        *("llama_model_load_from_file", "llama_free", "llama_batch_init", "llama_batch_free"),
        "llama_decode",
    ):
        setattr(module, name, getattr(ik, name))
    cut = (_CONTEXT, _SEQUENCE, _POSITION, _POSITION)
    copied = (_CONTEXT, _SEQUENCE, _SEQUENCE, _POSITION, _POSITION)
    numbers: Any = ctypes.POINTER(ctypes.c_float)
    threads = (_CONTEXT, ctypes.c_uint32, ctypes.c_uint32)
    attributes = {
        "LLAMA_FLASH_ATTN_TYPE_ENABLED": ON,
        "LLAMA_FLASH_ATTN_TYPE_DISABLED": OFF,
        "llama_log_callback": ctypes.CFUNCTYPE(
            None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p
        ),
        "llama_log_set": lambda callback, data: None,  # its log goes to stderr
        "llama_model_free": ik.llama_free_model,
        "llama_init_from_model": lambda model, params: _context(ik, model, params),
        "llama_get_memory": lambda context: context,
        "llama_memory_clear": lambda context, data: ik.llama_kv_cache_clear(context),
        "llama_memory_seq_rm": function("llama_kv_cache_seq_rm", ctypes.c_bool, *cut),
        "llama_memory_seq_cp": function("llama_kv_cache_seq_cp", None, *copied),
        "llama_set_n_threads": function("llama_set_n_threads", None, *threads),
        "llama_synchronize": function("llama_synchronize", None, _CONTEXT),
        "llama_get_logits": function("llama_get_logits", numbers, _CONTEXT),
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _context(ik: ModuleType, model: int, params: Any) -> int | None:
    """Its context; flash attention is a switch of its own name."""
    params.flash_attn = bool(params.flash_attn_type)
    context: int | None = ik.llama_init_from_model(model, params)
    return context


def contender(models: Path, name: str) -> Any:
    """A `decode.peers.Contender`: what `checkpoints.llama` calls ``name``, on this library."""
    sys.modules["llama_cpp"] = as_llama_cpp()
    from benchmarks.checkpoints import llama
    from benchmarks.decode.llama_session import FLASH, Session

    class Older:
        """What differs from llama.cpp: a past is read, as files of sequences have another form."""

        session = Session

        def flash_choices(self, point: Point) -> list[str]:
            """Its flash attention ends the process where there are several sequences."""
            return ["off"] if point.streams > 1 else list(FLASH)

    return type("Ik", (Older, getattr(llama, name)), {})(models)
