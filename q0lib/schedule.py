"""Pure functions of the step: learning rate, weight decay, perturbation, batch size, position.

A cycle of `steps` optimizer steps is counted 1 .. steps, so that its last step runs at the floor
and the snapshot is taken there, before the restart.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


def lr_multiplier(step: float, steps: float, floor: float = 0.08, shape: str = "cyclic") -> float:
    """Multiplier of the peak learning rate at `step` of a cycle of `steps` (paper, eq. 4).

    "cyclic" falls linearly from 1 at step 0 to `floor` at step `steps`; "cosine" likewise along
    half a cosine.
    """
    progress = _progress(step, steps)
    fall = 1 - progress if shape == "cyclic" else (1 + math.cos(math.pi * progress)) / 2
    return floor + (1 - floor) * fall


def wd_multiplier(
    step: float,
    steps: float,
    lr_floor: float = 0.08,
    wd_floor: float = 0.7,
    mode: str = "anti",
    shape: str = "cyclic",
) -> float:
    """Multiplier of the peak weight decay at `step` of a cycle of `steps` (paper, eq. 4).

    "anti" rises from `wd_floor` to 1 as the learning rate falls; "in_phase" falls with it;
    "flat" stays at 1. `shape` is the learning rate's.
    """
    if mode == "flat":
        return 1.0
    fallen = (1 - lr_multiplier(step, steps, lr_floor, shape)) / (1 - lr_floor)
    return wd_floor + (1 - wd_floor) * (fallen if mode == "anti" else 1 - fallen)


def perturbation(boundary: int, boundaries: int, start: float = 0.25, end: float = 0.05) -> float:
    """Noise at a boundary between cycles, in standard deviations of each tensor (paper, eq. 5).

    Half a cosine from `start` at boundary 1 to `end` at the last of `boundaries`; `end` beyond.
    """
    if boundary < 1:
        raise ValueError(f"boundary must be >= 1, got {boundary}")
    progress = min((boundary - 1) / max(boundaries - 1, 1), 1.0)
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def batch_tokens(cycle: int, horizon: int, middle: int, edge: int = 0) -> int:
    """Tokens a step in cycle 0, 1, ...: `edge` in the first and last quarter of the horizon."""
    in_middle = horizon <= 4 * cycle < 3 * horizon
    return middle if in_middle or not edge else edge


class Cycle(NamedTuple):
    """Where a cycle stands in the endless stream of training rows."""

    first_row: int
    steps: int
    rows_per_step: int


def snapshot_epochs(cycles: int, epochs_per_cycle: float, tail: float = 0.0) -> list[float]:
    """Epochs of a trajectory after which its snapshots are taken, one a cycle.

    With a `tail` they are evenly spaced in that last fraction of its cycles * epochs_per_cycle
    epochs instead, the last at the end (paper, table 3).
    """
    if not tail:
        return [(cycle + 1) * epochs_per_cycle for cycle in range(cycles)]
    return [
        epochs_per_cycle * (cycles - tail * (cycles - 1 - snapshot)) for snapshot in range(cycles)
    ]


def plan(ends: Sequence[float], rows_per_epoch: int, rows_per_step: Sequence[int]) -> list[Cycle]:
    """Cycles that end after `ends[c]` epochs each, in whole batches of rows_per_step[c] rows.

    A cycle ends at the batch border nearest to its end, counted from the start of training, so
    that rounding does not add up. Every cycle has at least one step.
    """
    planned, row = [], 0
    for end, rows in zip(ends, rows_per_step, strict=True):
        steps = max(1, round((end * rows_per_epoch - row) / rows))
        planned.append(Cycle(row, steps, rows))
        row += steps * rows
    return planned


def _progress(step: float, steps: float) -> float:
    if steps <= 0 or not 0 <= step <= steps:
        raise ValueError(f"step must be between 0 and steps > 0, got {step} of {steps}")
    return step / steps
