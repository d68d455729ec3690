"""A tiny checkpoint of every mechanism, trained here, behind the real server as a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clients.python.synchronous import Client
from model.attention import MECHANISMS, spec_of
from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.tokenizer import train_tokenizer
from model.training.data import Source
from model.training.loop import TrainConfig, train
from tests.model.training.conftest import prose
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.process

SERVED = [name for name in MECHANISMS if spec_of(name).constant_state]
PROMPT = "the old grey fox ran over a hill and told every small bird what he saw there " * 6
#: So that a prompt of some 100 tokens reaches past windows and epochs.
OPTIONS: dict[str, dict[str, object]] = {
    "cosformer": {"horizon": 32},
    "vq": {"window": 16, "codewords": 16},
    "window_linear": {"window": 16},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    documents = [prose(600, stride) for stride in (3, 5, 7)]
    path.write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def trained(attention: str, corpus: Path, out: Path) -> Path:
    tokenizer = train_tokenizer([corpus], 280)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=48,
        attention=attention,
        attention_options=OPTIONS.get(attention, {}),
    )
    run = TrainConfig(
        data=(Source(corpus),),
        out=out,
        valid=(corpus,),
        num_steps=30,
        batch_size=4,
        window=64,
        warmup_steps=5,
        learning_rate=1e-2,
        eval_every=30,
        threads=1,
        precision="float32",
    )
    return train(run, config, tokenizer)


@pytest.mark.slow
def test_trained_checkpoints_are_served(corpus: Path, tmp_path: Path) -> None:
    folders = {name: trained(name, corpus, tmp_path / name) for name in SERVED}
    for name in SERVED:
        rows = (tmp_path / name / "log.csv").read_text().split()[1:]
        losses = [float(row.split(",")[3]) for row in rows]
        assert losses[-1] < 0.8 * losses[0], name
    models = [word for name, path in folders.items() for word in ("--model", f"{name}={path}")]
    flags = (*models, "--max-sessions", 4, "--dtype", "float32", "--store", "memory")
    sampling = {"temperature": 0.0, "ignore_eos": True}
    with ServerProcess(*flags) as server:
        with Client(server.url) as client:
            for name, folder in folders.items():
                wanted = greedy(folder, PROMPT, 24)
                text = client.complete(PROMPT, max_tokens=24, model=name, **sampling).text
                assert text == wanted, name
                # In two requests of one session: the state between them is all that it has.
                session, pieces = client.create_session(model=name), []
                for prompt, num_tokens in ((PROMPT, 10), ("", 14)):
                    events = list(session.generate(prompt, max_tokens=num_tokens, **sampling))
                    pieces += [event.text for event in events]
                assert "".join(pieces) == wanted, name
        assert server.stop() == 0


def greedy(folder: Path, prompt: str, num_tokens: int) -> str:
    """The likeliest continuation by the model's `parallel` form alone."""
    checkpoint = load_checkpoint(folder)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    ids = [model.config.bos_token_id, *tokenizer.encode(prompt)]
    start = len(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model.parallel(torch.tensor([ids]))[0, -1].argmax()))
    return b"".join(tokenizer.token_bytes(id) for id in ids[start:]).decode("utf-8", "replace")
