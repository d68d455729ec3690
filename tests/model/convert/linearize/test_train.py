from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model.convert.linearize.chats import CHAT_ML
from model.convert.linearize.plan import Plan, window_plan
from model.convert.linearize.sequences import Sequences, Shares, Text
from model.convert.linearize.student import Student
from model.convert.linearize.train import (
    NO_LABEL,
    Choice,
    Head,
    Options,
    Run,
    Schedule,
    Trainer,
    divergence,
)
from model.training import TrainingError
from tests.model.convert.linearize.tiny import PLAN, SHAPE, tiny_llama, tiny_tokenizer

OPTIONS = Options(
    batch_size=2, lengths=Choice((40, 60), (0.5, 0.5)), rings=Choice((0, 4), (0.5, 0.5))
)


def sequences() -> Sequences:
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(3, 250, 2000).astype(np.uint16)) for _ in range(2)]
    return Sequences(tiny_tokenizer(), texts, [], Shares(), seed=0, chat=CHAT_ML)


def trainer(
    folder: Path, rows: int = 1, ranks: dict[str, int] | None = None, plan: Plan = PLAN
) -> Trainer:
    student = Student(tiny_llama(), plan, ranks or {})
    student.init_weights(torch.Generator().manual_seed(0))
    parameters = dict(student.named_parameters())
    rates = {name: 3e-3 if ".far." in name else 1e-2 for name in parameters}
    run = Run(folder, parameters, rates, {"plan": PLAN.to_json()})
    schedule = Schedule(30, warmup=3, decay=5)
    return Trainer(student, run, sequences(), OPTIONS, schedule, torch.device("cpu"), rows=rows)


def on_one_text(made: Trainer) -> Trainer:
    """Always the same text, which it may learn by heart."""
    text = np.random.default_rng(0).integers(3, 250, 61).astype(np.uint16)
    always = Sequences(tiny_tokenizer(), [Text(text)], [], Shares(0.0, 0.0), seed=0, chat=None)
    options = Options(lengths=Choice((60,), (1.0,)), rings=Choice((4,), (1.0,)))
    return replace(made, sequences=always, options=options)


def head() -> Head:
    ids = torch.arange(0, SHAPE.vocab_size, 2)
    return Head(ids, tiny_llama().embedding[ids])


def test_source_sees_no_more_than_its_past(tmp_path: Path) -> None:
    """A student that keeps as much and has learnt nothing is the source then."""
    plan, divergences = window_plan(SHAPE.num_layers, 28), []
    for past in (32, 0):
        made = trainer(tmp_path / str(past), ranks={"qkv": 2}, plan=plan)
        made.student.farthest = past
        options = Options(lengths=Choice((90,), (1.0,)))
        replace(made, options=options, past=past).distil_step(head())
        divergences += log(tmp_path / str(past), "kl")
    assert divergences[0] < 1e-5 < 1e-3 < divergences[1]


def log(folder: Path, key: str) -> list[float]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[key] for line in lines if key in json.loads(line)]


def test_divergence_is_its_definition_and_so_is_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    student, source = (torch.randn(7, 5, generator=generator) for _ in range(2))
    weight = torch.randn(11, 5, generator=generator)
    labels = torch.tensor([0, 3, NO_LABEL, 10, 2, 2, NO_LABEL])
    shares = torch.tensor([0.0, 0.5, 0.5, 1.0, 0.0, 0.25, 0.0])

    student.requires_grad_(True)
    loss, kl = divergence(student, source, weight, labels, shares)
    (3 * loss).backward()
    found = student.grad

    student.grad = None
    log_s, log_t = ((x @ weight.T).log_softmax(-1) for x in (student, source))
    each = (log_t.exp() * (log_t - log_s)).sum(-1)
    share = torch.where(labels == NO_LABEL, 0.0, shares)
    nll = -log_s[torch.arange(7), labels.clamp_min(0)]
    wanted = ((1 - share) * each + share * nll).mean()
    (3 * wanted).backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(kl, each.mean())
    torch.testing.assert_close(found, student.grad, rtol=1e-4, atol=1e-6)


def test_labels_are_rows_of_the_head() -> None:
    found = head().labels(torch.tensor([0, 1, 4, 258, 259]))
    assert found.tolist() == [0, NO_LABEL, 2, 129, NO_LABEL]


def test_rate_rises_stays_and_falls() -> None:
    factors = [Schedule(20, warmup=4, decay=4).factor(step) for step in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[15:] == [1.0, 0.8, 0.6, 0.4, 0.2]


def test_matching_lowers_the_error_and_changes_far_parts_only(tmp_path: Path) -> None:
    made = replace(on_one_text(trainer(tmp_path, ranks={"qkv": 2})), schedule=Schedule(80))
    before = {name: p.detach().clone() for name, p in made.run.parameters.items()}
    for _ in range(80):
        made.match_step()
    errors = log(tmp_path, "error")
    assert errors[-1] < 0.9 * errors[0]
    changed = {n for n, p in made.run.parameters.items() if not torch.equal(p, before[n])}
    assert changed == {name for name in before if ".far." in name}


def test_distillation_brings_the_student_to_its_source(tmp_path: Path) -> None:
    made = on_one_text(trainer(tmp_path, ranks={"qkv": 4, "out": 4, "up": 4}))
    for _ in range(30):
        made.distil_step(head())
    found = log(tmp_path, "kl")
    assert found[-1] < 0.3 * found[0]


def test_all_weights_of_a_matrix_learn_as_well(tmp_path: Path) -> None:
    made = on_one_text(trainer(tmp_path, ranks={"qkv": 0, "up": 0}))
    for _ in range(10):
        made.distil_step(head())
    found = log(tmp_path, "kl")
    assert found[-1] < 0.3 * found[0]
    ids = made.sequences.draw(0, 0, 60).ids[None]
    merged = Student(made.student.merged_source(), PLAN, {})
    merged.load_state_dict(made.student.state_dict(), strict=False)
    torch.testing.assert_close(merged.hidden(ids), made.student.hidden(ids), rtol=1e-4, atol=1e-4)


def test_rows_at_a_time_do_not_change_the_gradient(tmp_path: Path) -> None:
    def gradients(made: Trainer) -> dict[str, torch.Tensor]:
        """After one step, which Adam's first moment is a tenth of."""
        states = made.run.optimizer.state
        return {name: 10 * states[p]["exp_avg"] for name, p in made.run.parameters.items()}

    one, both = trainer(tmp_path / "one", rows=1), trainer(tmp_path / "both", rows=2)
    one.distil_step(head())
    both.distil_step(head())
    for name, gradient in gradients(one).items():
        torch.testing.assert_close(gradient, gradients(both)[name], rtol=1e-3, atol=1e-5)
    assert log(tmp_path / "one", "kl") == pytest.approx(log(tmp_path / "both", "kl"), rel=1e-5)


def test_products_in_bfloat16_change_little(tmp_path: Path) -> None:
    full = trainer(tmp_path / "full", ranks={"qkv": 2})
    low = replace(trainer(tmp_path / "low", ranks={"qkv": 2}), precision=torch.bfloat16)
    for made in (full, low):
        made.distil_step(head())
        made.match_step()
    for key in ("kl", "error", "norm"):
        full_values, low_values = log(tmp_path / "full", key), log(tmp_path / "low", key)
        assert low_values == pytest.approx(full_values, rel=0.1)
        assert low_values != full_values


def test_stopped_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", ranks={"qkv": 2})
    for _ in range(6):
        whole.distil_step(head())
    first = trainer(tmp_path / "parts", ranks={"qkv": 2})
    for _ in range(3):
        first.distil_step(head())
    first.run.save()
    second = trainer(tmp_path / "parts", ranks={"qkv": 2})
    for _ in range(3):
        second.distil_step(head())
    assert log(tmp_path / "parts", "kl") == log(tmp_path / "whole", "kl")
    for name, parameter in whole.run.parameters.items():
        assert torch.equal(parameter, second.run.parameters[name])
        assert torch.equal(whole.run.average[name], second.run.average[name])
    assert second.run.num_tokens == whole.run.num_tokens


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.run.save()
    with pytest.raises(TrainingError, match="holds another run"):
        Run(tmp_path, made.run.parameters, dict.fromkeys(made.run.parameters, 1e-3), {"plan": 1})


def test_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    run = trainer(tmp_path).run
    before = {name: p.detach().clone() for name, p in run.parameters.items()}
    for parameter in run.parameters.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(TrainingError, match="norm of the gradient is nan at step 0"):
        run.update(1.0, 1.0, 10)
    assert all(torch.equal(p, before[name]) for name, p in run.parameters.items())
    assert run.step == 0


def test_average_is_measured_and_then_the_weights_are_back(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    for _ in range(4):
        made.match_step()
    current = {name: p.detach().clone() for name, p in made.run.parameters.items()}
    seen = made.run.with_average(
        lambda: {name: p.detach().clone() for name, p in made.run.parameters.items()}
    )
    for name, parameter in made.run.parameters.items():
        assert torch.equal(seen[name], made.run.average[name])
        assert torch.equal(parameter, current[name])
    assert any(not torch.equal(seen[name], current[name]) for name in seen)
