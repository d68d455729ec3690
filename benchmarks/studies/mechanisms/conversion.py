"""A conversion of the trained softmax model, and its control: that model trained further.

Both read as many tokens of the same text. All bits per byte are of windows of the validation
text, as ``everstream convert`` measures them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.report import Figures
from benchmarks.studies.mechanisms import language
from benchmarks.studies.mechanisms.folder import Folder, RunError
from benchmarks.studies.mechanisms.specs import BASELINE, Spec
from model.checkpoint import load_checkpoint
from model.convert.convert import Conversion, convert
from model.evaluation import evaluate
from model.training.loop import VALID_BYTES, TrainConfig, train

#: Of all that a conversion reads, matching takes these steps and fine-tuning the others.
NUM_STEPS, MATCH_STEPS = 150, 60
LEARNING_RATE = 3e-3


def run(folder: Folder, name: str, source: Path, spec: Spec, recipe: language.Recipe) -> Figures:
    """The figures of one conversion to ``spec``, or of the control where that is softmax.

    Raises `RunError` where the model to convert is not there.
    """
    if not source.is_dir():
        raise RunError(f"{source} is not there: its run was made in another folder of runs")
    num_steps = min(NUM_STEPS, recipe.num_steps)
    match_steps = min(MATCH_STEPS, num_steps // 2)
    control = spec.attention == BASELINE
    steps = num_steps if control else num_steps - match_steps
    work = folder.work(name)
    folder.share_cache(work)
    config = dataclasses.replace(
        language.training(recipe, work, seed=0),
        num_steps=steps,
        learning_rate=LEARNING_RATE,
        warmup_steps=min(recipe.warmup_steps, steps // 10),
        valid=(recipe.valid,),
    )
    if control:
        bits, parameters = _further(source, config)
    else:
        options = dict(spec.options)
        report = convert(Conversion(str(source), spec.attention, options, match_steps, config))
        bits, parameters = report.bits_per_byte, report.parameters
    return {
        "kind": "conversion",
        "mechanism": str(spec),
        "seed": 0,
        "num_parameters": parameters,
        "num_tokens": num_steps * recipe.batch_size * recipe.window,
        "match_steps": 0 if control else match_steps,
        "learning_rate": LEARNING_RATE,
        "bits_per_byte": bits,
    }


def _further(source: Path, config: TrainConfig) -> tuple[dict[str, float], int]:
    """Bits per byte before and after, and the number of parameters."""
    checkpoint = load_checkpoint(source)
    trained = train(
        dataclasses.replace(config, initial=source, valid=()),
        checkpoint.config,
        checkpoint.tokenizer,
    )
    (valid,) = config.valid
    found = {}
    for stage, folder in (("original", source), ("fine_tuned", trained)):
        model = load_checkpoint(folder).model
        measured = evaluate(
            model, checkpoint.tokenizer, valid, "windows", config.window, VALID_BYTES
        )
        found[stage] = measured.bits_per_byte
    return found, checkpoint.model.num_parameters()
