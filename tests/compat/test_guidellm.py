"""guidellm's benchmark, on texts of a file and on synthetic ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import load_checkpoint
from tests.chosen_model import bundled_model
from tests.compat.environments import python_client

pytestmark = [pytest.mark.usefixtures("long"), pytest.mark.timeout(1800)]

NUM_REQUESTS = 6
NUM_TOKENS = 20
FORMATS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]


@pytest.mark.parametrize("route", FORMATS)
def test_texts_of_a_file(route: str, environment: dict[str, str], tmp_path: Path) -> None:
    requests = benchmark(
        "kind=concurrent,streams=2",
        "kind=json_file,path=prompts.jsonl",
        environment,
        tmp_path,
        backend=f"request_format={route},max_tokens={NUM_TOKENS}",
    )
    for request in requests:
        assert request["output"]
        assert 1 <= request["output_tokens"] <= NUM_TOKENS
        assert request["prompt_tokens"] > 0
        assert request["time_to_first_token_ms"] > 0


@pytest.mark.parametrize("route", FORMATS)
def test_synthetic_texts_have_as_many_tokens_as_asked_for(
    route: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """With `ignore_eos`, and with the tokenizer that the server has."""
    requests = benchmark(
        "kind=poisson,rate=20",
        f"kind=synthetic_text,prompt_tokens=24,output_tokens={NUM_TOKENS}",
        environment,
        tmp_path,
        f"--tokenizer=kind=hf_auto,model={tokenizer_folder(tmp_path)}",
        backend=f"request_format={route}",
    )
    assert {request["output_tokens"] for request in requests} == {NUM_TOKENS}
    for request in requests:
        assert request["output"]
        assert request["inter_token_latency_ms"] > 0


def benchmark(
    profile: str,
    data: str,
    environment: dict[str, str],
    place: Path,
    *more: str,
    backend: str,
) -> list[dict[str, Any]]:
    """Runs its command; the requests, of which none may have failed."""
    report = place / "report.json"
    target = f"kind=openai_http,target={environment['EVERSTREAM_URL']},api_key=usual"
    client = python_client("guidellm")
    output = client.run(
        *("-m", "guidellm", "run", "--disable-progress"),
        *("--backend", f"{target},{backend}"),
        *("--profile", profile, "--data", data),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
        *more,
        timeout_s=300,
        HF_HOME=str(place / "hugging-face"),
        **environment,
    )
    assert report.exists(), output
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]
    assert not requests["errored"], requests["errored"]
    assert len(requests["successful"]) == NUM_REQUESTS, output
    return list(requests["successful"])


def tokenizer_folder(place: Path) -> Path:
    """The bundled tokenizer as Hugging Face's packages read one."""
    folder = place / "tokenizer"
    folder.mkdir()
    load_checkpoint(bundled_model()).tokenizer.save(folder / "tokenizer.json")
    ends = "<|endoftext|>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": ends, "eos_token": ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
