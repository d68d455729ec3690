"""Writes keys.json: the keys and shapes of flash-linear-attention's own models, per test case.

Run where the package and Triton are installed: python -m tests.model.foreign.configs.record_keys
"""

from __future__ import annotations

import json
from pathlib import Path

from fla import models

from tests.model.foreign.test_flash_linear_attention import CASES, FAMILIES, case_id

NAMES = {"gla": "GLA", "retnet": "RetNet", "linear_attn": "LinearAttention"}


def main() -> None:
    recorded = {}
    for family, changes in CASES:
        config = getattr(models, f"{NAMES[family]}Config")(**{**FAMILIES[family], **changes})
        model = getattr(models, f"{NAMES[family]}ForCausalLM")(config)
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        if changes.get("tie_word_embeddings"):
            del shapes["lm_head.weight"]
        recorded[case_id((family, changes))] = shapes
    text = json.dumps(recorded, indent=1, sort_keys=True)
    (Path(__file__).parent / "keys.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
