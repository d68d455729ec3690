"""Other people's code, for tests alone, and what is needed to compare it with a layer of ours.

Only single files of the packages are run, by their path, so that neither
Triton nor what the rest of a package imports has to be there. `make full`
installs them from tests/oracle-packages.txt.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import Attention
from tests.model.attention.oracles import heads


def flash(operation: str) -> ModuleType:
    return load_file(folder("fla") / "ops" / operation / "naive.py")


def performer_pytorch() -> ModuleType:
    path = folder("performer_pytorch") / "performer_pytorch.py"
    distutils = ModuleType("distutils.version")  # gone since Python 3.12
    vars(distutils)["LooseVersion"] = Version
    with stubs("performer_pytorch.reversible", "local_attention", "axial_positional_embedding"):
        sys.modules["distutils.version"] = distutils
        return load_file(path)


def linear_attention_transformer() -> ModuleType:
    path = folder("linear_attention_transformer") / "linear_attention_transformer.py"
    with stubs(
        "linear_attention_transformer.reversible",
        "local_attention",
        "linformer",
        "product_key_memory",
        "axial_positional_embedding",
    ):
        return load_file(path)


def torchscale() -> ModuleType:
    folder("torchscale")
    with stubs("fairscale.nn", "timm.models.layers"):
        return importlib.import_module("torchscale.architecture.retnet")


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_loaded", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folder(package: str) -> Path:
    """Where ``package`` lies, without running it; fails the test where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"no {package}: pip install --no-deps -r tests/oracle-packages.txt")
    return Path(next(iter(spec.submodule_search_locations)))


@contextmanager
def stubs(*names: str) -> Iterator[None]:
    """Modules that can be imported from and hold nothing, for the length of an import."""
    before = dict(sys.modules)
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            stub = ModuleType(".".join(parts[:end]))
            vars(stub)["__getattr__"] = lambda attribute: None
            sys.modules[stub.__name__] = stub
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
        sys.modules.update(before)


def project(layer: Attention, x: Tensor, key_dim: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return heads(x @ layer.get_parameter("qkv.weight").T, layer, key_dim)


def normed_and_gated(layer: Attention, num: Tensor, x: Tensor) -> Tensor:
    weight, eps = layer.get_parameter("norm_weight"), layer.config.rms_norm_eps
    o = F.rms_norm(num, num.shape[-1:], weight, eps).flatten(2)
    return layer.get_submodule("out")(o * F.silu(layer.get_submodule("gate")(x)))


def log_retention_decay() -> Tensor:
    """[H, 1] for two heads: 31/32 and 63/64."""
    return torch.log(torch.tensor([[31 / 32], [63 / 64]], dtype=torch.float64))


def cosine_transform(x: Tensor) -> Tensor:
    width = x.shape[-1]
    spectrum = torch.fft.fft(torch.cat([x, x.flip(-1)], dim=-1))[..., :width]
    n = torch.arange(width)
    y = (spectrum * torch.exp(-0.5j * math.pi * n / width)).real / 2
    return y * torch.where(n == 0, math.sqrt(1 / width), math.sqrt(2 / width))


def dijiang_features(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = project(layer, x)
    weight = layer.get_parameter("frequency_weight")
    return softmax(weight * cosine_transform(q)), softmax(weight * cosine_transform(k)), v


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)
