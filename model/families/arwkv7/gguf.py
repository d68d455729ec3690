"""ARWKV in GGUF (``arwkv7``), as llama.cpp's converter writes it.

As RWKV-7's (`model.families.rwkv7.gguf`), but the token shift has five rows where there is no gate,
whose rank is 0 then. The head is always there, also where it is the embedding again.
"""

from __future__ import annotations

from dataclasses import replace

from model.families.arwkv7.config import Arwkv7Config
from model.families.arwkv7.read import Names, renamed, sizes
from model.families.rwkv7.gguf import (
    BOS,
    EOS,
    GROUP_NORM_EPS,
    HARMLESS,
    TimeMixTensors,
    agree,
    metadata_of,
)
from model.foreign.renamed import Part, Renamed
from model.weights.gguf_file import GgufFile

PREFIX = "arwkv7."
GGUF = Names(
    embedding="token_embd.weight",
    head="output.weight",
    norm="output_norm.weight",
    block="blk.{}",
    shift_mix=Part(("time_mix_lerp_fused.weight",)),
    vectors=("time_mix_k_k.weight", "time_mix_k_a.weight", "time_mix_r_k.weight"),
    low_rank=("time_mix_{}1.weight", "time_mix_{}2.weight", "time_mix_{}0.weight"),
    low_rank_form="same",
    modules={
        "mixer_norm": "attn_norm",
        "mixer.receptance": "time_mix_receptance",
        "mixer.key": "time_mix_key",
        "mixer.value": "time_mix_value",
        "mixer.output": "time_mix_output",
        "mixer.group_norm": "time_mix_ln",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    },
)


def read_gguf(file: GgufFile, name: str) -> tuple[Arwkv7Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = metadata_of(file, name, PREFIX)
    source.ignore(*(PREFIX + field for field in HARMLESS))
    source.choice(f"{PREFIX}token_shift_count", 1)
    source.choice(f"{PREFIX}rescale_every_n_layers", 0)
    tensors = TimeMixTensors(file, name, source.integer(f"{PREFIX}wkv.head_size"))
    config = sizes(tensors, name, GGUF)
    gate_rank = f"{PREFIX}attention.gate_lora_rank"
    if not config.gate_rank:
        source.choice(gate_rank, 0)
        wanted = {}
    else:
        wanted = {gate_rank: config.gate_rank}
    wanted |= {
        f"{PREFIX}block_count": config.num_hidden_layers,
        f"{PREFIX}embedding_length": config.hidden_size,
        f"{PREFIX}feed_forward_length": config.intermediate_size,
        f"{PREFIX}attention.decay_lora_rank": config.decay_rank,
        f"{PREFIX}attention.iclr_lora_rank": config.rate_rank,
    }
    value_rank = f"{PREFIX}attention.value_residual_mix_lora_rank"
    if config.num_hidden_layers > 1:
        wanted[value_rank] = config.value_rank
    else:
        source.ignore(value_rank)
    for key, size in wanted.items():
        agree(source, key, source.integer(key), size)
    size = config.vocab_size
    agree(source, f"{PREFIX}vocab_size", source.integer(f"{PREFIX}vocab_size", size), size)
    config = replace(
        config,
        norm_eps=source.number(f"{PREFIX}attention.layer_norm_rms_epsilon", 1e-6),
        group_norm_eps=GROUP_NORM_EPS,
        bos_token_id=source.special_id(BOS, size),
        eos_token_id=source.special_id(EOS, size),
    )
    source.refuse_unknown()
    return config, renamed(tensors, name, config, GGUF, set())
