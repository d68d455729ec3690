"""A run of training that waits to be killed: seven steps, of which five are saved.

python -m tests.model.training.interrupted DATA OUT TOKENIZER PRECISION MODEL
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from model.config import ModelConfig
from model.tokenizer import Tokenizer
from model.training.data import Source
from model.training.loop import Run, TrainConfig


def main() -> None:
    data, out, tokenizer, precision, model = sys.argv[1:]
    config = TrainConfig(
        (Source(Path(data)),),
        Path(out),
        num_steps=12,
        batch_size=3,
        window=32,
        warmup_steps=2,
        eval_every=4,
        precision=precision,
        threads=1,
    )
    run = Run(config, ModelConfig.from_dict(json.loads(model)), Tokenizer.load(Path(tokenizer)))
    for _ in range(7):
        run.train_step()
        if run.step == 5:
            run.save()
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
