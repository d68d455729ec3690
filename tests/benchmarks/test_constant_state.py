"""The comparison of a model of constant state with its original, on tiny models."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.constant_state.__main__ import (
    FILLER,
    NAMES,
    TEXTS,
    bits_per_byte,
    main,
    recall,
)
from benchmarks.studies.constant_state.subjects import Subject, equal_window, subjects
from model.convert.linearize.report import color_ids, half_ids, questions
from model.evaluation import documents, evaluate_native
from model.families.llama.config import LayerPlan, LlamaConfig
from model.hub.base import describe
from model.native.runtime import Runtime
from model.state import StateLayout
from tests.adapted import tiny_config, tiny_updates, write_adapter, write_base_file
from tests.tiny import TEXT

FAR = LayerPlan(60, "relative", 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose layers have a far part each, with its base in the same folder."""
    folder = tmp_path_factory.mktemp("model")
    base = write_base_file(folder / "base" / "tiny.gguf", "F32")
    config, random = tiny_config(), np.random.default_rng(2)
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    far = {
        f"blocks.{layer}.mixer.far.{name}": random.normal(0, 1, shape).astype(np.float32)
        for layer in range(config.num_hidden_layers)
        for name, shape in FAR.far_shapes(*sizes).items()
    }
    windows = [dataclasses.asdict(FAR)] * config.num_hidden_layers
    changes = {"windows": windows, "context": 0}
    found = write_adapter(folder / "tiny", describe(base), tiny_updates() | far, **changes)
    os.link(base, found / base.name)
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in TEXTS:
        (folder / name).write_text(f"{TEXT}\n" * 12, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def compared(model: Path) -> dict[str, Subject]:
    return {subject.name: subject for subject in subjects(model)}


def test_control_has_the_shortest_window_of_no_less_memory(compared: dict[str, Subject]) -> None:
    num_bytes = compared["converted"].state()["state_bytes"]
    control = compared["window"].config
    assert compared["window"].state()["state_bytes"] >= num_bytes
    shorter = StateLayout.of(equal_window(compared["original"].config, num_bytes - 1))
    least = LayerPlan(control.windows[0].window - 16)
    smaller = LlamaConfig(**{**vars(control), "windows": (least,) * len(control.windows)})
    assert StateLayout.of(smaller).num_bytes < num_bytes
    assert shorter.num_bytes == StateLayout.of(control).num_bytes
    assert {plan.far for plan in control.windows} == {"none"}


def test_ablated_model_keeps_windows_and_updates(compared: dict[str, Subject]) -> None:
    converted, ablated = compared["converted"], compared["without_far"]
    assert [plan.window for plan in ablated.config.windows] == [FAR.window] * len(
        converted.config.windows
    )
    assert ablated.checkpoint is converted.checkpoint
    assert ablated.state()["state_bytes"] < converted.state()["state_bytes"]


def test_original_has_a_past_that_slides(compared: dict[str, Subject]) -> None:
    config, longer = compared["original"].config, compared["original"].recall
    assert (config.context, config.past, longer.context) == (2048, "slide", 4096)
    state = compared["original"].state()
    assert state["state_bytes"] == 2048 * state["bytes_per_token"]


def test_bits_are_those_of_the_evaluation(compared: dict[str, Subject], data: Path) -> None:
    subject = compared["converted"]
    runtime = Runtime(subject.config, subject.checkpoint.weights, "int8")
    tokenizer, file = subject.checkpoint.tokenizer, data / FILLER
    texts = list(documents(file, "second"))
    found = bits_per_byte(runtime, tokenizer, texts)
    whole = evaluate_native(runtime, tokenizer, file, "stream", half="second")
    assert found["all"] == pytest.approx(whole.bits_per_byte, rel=1e-9)
    assert sum(found["bytes"].values()) == whole.num_bytes
    assert found["by_position"].keys() == set(NAMES[:3])
    parts = [found["by_position"][name] * found["bytes"][name] for name in found["bytes"]]
    assert sum(parts) == pytest.approx(found["all"] * whole.num_bytes)


def test_recall_reads_on_after_a_question(compared: dict[str, Subject], data: Path) -> None:
    """Two distances in one pass give what each gives alone."""
    subject = compared["converted"]
    runtime = Runtime(subject.config, subject.checkpoint.weights, "int8")
    tokenizer = subject.checkpoint.tokenizer
    filler = half_ids(data / FILLER, tokenizer, "second").tolist()
    both = recall(runtime, tokenizer, filler, [120, 60], 3)
    assert list(both) == ["120", "60"]
    alone = recall(runtime, tokenizer, filler, [120], 3)
    assert both["120"] == alone["120"]

    question, colors = next(questions(tokenizer, 1)), color_ids(tokenizer)
    text = [*question.told, *question.between(filler, 120), *question.asked]
    scores = [
        runtime.score(runtime.empty_pool(1), 0, 0, text, following)[-1] for following in colors
    ]
    share = np.exp(scores[question.color]) / np.exp(scores).sum()
    once = recall(runtime, tokenizer, filler, [120], 1)["120"]
    assert once["bits"] == pytest.approx(np.log2(share), abs=1e-4)


def test_command_measures_all(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = ["--model", str(model), "--data", str(data), "--max-bytes", "300"]
    main([*words, "--recalls", "2", "--distances", "60", "--output", str(out)])
    result = json.loads(out.read_text(encoding="utf-8"))
    assert list(result["models"]) == ["converted", "original", "window", "without_far", "shorter"]
    bits = [each["bits_per_byte"][FILLER]["all"] for each in result["models"].values()]
    assert len(set(bits)) == 5
    assert all(list(each["recall"]) == ["60"] for each in result["models"].values())
    assert (result["chance"], result["recalls"]) == (0.125, 2)
