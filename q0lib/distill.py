"""The losses, from hidden states to nats per token: cross-entropy, and chain distillation.

Head, soft cap, softmax and loss run together over chunks of tokens and give the gradient on the
way, so that logits of [tokens, vocabulary] never exist whole, for the student or the teacher.
The arithmetic is fp32 whatever the activations' precision.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from q0lib.model import GPT

IGNORED = -100  # a target that counts for nothing
GPU_CHUNK_ELEMENTS = 1 << 25  # of fp32 logits at a time: 128 MB, enough to keep a GPU busy
_CHUNK_ELEMENTS = 1 << 17  # of fp32 logits at a time on the CPU: half a megabyte, in a core's cache


class Distillation(NamedTuple):
    """What a student is held to: the teacher's hidden states [N, D] and head [V, D]."""

    hidden: Tensor
    head: Tensor
    alpha: float
    temperature: float


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    softcap: float = 0.0,
    total: int | None = None,
    teacher: Distillation | None = None,
) -> tuple[Tensor, Tensor]:
    """The training loss and, beside it, the plain cross-entropy; both in nats per token.

    With a teacher the loss is (1 - a) CE + a T^2 KL(teacher || student), both distributions at
    temperature T (paper, eq. 1); without, it is CE. Sums over tokens are divided by `total`
    (default: the number of targets here), so that micro-batches of a batch add up to its mean.

    Args:
        hidden: [N, D] final hidden states, fp32 or bf16; gradients flow to it and to `head`.
        head: [V, D].
        targets: int64 [N]; IGNORED entries have no cross-entropy and no distillation loss.
        softcap: logits z become softcap * tanh(z / softcap); 0 leaves them.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if teacher is not None and not teacher.temperature > 0:
        raise ValueError(f"temperature must be > 0, got {teacher.temperature}")
    counted = int((targets != IGNORED).sum()) if total is None else total
    return _HeadLoss.apply(hidden, head, targets, softcap, max(counted, 1), teacher)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, softcap: float, total: int,
        teacher: Distillation | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight = head.to(hidden.dtype)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        entropy = torch.zeros_like(loss)
        for part in _chunks(hidden, head):
            x, target = hidden[part], targets[part].unsqueeze(1)
            share = (target != IGNORED).float() / total  # [n, 1]: what a token weighs
            target = target.clamp(min=0)
            logits, slope = _capped_logits(x, weight, softcap, slope=True)
            grad = logits.exp()
            normal = grad.sum(1, keepdim=True)
            ce = normal.log() - logits.gather(1, target)
            entropy += (share * ce).sum()
            hard = share if teacher is None else share * (1 - teacher.alpha)
            loss += (hard * ce).sum()
            grad.mul_(hard / normal)
            grad.scatter_add_(1, target, -hard)
            if teacher is not None:
                soft = share * (teacher.alpha * teacher.temperature)
                kl = _add_teacher(grad, soft, logits, teacher, part, softcap)
                loss += (soft * kl).sum() * teacher.temperature
            if slope is not None:
                grad.mul_(slope)
            low = grad.to(hidden.dtype)
            torch.mm(low, weight, out=grad_hidden[part])
            grad_head += low.t() @ x
        ctx.save_for_backward(grad_hidden, grad_head)
        entropy = entropy.float()
        ctx.mark_non_differentiable(entropy)
        return loss.float(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0].to(grad_hidden.dtype), grad_head * grads[0], *[None] * 4


def _chunks(hidden: Tensor, head: Tensor) -> list[slice]:
    elements = _CHUNK_ELEMENTS if hidden.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    size = max(1, elements // head.size(0))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _capped_logits(
    x: Tensor, weight: Tensor, softcap: float, slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """fp32 logits [n, V], shifted so that the largest is 0, and d(capped) / d(logit).

    c tanh(z / c) = 2 c sigmoid(2 z / c) - c, and on a CPU the sigmoid is several times faster.
    """
    logits, steepness = (x @ weight.t()).float(), None
    if softcap:
        logits.mul_(2 / softcap).sigmoid_()
        if slope:
            steepness = torch.addcmul(logits, logits, logits, value=-1).mul_(4)
        logits.mul_(2 * softcap)
    # The lowest value is finite, so that a teacher's -inf gives probability 0 and not NaN.
    logits.clamp_(min=torch.finfo(torch.float32).min / 4)
    return logits.sub_(logits.amax(1, keepdim=True)), steepness


def _add_teacher(
    grad: Tensor, soft: Tensor, logits: Tensor, teacher: Distillation, part: slice, softcap: float
) -> Tensor:
    """Add soft * (student - teacher) to `grad` and give KL(teacher || student), nats [n, 1].

    Both distributions are at the teacher's temperature; `logits` are overwritten.
    """
    hidden = teacher.hidden[part]
    theirs, _ = _capped_logits(hidden, teacher.head.to(hidden.dtype), softcap)
    theirs.div_(teacher.temperature)
    logits.div_(teacher.temperature)
    p, q = logits.exp(), theirs.exp()
    p_sum, q_sum = p.sum(1, keepdim=True), q.sum(1, keepdim=True)
    grad.addcmul_(p, soft / p_sum)
    grad.addcmul_(q, -soft / q_sum)
    gap = q.mul_(theirs.sub_(logits)).sum(1, keepdim=True)
    return gap / q_sum + p_sum.log_() - q_sum.log_()


@torch.no_grad()
def token_log_probs(
    hidden: Tensor, head: Tensor, targets: Tensor, softcap: float = 0.0
) -> Tensor:  # fmt: skip
    """log p of each target in nats, fp32 [N]; hidden [N, D], head [V, D], targets [N]."""
    weight = head.to(hidden.dtype)
    parts = []
    for part in _chunks(hidden, head):
        capped, _ = _capped_logits(hidden[part], weight, softcap)
        chosen = capped.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        parts.append(chosen - capped.logsumexp(-1))
    return torch.cat(parts)


def frozen_teacher(model: GPT, dtype: torch.dtype = torch.float32) -> GPT:
    """A deterministic copy in `dtype` that shares nothing with the student: eval mode, no
    gradients."""
    return copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
