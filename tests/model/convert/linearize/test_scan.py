from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.architectures.hybrid import SINKS
from model.convert.linearize.plan import (
    LlamaShape,
    choose_plan,
    equal_window,
    given_bytes,
    given_plan,
    sized_plan,
    smollm2_plan,
    window_plan,
)
from model.convert.linearize.student import Student
from model.convert.linearize.train import SCAN_WINDOW, scan_layers
from model.families.llama.config import read_plans
from model.files import ConfigError
from tests.model.convert.linearize.tiny import BLOCK_PLAN, SHAPE, tiny_ids, tiny_llama

SMOLLM2 = LlamaShape(49152, 576, 30, 9, 3, 64, 1536, 100_000.0, 1e-5)
LLAMA_1B = LlamaShape(128256, 2048, 16, 32, 8, 64, 8192, 500_000.0, 1e-5)
QWEN3 = LlamaShape(151936, 1024, 28, 16, 8, 128, 3072, 1e6, 1e-6)
IDS = tiny_ids(SCAN_WINDOW + SINKS + 30)


def never() -> bool:
    return False


def test_scan_is_the_kl_of_a_student_with_one_window(tmp_path: Path) -> None:
    source, file = tiny_llama(), tmp_path / "scan.json"
    found = scan_layers(source, IDS, source.head, file, never, lambda layers: None)
    assert found is not None
    windows = window_plan(SHAPE.num_layers, SCAN_WINDOW).layers
    log_t = (source.hidden(IDS) @ source.head.t()).log_softmax(-1)
    for layer, kl in enumerate(found):
        plan = window_plan(SHAPE.num_layers, 1000)
        layers = (*plan.layers[:layer], windows[layer], *plan.layers[layer + 1 :])
        with torch.no_grad():
            student = Student(source, replace(plan, layers=layers), {})
            log_s = (student.hidden(IDS) @ source.head.t()).log_softmax(-1)
        wanted = (log_t.exp() * (log_t - log_s)).sum(-1).mean()
        assert kl == pytest.approx(float(wanted), rel=1e-3)
        assert kl > 0
    assert json.loads(file.read_text(encoding="utf-8"))["kl"] == found


def test_stopped_scan_goes_on_with_the_layers_that_are_left(tmp_path: Path) -> None:
    source, seen = tiny_llama(), list[int]()
    whole = scan_layers(source, IDS, source.head, tmp_path / "a", never, lambda layers: None)
    asked = iter([False, True])
    file = tmp_path / "b"
    assert scan_layers(source, IDS, source.head, file, lambda: next(asked), seen.append) is None
    assert scan_layers(source, IDS, source.head, file, never, seen.append) == whole
    assert seen == [1, 2, 3]


def test_layers_with_the_largest_kl_get_rings_and_the_next_a_far_part() -> None:
    kl = [0.01 + 0.0001 * layer for layer in range(30)]
    for layer in (8, 18, 20, 23):
        kl[layer] = 0.05
    size = smollm2_plan("6mb").state_bytes(SMOLLM2)
    plan = choose_plan(kl, SMOLLM2, size)
    assert {i for i, layer in enumerate(plan.layers) if layer.far == "delta"} == {8, 18, 20, 23}
    others = [i for i in range(30) if i not in (8, 18, 20, 23)]
    assert [i for i in others if plan.layers[i].far == "relative"] == others[13:]
    rings = {plan.layers[i].window for i in (8, 18, 20, 23)}
    windows = {plan.layers[i].window for i in others}
    assert len(rings) == len(windows) == 1
    assert min(rings) > 4 * max(windows)


@pytest.mark.parametrize("shape", [SMOLLM2, LLAMA_1B, QWEN3])
@pytest.mark.parametrize("part", [0.4, 1.0, 3.0])
def test_chosen_plan_fits_and_spends_its_bytes(shape: LlamaShape, part: float) -> None:
    max_bytes = int(part * given_bytes(None, shape))
    kl = [0.01 * (1 + layer % 5) for layer in range(shape.num_layers)]
    plan = choose_plan(kl, shape, max_bytes)
    assert 0.8 * max_bytes < plan.state_bytes(shape) <= max_bytes
    assert read_plans(plan.layers, shape.num_layers) == plan.layers
    num_rings = sum(layer.far == "delta" for layer in plan.layers)
    assert num_rings >= shape.num_layers / 8


def test_chosen_layers_keep_no_more_than_the_source_sees() -> None:
    kl, max_bytes = [0.01] * 30, 3 * given_bytes(None, SMOLLM2)
    assert max(layer.context for layer in choose_plan(kl, SMOLLM2, max_bytes).layers) > 520
    plan = choose_plan(kl, SMOLLM2, max_bytes, max_context=520)
    assert max(layer.context for layer in plan.layers) == 512
    assert sized_plan("20mb", SMOLLM2, 520).state_bytes(SMOLLM2) <= 20e6


def test_too_few_bytes_are_refused_with_those_that_are_enough() -> None:
    kl = [0.01] * 30
    with pytest.raises(ConfigError, match=r"--state must be at least [0-9.]+mb") as refusal:
        choose_plan(kl, SMOLLM2, 100_000)
    least = str(refusal.value).split("at least ")[1].split("mb")[0]
    assert choose_plan(kl, SMOLLM2, int(1.01e6 * float(least))).state_bytes(SMOLLM2) > 0


def test_control_is_not_smaller_than_the_plan_and_not_by_a_token() -> None:
    for plan, shape in ((smollm2_plan("6mb"), SMOLLM2), (BLOCK_PLAN, SHAPE)):
        control = equal_window(plan, shape)
        window = control.layers[0].window
        assert control == window_plan(shape.num_layers, window)
        assert control.state_bytes(shape) >= plan.state_bytes(shape)
        smaller = window_plan(shape.num_layers, window - 1)
        assert smaller.state_bytes(shape) < plan.state_bytes(shape)


def test_state_names_a_plan_of_smollm2_a_file_or_bytes(tmp_path: Path) -> None:
    assert given_plan(None, SMOLLM2) == given_plan("6MB", SMOLLM2) == smollm2_plan("6mb")
    assert given_plan("3mb", SMOLLM2) == smollm2_plan("3mb")
    assert given_plan("4mb", SMOLLM2) is None
    assert given_plan("6mb", QWEN3) is None
    assert given_bytes("4.5mb", SMOLLM2) == 4_500_000
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(BLOCK_PLAN.to_json()), encoding="utf-8")
    assert given_plan(str(file), SHAPE) == BLOCK_PLAN


@pytest.mark.parametrize("state", ["6", "6gb", "mb", "big"])
def test_state_that_is_no_size_is_refused(state: str) -> None:
    with pytest.raises(ConfigError, match="--state must be megabytes such as 6mb"):
        given_bytes(state, SMOLLM2)


def test_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(BLOCK_PLAN.to_json()), encoding="utf-8")
    with pytest.raises(ConfigError, match="a list of 30 objects"):
        given_plan(str(file), SMOLLM2)
    file.write_text(json.dumps(replace(BLOCK_PLAN, sinks=2).to_json()), encoding="utf-8")
    with pytest.raises(ConfigError, match="sinks must be 4, not 2"):
        given_plan(str(file), SHAPE)
