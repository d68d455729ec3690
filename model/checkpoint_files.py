"""The names of the files that are a model."""

from __future__ import annotations

from model.tokenizer import FILES as TOKENIZER_FILES
from model.weights import WEIGHTS

CONFIG = "config.json"
#: A tokenizer of another kind may stand for ``tokenizer.json``, and an index for the weights.
FILES = (CONFIG, WEIGHTS, TOKENIZER_FILES[0])
#: End the names of files that are a model without a folder: native RWKV files, of torch or of
#: safetensors, and GGUF.
TORCH_SUFFIX, ST_SUFFIX, GGUF_SUFFIX = FILE_SUFFIXES = (".pth", ".st", ".gguf")
