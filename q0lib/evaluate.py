"""What a model says of held-out text: log p of every token, evaluated as it will be used."""

import torch

from q0lib import corpus, distill, ranks
from q0lib.model import GPT


@torch.no_grad()
def held_out_log_probs(
    model: GPT, split: corpus.Split, dtype: torch.dtype, batch: int = 32
) -> torch.Tensor:
    """log p of every scored token of a held-out split, nats, fp32 [T], in the split's order.

    The model is used as it is evaluated (no dropout) and left as it was. Ranks share the rows, and
    each gets what all have found.
    """
    context = model.config.context
    device = model.head.weight.device
    training = model.training
    model.eval()
    rows = corpus.held_out_rows(split.tokens, context)
    if rows < 1:
        raise ValueError(
            f"{split.name}_tokens must be > context ({context}), got {len(split.tokens)}"
        )
    parts = []
    for first in ranks.dealt(range(0, rows, batch)):
        block = corpus.held_out(split, context, first, min(batch, rows - first))
        tokens = torch.from_numpy(block).to(device)
        hidden = model(tokens[:, :-1], dtype).flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts.append(
            distill.token_log_probs(hidden, model.head.weight, targets, model.config.softcap).cpu()
        )
    model.train(training)
    return torch.cat(ranks.in_order(parts))
