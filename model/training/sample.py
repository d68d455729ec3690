"""A short sample while training, by the plainest means; the server has its own sampler."""

from __future__ import annotations

import torch

from model.architectures.network import Network
from model.tokenizer import Tokenizer


@torch.no_grad()
def sample_text(
    model: Network,
    tokenizer: Tokenizer,
    seed: int,
    num_tokens: int = 120,
    temperature: float = 0.8,
) -> str:
    """The model's own text from the end-of-text token on."""
    device = model.head_weight.device
    generator = torch.Generator(device).manual_seed(seed)
    state, ids = model.empty_state(1), [tokenizer.eos_token_id]
    for position in range(num_tokens):
        where = torch.tensor([position], device=device)
        logits, state = model.step(torch.tensor(ids[-1:], device=device), state, where)
        logits = logits[0, : tokenizer.vocab_size]  # the model may have more ids: padding
        p = torch.softmax(logits.float() / temperature, dim=-1)
        ids.append(int(torch.multinomial(p, 1, generator=generator)))
    return tokenizer.decode(ids)
