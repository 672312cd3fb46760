"""How much memory training takes, counted from its config, and the micro-batch that fits.

Counted is what is there at the fullest moment of a step. `python -m q0lib.bench` prints it beside
measured peaks: on a CPU within a quarter of them, mostly within a tenth.
"""

import dataclasses
import math

import torch

from q0lib import config, distill, ranks, runtime
from q0lib.model import layer_passes, mlp_width, parameter_count

SHARE = 0.75  # of a GPU's memory that a micro-batch may take: the count may be a quarter short
SLACK = 1.2  # what an allocator holds for each byte that it was asked for
OTHER = 16 << 20  # bytes of tables, of kernels' scratch, of whatever is small
CHUNKS = 9  # arrays as large as a chunk of logits: of student and teacher, and their gradients
SCORED = 32  # held-out sequences in a forward pass of `evaluate`


def training(run: config.Run, taught: bool = True) -> float:
    """Bytes on the run's device at the fullest moment of training, `taught` or not.

    Weights, gradients, optimizer state, average and teachers are there throughout; beside them
    stands what a micro-batch keeps for its gradient, or what an evaluation needs if that is more.
    Counted for the uncompiled model; libraries, and the code of kernels, come on top.
    """
    model, method = run.model, run.method
    parameters, table = parameter_count(model), model.vocab_size * model.width
    size = runtime.DTYPES[run.precision].itemsize
    teachers = len(run.teaching.members) if run.teaching else int(taught)
    copies = 3 + (method.ema_fraction > 0)  # weights, gradients, momentum, average: in fp32
    stays = 4 * copies * parameters + 4 * 2 * table  # AdamW keeps two moments of its tables
    stays += size * teachers * parameters

    rows = max(method.batch_tokens, method.edge_batch_tokens) // model.context
    tokens = min(run.runtime.micro_batch or rows, rows) * model.context
    passes = len(layer_passes(model)) + model.multi_token
    # The weights of each pass in the activations' dtype, and the gradients of head and embedding.
    kept = size * (parameters - 2 * table) * passes / model.layers + 4 * 3 * table
    kept += tokens * (passes + 1) * _kept(model, size, _on_cpu(run), method.dropout > 0)
    kept += 4 * CHUNKS * _chunk(run, tokens)
    return OTHER + SLACK * (stays + max(kept, _scoring(run, size)))


def _scoring(run: config.Run, size: int) -> float:
    """Bytes of an evaluation's forward pass: what the skips wait for, one layer, a chunk."""
    model, tokens = run.model, SCORED * run.model.context
    numbers = (model.layers // 2 + 8) * model.width + 2 * mlp_width(model)
    return tokens * size * numbers + 4 * CHUNKS * _chunk(run, tokens)


def _kept(model: config.Model, size: int, on_cpu: bool, drops: bool) -> float:
    """Bytes a token that one layer pass keeps for its gradient.

    The residual stream, its scaled and normalised forms, queries, keys and values before and after
    rotation and norm, the mixed values before and after their gate; four stages of the SwiGLU;
    dropout's masks. Our products on the CPU keep their probabilities too.
    """
    kept = size * (14.0 * model.width + 4 * mlp_width(model)) + 2 * model.width * drops
    if on_cpu:
        kept += size * 3 * model.width  # contiguous copies
        kept += 1.5 * model.context * model.heads * (size == 2)
    return kept


def _chunk(run: config.Run, tokens: int) -> float:
    most = distill.CHUNK_ELEMENTS if _on_cpu(run) else distill.GPU_CHUNK_ELEMENTS
    return min(max(most, run.model.vocab_size), tokens * run.model.vocab_size)


def _on_cpu(run: config.Run) -> bool:
    name = run.runtime.device
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available())


def fitted(run: config.Run) -> config.Run:
    """The run with the micro-batch that its GPU has room for, where it leaves that open.

    All of a GPU's memory is asked for, not what is free of it now: so a run that goes on later on
    such a card goes on with the same micro-batch, and thus with the same bits. Of several ranks
    the smallest card decides. On a CPU a run stays as it is.
    """
    device = runtime.device(run.runtime.device)
    if run.runtime.micro_batch or device.type != "cuda":
        return run
    held = torch.cuda.get_device_properties(device).total_memory
    return with_micro_batch(run, min(ranks.everyones(held)), ranks.count())


def with_micro_batch(run: config.Run, held: float, count: int = 1) -> config.Run:
    """The run with the largest micro-batch for devices that hold so many bytes, `count` of them.

    It divides every batch of the run in parts of one size, enough for all of them, and takes
    `SHARE` of one at most; a single sequence where even that is more, as the count may be high.
    """
    method, context = run.method, run.model.context
    whole = math.gcd(method.batch_tokens // context, method.edge_batch_tokens // context)
    share = max(1, whole // count)
    for rows in (rows for rows in range(share, 0, -1) if share % rows == 0):
        found = dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, micro_batch=rows))
        if training(found) <= SHARE * held:
            break
    return found
