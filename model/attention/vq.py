"""Transformer-VQ: older keys as counts of codewords.

After Lingle 2023, "Transformer-VQ: Linear-Time Transformers via Vector
Quantization", sections 3.2-3.4.

Each key is replaced by the nearest of C codewords, so that keys outside the
window of the last W tokens need only be counted:

    w_ij = exp(q_i . c(j) + bias_{i-j})   for i - j < W        one by one
    w_ij = exp(q_i . c(j))                for older j: n_y exp(q_i . c_y) with
                                          the mean value of each codeword y
    o_i = sum_j w_ij v_j / sum_j w_ij                          one softmax over both

with q and k scaled by K^-1/4. Unlike in the paper the window slides token by
token, so that the result does not depend on a block length, and positions
enter as a learned bias per distance. Option ``qk_norm`` norms q and k of each
head first, as in the paper.

Training: gradients pass the quantisation straight through for keys inside the
window and stop for older ones, and for those of an earlier chunk, of which the
state keeps the codes alone. The codebook moves by exponential averages of
the keys of each codeword (gamma = `EMA_DECAY`) and not by gradient; a codeword
that serves almost no keys moves to the key that is served worst.
A commitment loss ties keys to their codewords. Serving freezes the codebook.

State per layer: code [W, H] int64 and v [W, H, V] of the window, oldest first;
count [H, C] int64 and sum [H, C, V] float64 of the tokens that left it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.attention.base import HeadsAttention, Losses, State
from model.attention.specs import AttentionConfig
from model.ops.exponential import LOG_ZERO, half_square, project
from model.ops.recurrence import recurrence_chunk
from model.ops.window import Sums, enter_window, has_left, join, window_attention

EMA_DECAY = 0.99

#: A codeword is dead when its average number of keys per batch falls below this part of the mean.
DEAD_FRACTION = 0.01

#: So many dead codewords of a head move with one batch: a number that depends on no value, so
#: that a GPU need not be waited for, and its work can be captured in a CUDA graph.
MOVES = 4


class VqAttention(HeadsAttention):
    """See the module's docstring.

    Options: ``codewords`` (C), ``window`` (W), ``commitment``, ``qk_norm``.
    """

    learns_in_forward = True
    codebook: Tensor
    ema_count: Tensor

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        heads, num_codes = config.num_attention_heads, self.options["codewords"]
        self.register_buffer("codebook", torch.zeros(heads, num_codes, config.head_dim))
        self.register_buffer("ema_count", torch.zeros(heads, num_codes))
        self.bias = nn.Parameter(torch.zeros(heads, self.options["window"]))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Codewords start where keys do: normal, scaled by K^-1/4."""
        super().reset_parameters(generator)
        with torch.no_grad():
            self.codebook.normal_(0.0, self.config.head_dim**-0.25, generator=generator)
            self.ema_count.fill_(1.0)
            self.bias.zero_()

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v, conv = self._convolved(x, state)
        scale = self.config.head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            q, k = q * scale, k * scale
            # A copy, because learning moves the codebook before the gradient is taken.
            codebook = self.codebook.float().clone()
            code = nearest(k, codebook)  # [B, T, H]
            chosen = lookup(codebook, code)
            quantised = chosen + (k - k.detach())  # the codeword's value, the key's gradient
            codes, old_code, ring_code = enter_window(code, state["code"])
            values, old_v, ring_v = enter_window(v, state["v"])
            ring = lookup(codebook, codes[:, : state["code"].shape[1]])
            near = window_attention(
                q, torch.cat([ring, quantised], dim=1), values, position, self.bias
            )
            valid = has_left(position, x.shape[1], state["code"].shape[1])
            far, new_state = older_codes(q, old_code, old_v, valid, codebook, state)
            o = join(near, far)
            if self.training and torch.is_grad_enabled():
                self._learn(k, code, chosen, losses)
        return self._merge(o, x), {"code": ring_code, "v": ring_v, **new_state, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.chunk(x.unsqueeze(1), state, position)
        return y.squeeze(1), state

    def _learn(self, k: Tensor, code: Tensor, chosen: Tensor, losses: Losses) -> None:
        """The commitment loss, then the codebook's step towards this batch."""
        if losses is not None:
            error = (k - chosen).square().sum(dim=-1).mean()
            losses.append(self.options["commitment"] * error)
        keys, codes = k.detach().flatten(0, 1).transpose(0, 1), code.flatten(0, 1).t()
        update_codebook(self.codebook, self.ema_count, keys, codes)


def older_codes(
    q: Tensor, code: Tensor, v: Tensor, valid: Tensor, codebook: Tensor, state: State
) -> tuple[Sums, State]:
    """Keys that left the window: the recurrence with one feature per codeword.

    ``q`` [B, T, H, K]; ``code`` [B, T, H] and ``v`` [B, T, H, V] that leave with each
    query, where ``valid`` [B, T]. A codeword that no key has yet weighs nothing.
    """
    chosen = one_hot(code, codebook.shape[1]) & valid[:, :, None, None]
    count = state["count"].unsqueeze(1) + chosen.cumsum(dim=1)  # [B, T, H, C]
    log_q = project(q, codebook).masked_fill(count == 0, LOG_ZERO)
    scale = log_q.detach().amax(dim=-1, keepdim=True)
    q = (log_q - scale).exp()
    den = (q * count).sum(dim=-1)
    num, total = recurrence_chunk(q, chosen.to(q.dtype), v, state["sum"])
    return (num, den, scale.squeeze(-1)), {"count": count[:, -1], "sum": total}


def nearest(k: Tensor, codebook: Tensor) -> Tensor:
    """The nearest codeword of each head for ``k`` [..., H, K]: [..., H] int64."""
    closeness = project(k.detach(), codebook) - half_square(codebook).squeeze(-1)
    return closeness.argmax(dim=-1)


def one_hot(code: Tensor, num_codes: int) -> Tensor:
    """``code`` [...] as [..., C] bool."""
    return code.unsqueeze(-1) == torch.arange(num_codes, device=code.device)


def lookup(codebook: Tensor, code: Tensor) -> Tensor:
    """The codewords [..., H, K] for ``code`` [..., H]."""
    heads = torch.arange(codebook.shape[0], device=code.device)
    return codebook[heads, code]


@torch.no_grad()
def update_codebook(codebook: Tensor, ema_count: Tensor, keys: Tensor, codes: Tensor) -> None:
    """One step of the averages, in place, and new places for dead codewords.

    ``codebook`` [H, C, K], ``ema_count`` [H, C], ``keys`` [H, N, K], ``codes``
    [H, N]. A codeword is the average of its keys, so their average sum is
    codeword times count (van den Oord et al. 2017, appendix A.1). The rarest
    of the dead move first, at most `MOVES` of each head.
    """
    chosen = one_hot(codes, codebook.shape[1]).to(keys.dtype)  # [H, N, C]
    total = codebook * ema_count.unsqueeze(-1) * EMA_DECAY
    total += (1 - EMA_DECAY) * (chosen.transpose(1, 2) @ keys)
    ema_count.mul_(EMA_DECAY).add_(chosen.sum(dim=1), alpha=1 - EMA_DECAY)
    codebook.copy_(total / ema_count.clamp_min(1e-9).unsqueeze(-1))

    mean_count = ema_count.mean(dim=1, keepdim=True)  # [H, 1]
    distance = (keys - codebook.gather(1, codes.unsqueeze(-1).expand_as(keys))).square().sum(dim=-1)
    word = torch.arange(codebook.shape[1], device=codebook.device)
    for _ in range(min(MOVES, codebook.shape[1])):
        rarest = ema_count.argmin(dim=1, keepdim=True)  # [H, 1]
        moves = (word == rarest) & (ema_count < DEAD_FRACTION * mean_count)  # [H, C]
        worst = distance.argmax(dim=1)[:, None, None].expand(-1, 1, keys.shape[2])
        key = keys.gather(1, worst)  # [H, 1, K]
        codebook.copy_(torch.where(moves.unsqueeze(-1), key, codebook))
        ema_count.copy_(torch.where(moves, mean_count, ema_count))
        nearer = distance.minimum((keys - key).square().sum(dim=-1))
        distance = torch.where(moves.any(dim=1, keepdim=True), nearer, distance)
