from __future__ import annotations

import csv
import dataclasses
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.evaluation import evaluate
from model.tokenizer import Tokenizer
from model.training import TrainingError
from model.training.data import Source
from model.training.loop import Run, TrainConfig, train
from tests.forking import Forked
from tests.model.training.conftest import assert_same_run, elsewhere


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        (Source(corpus),),
        tmp_path / "run",
        num_steps=12,
        batch_size=3,
        window=32,
        warmup_steps=2,
        eval_every=4,
        precision="float32",
        threads=1,
    )


@pytest.fixture(autouse=True)
def out_exists(config: TrainConfig) -> None:
    config.out.mkdir()


def log(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.process
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_killed_run_resumes_bit_for_bit(
    precision: str, config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, precision=precision)
    train(config, tiny, tokenizer)

    killed, ids = elsewhere(config, "killed"), tmp_path / "tokenizer.json"
    out = killed.out
    tokenizer.save(ids)
    names = [str(config.data[0].path), str(out), str(ids), precision, json.dumps(tiny.to_dict())]
    with tempfile.TemporaryFile() as errors:
        child = Forked(
            "tests.model.training.interrupted", names, os.environ, errors, has_torch=True
        )
    with child.stdout:
        assert child.stdout.readline() == b"ready\n"
        child.kill()
        child.wait()
    train(killed, tiny, tokenizer)

    assert_same_run(config.out, out)
    numbers = [(row["step"], row["loss"], row["grad_norm"]) for row in log(out)]
    assert numbers == [(row["step"], row["loss"], row["grad_norm"]) for row in log(config.out)]
    assert [row["step"] for row in log(out)] == [str(step) for step in range(1, 13)]


@pytest.mark.parametrize("attention", ["elu", "softmax"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_stopped_run_resumes_bit_for_bit(
    attention: str, optimizer: str, config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    model = dataclasses.replace(tiny, attention=attention)
    config = dataclasses.replace(config, optimizer=optimizer)
    train(config, model, tokenizer)
    other = elsewhere(config, "other")
    train(dataclasses.replace(other, stop_at_step=5), model, tokenizer)
    assert len(log(other.out)) == 5
    train(other, model, tokenizer)
    assert_same_run(config.out, other.out)


def test_other_options_cannot_resume_a_run(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    train(dataclasses.replace(config, stop_at_step=1), tiny, tokenizer)
    with pytest.raises(TrainingError, match="another learning_rate"):
        train(dataclasses.replace(config, learning_rate=1e-4), tiny, tokenizer)


def test_run_without_an_embedding_rate_resumes_with_that_of_its_matrices(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    train(dataclasses.replace(config, stop_at_step=1), tiny, tokenizer)
    rate = config.learning_rate
    named = dataclasses.replace(config, embedding_learning_rate=rate, stop_at_step=2)
    train(named, tiny, tokenizer)
    assert len(log(config.out)) == 2
    with pytest.raises(TrainingError, match="another embedding_learning_rate"):
        train(dataclasses.replace(named, embedding_learning_rate=2 * rate), tiny, tokenizer)


def test_run_can_be_made_longer_until_its_rate_falls(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    config = dataclasses.replace(config, decay=0.5)  # steps 7 to 12
    train(dataclasses.replace(config, stop_at_step=6), tiny, tokenizer)
    longer = dataclasses.replace(config, num_steps=16)
    train(dataclasses.replace(longer, stop_at_step=10), tiny, tokenizer)
    with pytest.raises(TrainingError, match="another decays_from, num_steps"):
        train(dataclasses.replace(longer, num_steps=20), tiny, tokenizer)
    train(longer, tiny, tokenizer)
    whole = elsewhere(longer, "whole")
    train(whole, tiny, tokenizer)
    assert_same_run(config.out, whole.out)


def test_number_of_threads_changes_no_bit(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    config = dataclasses.replace(config, batch_size=9, num_steps=4)
    train(config, tiny, tokenizer)
    other = elsewhere(config, "two", threads=2)
    train(other, tiny, tokenizer)
    assert_same_run(config.out, other.out)


def test_gradient_of_shares_is_that_of_the_batch(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    run = Run(dataclasses.replace(config, batch_size=9), tiny, tokenizer)
    assert len(run.shares.rows) > 1
    inputs, targets = run.batches.batch(0)
    loss, _ = run._loss(inputs, targets, run.state, run.position)
    wanted = torch.autograd.grad(loss, run.parameters)
    run._backward()
    for parameter, gradient in zip(run.parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    run.close()


@pytest.mark.parametrize("attention", ["vq"])
def test_mechanism_that_learns_in_the_forward_pass_sees_whole_batches(
    attention: str, config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    run = Run(config, dataclasses.replace(tiny, attention=attention), tokenizer)
    assert run.shares.rows == [slice(0, config.batch_size)]
    run.close()


def test_run_starts_from_the_weights_of_a_checkpoint(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    folder = train(config, tiny, tokenizer)
    again = elsewhere(config, "again", initial=folder)
    run = Run(again, tiny, tokenizer)
    for name, weight in load_checkpoint(folder).model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight), name
    run.close()
    with pytest.raises(TrainingError, match="another shape"):
        Run(again, dataclasses.replace(tiny, intermediate_size=32), tokenizer)


def test_stop_at_step_zero_trains_nothing(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    train(dataclasses.replace(config, stop_at_step=0), tiny, tokenizer)
    assert log(config.out) == []


def test_state_is_carried_until_a_row_is_reset(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    run = Run(dataclasses.replace(config, stream_windows=5), tiny, tokenizer)
    expected = [0, 0, 0]
    for step in range(8):
        resets = run.batches.resets(step).tolist()
        expected = [(0 if new else seen) + 32 for new, seen in zip(resets, expected, strict=True)]
        run.train_step()
        assert run.position.tolist() == expected
    assert len(set(expected)) > 1
    run.close()


@pytest.mark.slow
def test_learns_a_small_text_and_exports_the_model(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    config = dataclasses.replace(
        config, num_steps=60, eval_every=20, learning_rate=2e-2, valid=(config.data[0].path,)
    )
    folder = train(config, tiny, tokenizer)

    rows = log(config.out)
    bits = [float(row["valid_bits_per_byte"]) for row in rows if row["valid_bits_per_byte"]]
    assert len(bits) == 3
    assert float(rows[-1]["loss"]) < 0.5 * float(rows[0]["loss"])
    checkpoint = load_checkpoint(folder)
    text, window = config.data[0].path, config.window
    result = evaluate(checkpoint.model, checkpoint.tokenizer, text, window=window, half="first")
    assert result.bits_per_byte == pytest.approx(min(bits), abs=1e-3)
    assert (config.out / "curve.png").stat().st_size > 0


def test_samples_are_written(config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer) -> None:
    train(dataclasses.replace(config, num_steps=2, sample_every=1), tiny, tokenizer)
    text = (config.out / "samples.txt").read_text(encoding="utf-8")
    assert "=== step 1\n" in text
    assert "=== step 2\n" in text


def test_loss_that_is_not_finite_names_the_step(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    run = Run(config, tiny, tokenizer)
    run.train_step()
    with torch.no_grad():
        run.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="loss is nan at step 1"):
        run.train_step()
    run.close()


def test_gradient_that_is_not_finite_leaves_the_weights(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    run = Run(config, tiny, tokenizer)
    before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    run.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(TrainingError, match=r"gradient is (inf|nan) at step 0"):
        run.train_step()
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    run.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", 0),
        ("eval_every", 0),
        ("optimizer", "sgd"),
        ("precision", "float16"),
        ("decay", 1.5),
    ],
)
def test_bad_option_is_named(config: TrainConfig, name: str, value: object) -> None:
    with pytest.raises(TrainingError, match=name):
        dataclasses.replace(config, **{name: value})  # type: ignore[arg-type]


def test_layers_are_compiled_on_a_cuda_device_alone(
    config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    config = dataclasses.replace(config, device="cpu", compile_layers=True)
    with pytest.raises(TrainingError, match="compile_layers is for device cuda"):
        Run(config, tiny, tokenizer)
