"""Muon for the matrices, AdamW for embeddings, head and scalars: torch's own, with peak rates.

Each group remembers its peak learning rate and weight decay; the schedule multiplies both.
"""

import torch

from q0lib import config
from q0lib.model import GPT

ADAM_BETAS = (0.8, 0.95)
INPUT_SCALE_BETAS = (0.96, 0.95)
ADAM_EPS = 1e-10


def optimizers(model: GPT, method: config.Method) -> list[torch.optim.Optimizer]:
    """The two optimizers of a run, in a fixed order.

    Residual and skip scalars take a hundredth of the scalar rate, and no scalar is decayed, as
    in the reference.
    """
    named = dict(model.named_parameters())
    vectors = {name: named.pop(name) for name in list(named) if named[name].ndim < 2}
    embedding, head = named.pop("embedding.weight"), named.pop("head.weight")
    decay = method.weight_decay
    groups = [
        {"params": [embedding], "lr": method.embedding_lr, "weight_decay": decay},
        {"params": [head], "lr": method.unembedding_lr, "weight_decay": decay},
    ]
    for name, vector in vectors.items():
        is_input = name == "input_scale"
        groups.append({
            "params": [vector],
            "lr": method.scalar_lr * (1.0 if is_input else 0.01),
            "betas": INPUT_SCALE_BETAS if is_input else ADAM_BETAS,
            "weight_decay": 0.0,
        })  # fmt: skip
    adam = torch.optim.AdamW(groups, betas=ADAM_BETAS, eps=ADAM_EPS)
    muon = torch.optim.Muon(
        named.values(), lr=method.matrix_lr, weight_decay=decay, momentum=method.momentum
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = (group["lr"], group["weight_decay"])
    return [muon, adam]


def scale(optimizers: list[torch.optim.Optimizer], lr: float, weight_decay: float) -> None:
    """Set every group to its peak times these multipliers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak_lr, peak_decay = group["peak"]
            group["lr"], group["weight_decay"] = peak_lr * lr, peak_decay * weight_decay
