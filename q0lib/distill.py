"""The losses, from hidden states to nats per token: cross-entropy, and distillation.

Head, soft cap, softmax and loss run together over chunks of tokens and give the gradient on the
way, so that logits of [tokens, vocabulary] never exist whole, for the student or the teacher.
The arithmetic is fp32 whatever the activations' precision.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from q0lib.model import GPT, forward_flops

IGNORED = -100  # a target that counts for nothing
GPU_CHUNK_ELEMENTS = 1 << 25  # of fp32 logits at a time: 128 MB, enough to keep a GPU busy
_CHUNK_ELEMENTS = 1 << 17  # of fp32 logits at a time on the CPU: half a megabyte, in a core's cache


class Lesson(Protocol):
    """What a teacher says of N tokens, a chunk at a time."""

    def log_probs(self, part: slice) -> Tensor:
        """log p of every token of the vocabulary, fp32 [n, V], up to a constant a row; the
        caller may overwrite it."""


class Distillation(NamedTuple):
    """What a student is held to: a lesson, its share of the loss, and at which temperature."""

    lesson: Lesson
    alpha: float
    temperature: float


class Teacher:
    """Frozen copies of models, whose weighted mixture of probabilities teaches.

    A single snapshot is a mixture of one. The copies share nothing with what goes on training:
    eval mode, no gradients, weights in `dtype`. Shapes may differ, the vocabulary may not.

    Raises:
        ValueError: no models, or weights that are not one for each and positive.
    """

    def __init__(
        self,
        models: Sequence[GPT],
        weights: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        weights = [1 / len(models)] * len(models) if weights is None else list(weights)
        if not models or len(weights) != len(models) or not all(w > 0 for w in weights):
            raise ValueError(
                f"a teacher needs models and a positive weight for each, got {len(models)} models "
                f"and weights {weights}"
            )
        self.models = [copy.deepcopy(m).to(dtype).eval().requires_grad_(False) for m in models]
        self.log_weights = [math.log(weight / math.fsum(weights)) for weight in weights]
        self.dtype = dtype

    @property
    def flops(self) -> float:
        """FLOPs that a token of a lesson costs."""
        return sum(forward_flops(model.config) for model in self.models)

    @torch.no_grad()
    def lesson(self, inputs: Tensor) -> Lesson:
        """Run every model over inputs [B, T]; what they say of the B * T next tokens."""
        states = [
            (m(inputs, self.dtype).flatten(0, 1), m.head.weight, m.config.softcap)
            for m in self.models
        ]
        return Mixture(states, self.log_weights)


class Mixture(NamedTuple):
    """A lesson from hidden states [N, D_i], heads [V, D_i] and soft caps of each model."""

    states: Sequence[tuple[Tensor, Tensor, float]]
    log_weights: Sequence[float]

    def log_probs(self, part: slice) -> Tensor:
        mixed: Tensor | None = None
        for (hidden, head, softcap), log_weight in zip(self.states, self.log_weights, strict=True):
            x = hidden[part]
            said, _ = _capped_logits(x, head.to(x.dtype), softcap)
            if len(self.states) == 1:
                return said
            said = said.log_softmax(1).add_(log_weight)
            mixed = said if mixed is None else torch.logaddexp(mixed, said, out=mixed)
        assert mixed is not None, "a teacher has models"
        return mixed


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
        for part in chunks(hidden, head):
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
                kl = _add_teacher(grad, soft, logits, teacher, part)
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


def chunks(hidden: Tensor, head: Tensor) -> list[slice]:
    """Parts of hidden states [N, D] whose logits, by a head [V, D], fit into memory at once."""
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
    grad: Tensor, soft: Tensor, logits: Tensor, teacher: Distillation, part: slice
) -> Tensor:
    """Add soft * (student - teacher) to `grad` and give KL(teacher || student), nats [n, 1].

    Both distributions are at the teacher's temperature; `logits` are overwritten.
    """
    theirs = teacher.lesson.log_probs(part).div_(teacher.temperature)
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
    for part in chunks(hidden, head):
        capped, _ = _capped_logits(hidden[part], weight, softcap)
        chosen = capped.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        parts.append(chosen - capped.logsumexp(-1))
    return torch.cat(parts)
