"""The published shapes of families besides RWKV-7, and what a session of each takes.

Read from their configs and cards; no weights are needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.report import markdown
from model.architectures.config import Config
from model.architectures.hybrid import with_past
from model.families.lfm2.config import Lfm2Config
from model.families.lfm3.config import Lfm3Config
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.qwen35.config import Qwen35Config
from model.families.rwkv7.config import Arwkv7Config
from model.state import StateLayout
from model.tensor_spec import POSITION_BLOCK
from model.weights import num_parameters

#: Lengths of texts for which the bytes of a bounded state are shown.
LENGTHS = (100, 2048, 8192)


def _qwen35(width: int, inner: int, layers: int, heads: tuple[int, int], tied: bool) -> Config:
    queries, values = heads
    return Qwen35Config(
        vocab_size=248_320,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=inner,
        attention_layers=tuple(range(3, layers, 4)),
        num_attention_heads=queries,
        num_key_value_heads=queries // 4,
        num_value_heads=values,
        tied=tied,
        max_context=262_144,
    )


def _lfm2(
    width: int, inner: int, layers: int, attention: tuple[int, ...], vocabulary: int = 65_536
) -> Config:
    return Lfm2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=inner,
        attention_layers=attention,
        num_attention_heads=width // 64,
        num_key_value_heads=8,
        max_context=128_000,
    )


def _lfm3(layers: int) -> Config:
    return Lfm3Config(
        vocab_size=128_000,
        num_hidden_layers=layers,
        attention_layers=tuple(range(2, layers, 4)),
        window_layers=tuple(range(4, layers, 4)),
        max_context=128_000,
    )


def _mamba2(width: int, layers: int) -> Config:
    return Mamba2Config(50_288, width, layers, num_attention_heads=width // 32)


def _mamba(width: int, layers: int) -> Config:
    return MambaConfig(50_280, width, layers, inner_size=2 * width, dt_rank=width // 16)


def _arwkv7(width: int, inner: int, layers: int, vocabulary: int = 151_936) -> Config:
    tied = width < 1000
    return Arwkv7Config(vocabulary, width, layers, intermediate_size=inner, tied=tied)


_SIX, _EIGHT = (2, 5, 8, 10, 12, 14), (2, 5, 9, 13, 17, 21, 24, 27)
#: By family and size.
PUBLISHED: dict[str, dict[str, Config]] = {
    "qwen35": {
        "0.8B": _qwen35(1024, 3584, 24, (8, 16), tied=True),
        "2B": _qwen35(2048, 6144, 24, (8, 16), tied=True),
        "4B": _qwen35(2560, 9216, 32, (16, 32), tied=True),
        "9B": _qwen35(4096, 12_288, 32, (16, 32), tied=False),
    },
    "lfm2": {
        "2.5-230M": _lfm2(1024, 2560, 14, (2, 4, 6, 8, 10, 12)),
        "350M": _lfm2(1024, 4608, 16, _SIX),
        "700M": _lfm2(1536, 6912, 16, _SIX),
        "1.2B": _lfm2(2048, 8192, 16, _SIX),
        "2.6B": _lfm2(2048, 10_752, 30, _EIGHT),
        "2.5-2.6B": _lfm2(2048, 10_752, 30, _EIGHT, 128_000),
    },
    "lfm3": {"1.7B": _lfm3(24)},
    "mamba2": {
        "130M": _mamba2(768, 24),
        "370M": _mamba2(1024, 48),
        "780M": _mamba2(1536, 48),
        "1.3B": _mamba2(2048, 48),
        "2.7B": _mamba2(2560, 64),
        "Codestral 7B": Mamba2Config(
            32_768, 4096, 64, num_attention_heads=128, num_groups=8, tied=False
        ),
    },
    "mamba": {
        "130M": _mamba(768, 24),
        "370M": _mamba(1024, 48),
        "790M": _mamba(1536, 48),
        "1.4B": _mamba(2048, 48),
        "2.8B": _mamba(2560, 64),
        "Falcon 7B": MambaConfig(
            65_024, 4096, 64, inner_size=8192, dt_rank=256, mixer_norm=True, tied=False
        ),
    },
    "arwkv7": {
        "0.5B": _arwkv7(896, 4864, 24),
        "1.5B": _arwkv7(1536, 8960, 28),
        "3B": _arwkv7(2048, 11_008, 36),
        "7B": _arwkv7(3584, 18_944, 28, 152_064),
    },
}


def constant_table(sizes: Mapping[str, Config]) -> str:
    """What a session of a constant family takes."""
    rows = []
    for name, config in sizes.items():
        num_bytes = StateLayout.of(config).num_bytes
        cells = [name, f"{num_parameters(config) / 1e6:,.0f} M", f"{num_bytes / 1e6:,.1f} MB"]
        rows.append([*cells, f"{2**30 // num_bytes:,}"])
    return markdown(["model", "parameters", "state of a session", "sessions per GiB"], rows)


def bounded_table(sizes: Mapping[str, Config]) -> str:
    """What a session of a bounded family takes after texts of `LENGTHS`."""
    rows = []
    for name, config in sizes.items():
        layout = StateLayout.of(with_past(config, LENGTHS[-1], "stop"))
        cells = [name, f"{num_parameters(config) / 1e6:,.0f} M"]
        cells += [f"{layout.fixed_bytes:,}", f"{layout.group_bytes // POSITION_BLOCK:,}"]
        rows.append(cells + [f"{layout.used_bytes(n) / 1e6:,.1f} MB" for n in LENGTHS])
    texts = (f"text of {length:,}" for length in LENGTHS)
    head = ["model", "parameters", "fixed, bytes", "per token, bytes", *texts]
    return markdown(head, rows)


def tables(*families: str) -> dict[str, str]:
    """Those of a family's page, by their names."""
    found = {}
    for family in families:
        sizes = PUBLISHED[family]
        is_bounded = any(config.context for config in sizes.values())
        found[f"{family} sessions"] = (bounded_table if is_bounded else constant_table)(sizes)
    return found
