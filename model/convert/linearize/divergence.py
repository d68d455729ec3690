"""The loss of distillation, without ever holding all logits.

    KL(t || s) = sum_c t_c (log t_c - log s_c)

for each token, over the ids of ``head``, where t is the softmax of the source's logits and s that
of the student's. Where the right next token is known to matter (an answer of a recall task), the
target is a mixture with it: (1 - h) t + h onehot(label). Logits exist for `ROWS` tokens at a time,
in the forward pass alone, as in `model.training.loss`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

ROWS = 256
#: On a CUDA device, whose memory has room for them.
CUDA_ROWS = 8192
#: A label that is not among the ids of the head.
NO_LABEL = -1


def divergence(
    student: Tensor, source: Tensor, head: Tensor, labels: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean loss over N tokens and, without a gradient, the mean KL to the source, in nats.

    ``student``, ``source`` [N, D] are the inputs of ``head`` [ids, D]. ``labels`` [N] int64 are
    rows of the head or `NO_LABEL`, ``shares`` [N] are h. The loss of a token is (1 - h) times its
    KL and h times -log s of its label.
    """
    shares = shares * (labels != NO_LABEL)
    loss, kl = _Divergence.apply(student, source, head, labels, shares)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss), cast(Tensor, kl)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, source: Tensor, head: Tensor, labels: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(student)
        loss = torch.zeros((), dtype=torch.float64, device=student.device)
        kl = torch.zeros_like(loss)
        rows = CUDA_ROWS if student.is_cuda else ROWS
        for start in range(0, len(student), rows):
            part = slice(start, start + rows)
            log_t = (source[part] @ head.t()).log_softmax(dim=-1)
            log_s = (student[part] @ head.t()).log_softmax(dim=-1)
            target = log_t.exp()
            each = (target * (log_t - log_s)).sum(dim=-1)
            share, label = shares[part].unsqueeze(1), labels[part].clamp_min(0).unsqueeze(1)
            nll = -log_s.gather(1, label)
            loss += ((1 - share) * each.unsqueeze(1) + share * nll).sum()
            kl += each.sum()
            target = target.mul_(1 - share).scatter_add_(1, label, share.to(target.dtype))
            grad[part] = log_s.exp_().sub_(target) @ head
        ctx.save_for_backward(grad / len(student))
        mean_kl = (kl / len(student)).float()
        ctx.mark_non_differentiable(mean_kl)
        return (loss / len(student)).float(), mean_kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grads[0], None, None, None, None
