"""Which fields of a foreign config are let pass though no reader knows them, and which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.files import ConfigError
from model.foreign import read_config
from model.foreign.config import ForeignConfig

#: Of training, of programs and their versions, of kernels, and of what a call returns.
PASS = {
    "model_name": "unsloth/x",
    "unsloth_fixed": True,
    "unsloth_version": "2026.5.3",
    "trl_version": "0.27.0",
    "peft_version": "1.0.0rc1",
    "bitsandbytes_version": "0.50.2",
    "hidden_dropout_prob": 0.1,
    "embd_pdrop": 0.1,
    "layerdrop": 0.0,
    "drop_path_rate": 0.1,
    "initializer_factor": 1.0,
    "init_std": 0.02,
    "out_proj_init_scale": 1,
    "use_xavier": True,
    "router_aux_loss_coef": 0.001,
    "z_loss": 1e-4,
    "loss_type": "ce",
    "label_smoothing": 0.1,
    "gradient_checkpointing_kwargs": {},
    "weight_decay": 0.1,
    "learning_rate": 1e-3,
    "fuse_cross_entropy": True,
    "fused_mlp": True,
    "use_flash_attn": True,
    "ssm_dtype": "float32",
    "attn_implementation": "sdpa",
    "return_dict_in_generate": True,
    "output_scores": False,
    "tie_word_embeddings": None,
    "quantization_config": None,
    "rope_scaling": None,
}
#: What may change the mathematics, next to names above that look alike.
REFUSED = {
    "output_gate_type": "sigmoid",
    "output_norm": True,
    "output_multiplier": 2.0,
    "initial_state": "learned",
    "init_state": [1],
    "logit_scale": 2.0,
    "scale_emb": 12,
    "attention_version": "v2",
    "version": 7,
    "mixer_version": 2.1,
    "conv_kernel": 4,
    "embedding_multiplier": 2.0,
    "sliding_window": 8,
    "use_qk_norm": True,
    "trainable": True,
    "softcap": 30.0,
    "decay_rate": 0.1,
    "model_scale": 2.0,
    "use_triton_norm_eps": 1e-3,
}


def test_fields_that_are_not_computed_with_pass(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "everstream.models"):
        ForeignConfig({"model_type": "any", **PASS}).refuse_unknown()
    (line,) = caplog.messages
    names = sorted(name for name, value in PASS.items() if value is not None)
    assert line.startswith(f"any: fields of training or of programs: {', '.join(names)[:200]}")


def test_known_fields_are_no_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "everstream.models"):
        ForeignConfig({"model_type": "any", "transformers_version": "5.0.0"}).refuse_unknown()
    assert not caplog.messages


@pytest.mark.parametrize("name", REFUSED)
def test_field_that_may_change_the_mathematics_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"any: unknown field '{name}'"):
        ForeignConfig({"model_type": "any", name: REFUSED[name]}).refuse_unknown()


def test_null_is_a_field_that_is_not_there() -> None:
    source = ForeignConfig({"model_type": "any", "tied": None, "eps": None, "size": None})
    assert source.boolean("tied", True) is True
    assert source.number("eps", 0.5) == 0.5
    assert source.integer("size", 3) == 3


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "phi3", "x" * 300])
def test_family_that_is_not_served_is_told_what_is(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == (
        f"config.json: {family[:80]} models are not supported; docs/start/models.md has what is"
        " served (rwkv7, qwen35, lfm2, lfm3, llama, mamba, mamba2, mamba2_hybrid, jamba,"
        " arwkv7), docs/contribute/convert.md the rest"
    )
