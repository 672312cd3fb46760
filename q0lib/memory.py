"""How much memory training takes, counted from its config, and the micro-batch that fits.

Counted is what a step holds at its fullest: `python -m q0lib.bench` prints it beside measured
peaks. On a GPU the same count holds for the uncompiled model, the larger of the two.
"""

import dataclasses
import math

import torch

from q0lib import config, distill, runtime
from q0lib.model import layer_passes, mlp_width, parameter_count

EVALUATED = 32  # rows of held-out text in a forward pass
SHARE = 0.9  # of a device's free memory that a micro-batch may be found for
# What an allocator holds beyond what it was asked for, and the kernels' own scratch in bytes: on a
# CPU measured, elsewhere assumed.
_SLACK, _SCRATCH = {"cpu": 1.2}, {"cpu": 16 << 20}
_SLACK_ELSEWHERE, _SCRATCH_ELSEWHERE = 1.1, 128 << 20


def training(run: config.Run, taught: bool = True, kind: str = 'cpu') -> float:
    """Bytes on a device of this `kind` ("cpu", "cuda", ...) at the fullest moment of training.

    Weights, optimizer state, average and teacher stay; beside them stand, whichever is more, the
    activations of a micro-batch, the optimizer's step, or the forward pass of an evaluation.
    """
    model, method = run.model, run.method
    parameters = parameter_count(model)
    table = model.vocab_size * model.width  # the embedding, or the head
    size = runtime.DTYPES[run.precision].itemsize
    stays = 8 * parameters + 4 * 2 * table  # fp32 weights, momentum; AdamW keeps two of them
    stays += 4 * parameters * (method.ema_fraction > 0)
    if taught:
        stays += size * parameters * (len(run.teaching.members) if run.teaching else 1)
    rows = max(method.batch_tokens, method.edge_batch_tokens) // model.context
    at_once = min(run.runtime.micro_batch or rows, rows)
    tokens = at_once * model.context
    gradients = 4 * parameters
    forward = tokens * _activations(model, size, kind, method.dropout) + _cast_weights(model, size)
    forward += _head(model, tokens, size, kind, taught)
    if at_once < rows:
        forward += gradients  # of the micro-batches before, and the embedding's anew
    step = gradients + 4 * table * (1 if kind == "cpu" else 2)
    evaluated = EVALUATED * model.context
    scored = evaluated * _layer(model, size, kind) + size * evaluated * model.width * (
        model.layers // 2
    )
    scored += 4 * 4 * _chunk(model, evaluated, kind) + size * table
    slack = _SLACK.get(kind, _SLACK_ELSEWHERE)
    return slack * (stays + max(forward, step, scored)) + _SCRATCH.get(kind, _SCRATCH_ELSEWHERE)


def _activations(model: config.Model, size: int, kind: str, dropout: float) -> float:
    """Bytes a token that a forward pass keeps for its gradient, and one layer's gradients."""
    width, passes = model.width, len(layer_passes(model)) + model.multi_token
    # The residual stream, its scaled and normalised forms, queries, keys and values before and
    # after rotation and norm, the mixed values before and after their gate; 4 for the SwiGLU.
    kept = size * (13 * width + 4 * mlp_width(model) + width * model.value_projections)
    if kind == "cpu":  # contiguous copies, and a dropout mask in full precision
        kept += size * 3 * width
    kept += 2 * width * bool(dropout) * (size if kind == "cpu" else 1)
    kept += _attention(model, size, kind)
    return passes * kept + size * (4 + 3 * model.multi_token) * width + _layer(model, size, kind)


def _layer(model: config.Model, size: int, kind: str) -> float:
    """Bytes a token that stand at a time while one layer runs, without a gradient or with its."""
    return size * (8 * model.width + 2 * mlp_width(model)) + _attention(model, size, kind)


def _attention(model: config.Model, size: int, kind: str) -> float:
    """Bytes a token of attention's probabilities, which only our CPU products keep."""
    return 1.5 * model.context * model.heads if kind == "cpu" and size == 2 else 4.0 * model.heads


def _cast_weights(model: config.Model, size: int) -> float:
    """Bytes of the weights in the activations' dtype that each layer pass keeps."""
    width, passes = model.width, len(layer_passes(model)) + model.multi_token
    attention = 3 * width * width  # one matrix of three, whatever the dtype
    others = width * width + 3 * width * mlp_width(model)
    others += width * width * model.value_projections // 2
    return passes * size * (attention + (others if size < 4 else 0))


def _head(model: config.Model, tokens: int, size: int, kind: str, taught: bool) -> float:
    """Bytes of the head and the losses: gradients of [V, D], a chunk of logits and its kin."""
    table = model.vocab_size * model.width
    gradients = 4 * table * (2 + model.multi_token) + 2 * size * table
    return gradients + 4 * (9 if taught else 5) * _chunk(model, tokens, kind)


def _chunk(model: config.Model, tokens: int, kind: str) -> float:
    most = distill.CHUNK_ELEMENTS if kind == "cpu" else distill.GPU_CHUNK_ELEMENTS
    return min(max(most, model.vocab_size), tokens * model.vocab_size)


def free(device: torch.device) -> float:
    """Bytes that this process can still get on a CUDA device, its own cache included."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def fitted(run: config.Run) -> config.Run:
    """The run with the micro-batch that its device has room for, where it leaves that open.

    On a GPU, `runtime.micro_batch` 0 becomes the largest number of sequences that divides every
    batch and fits into `SHARE` of what is free. On a CPU it stays: the whole batch.

    Raises:
        ValueError: not even one sequence fits.
    """
    device = runtime.device(run.runtime.device)
    if run.runtime.micro_batch or device.type != "cuda":
        return run
    return with_micro_batch(run, free(device))


def with_micro_batch(run: config.Run, available: float) -> config.Run:
    """The run with the largest micro-batch that fits into `SHARE` of so many bytes of a GPU."""
    method, context = run.method, run.model.context
    whole = math.gcd(method.batch_tokens // context, method.edge_batch_tokens // context)
    for rows in (rows for rows in range(whole, 0, -1) if whole % rows == 0):
        settings = dataclasses.replace(run.runtime, micro_batch=rows)
        one = dataclasses.replace(run, runtime=settings)
        if training(one, kind="cuda") <= SHARE * available:
            return one
    raise ValueError(
        f"training {run.name} of preset {run.preset} takes {training(one, 'cuda') / 2**30:.1f} GiB "
        f"even a sequence at a time, and {available / 2**30:.1f} are free on the GPU"
    )
