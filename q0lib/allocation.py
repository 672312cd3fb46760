"""How to spend an epoch budget: trajectories, cycles, epochs a cycle, and where to snapshot.

The recipe is the paper's (section on allocating the budget, and table 3 for small budgets). Where
the paper shows no numbers for a plan, the plan says so.
"""

import math
from dataclasses import dataclass

CYCLES_FROM = 8  # epochs a trajectory needs before cycles are as good as one ordinary run
END_SNAPSHOTS = 4  # taken at the end of an ordinary run, table 3
EPOCHS_PER_CYCLE = 2.0


@dataclass(frozen=True)
class Plan:
    """One way to spend `epochs`; every trajectory is the same.

    `snapshots` are the epochs of one trajectory after which a snapshot is taken. An ordinary run
    is one cycle as long as the trajectory. `warnings` name what the paper does not back.
    """

    epochs: float
    trajectories: int
    cycles: int
    epochs_per_cycle: float
    snapshots: tuple[float, ...]
    warnings: tuple[str, ...]

    @property
    def members(self) -> int:
        """The population's size M: all snapshots of all trajectories."""
        return self.trajectories * len(self.snapshots)

    @property
    def unspent(self) -> float:
        """Epochs left over because trajectories are equal and cycles whole."""
        return self.epochs - self.trajectories * self.cycles * self.epochs_per_cycle

    @property
    def explanation(self) -> str:
        """The plan in one line."""
        runs = _count(self.trajectories, "trajectory", "trajectories")
        if len(self.snapshots) > self.cycles:
            spacing = self.snapshots[1] - self.snapshots[0]
            how, where = "1 ordinary run", f"{spacing:.3g} epochs apart up to its end"
        else:
            how, where = _count(self.cycles, "cycle", "cycles"), "one after each cycle"
        budget, length = (
            _count(n, "epoch", "epochs") for n in (self.epochs, self.epochs_per_cycle)
        )
        members = _count(self.members, "snapshot", "snapshots")
        left = f"; {self.unspent:.3g} unspent" if self.unspent > 1e-9 else ""
        return f"{budget}: {runs} x {how} of {length} = {members}, {where}{left}"


def best_trajectories(epochs: float) -> int:
    """Return the paper's N* = max(1, floor(log2(E / 64))), which it calls a qualitative guide.

    Raises:
        ValueError: unless `epochs` is finite and positive.
    """
    _require_positive("epochs", epochs)
    return max(1, math.floor(math.log2(epochs / 64)))


def plan(
    epochs: float,
    trajectories: int | None = None,
    epochs_per_cycle: float = EPOCHS_PER_CYCLE,
) -> Plan:
    """Return how the paper would spend `epochs`, counted over all trajectories.

    From 8 epochs a trajectory on: cycles of `epochs_per_cycle`, a snapshot at the end of each, and
    N* trajectories unless `trajectories` is given. Below that: one ordinary run with four closely
    spaced snapshots, the last at its end. They share the last 0.15 epoch of a one-epoch run and
    the last whole epoch from four on (table 3); between, the share is interpolated, and below one
    epoch it is 0.15 of the run.

    Raises:
        ValueError: unless epochs and epochs_per_cycle are finite and positive, trajectories is
            a whole number >= 1, and at least one cycle fits a trajectory that is long enough to
            have cycles.
    """
    _require_positive("epochs", epochs)
    _require_positive("epochs_per_cycle", epochs_per_cycle)
    rule = best_trajectories(epochs)
    chosen = rule if trajectories is None else trajectories
    if isinstance(chosen, bool) or not isinstance(chosen, int) or chosen < 1:
        raise ValueError(f"trajectories must be a whole number >= 1, got {chosen!r}")
    share = epochs / chosen
    if share < CYCLES_FROM:
        cycles, length, snapshots = 1, share, _end_snapshots(share)
    else:
        cycles, length = math.floor(share / epochs_per_cycle + 1e-9), float(epochs_per_cycle)
        if cycles < 1:
            raise ValueError(
                f"epochs_per_cycle must be at most the {share:g} epochs of a trajectory, "
                f"got {epochs_per_cycle:g}"
            )
        snapshots = tuple(length * (cycle + 1) for cycle in range(cycles))
    warnings = _warnings(epochs, chosen, rule, epochs_per_cycle)
    return Plan(epochs, chosen, cycles, length, snapshots, warnings)


def tail(epochs: float) -> float:
    """Return the last share of an ordinary run of `epochs` in which its snapshots lie (table 3).

    0.15 of a run of at most one epoch, one whole epoch from four on, interpolated between.

    Raises:
        ValueError: unless `epochs` is finite and positive.
    """
    _require_positive("epochs", epochs)
    return (0.15 * epochs if epochs < 1 else min(1.0, 0.15 + 0.85 * (epochs - 1) / 3)) / epochs


def _end_snapshots(epochs: float) -> tuple[float, ...]:
    """Return the four snapshot epochs of an ordinary run of `epochs`."""
    spacing = tail(epochs) * epochs / END_SNAPSHOTS
    return tuple(epochs - spacing * left for left in reversed(range(END_SNAPSHOTS)))


def _warnings(
    epochs: float, trajectories: int, rule: int, epochs_per_cycle: float
) -> tuple[str, ...]:
    """Return what the paper does not show about this plan, one sentence each."""
    said = []
    if epochs < CYCLES_FROM and epochs not in (1, 4):
        said.append("small budgets are published for 1 and 4 epochs only")
    if CYCLES_FROM <= epochs < 32:
        said.append("no losses are published between 4 and 32 epochs")
    if epochs > 256:
        said.append("published curves end at 256 epochs; beyond lies one run of 960")
    if epochs > 512:
        said.append("that run used 5 trajectories where the rule gives 3 (gaps of about 0.001)")
    if epochs > 960:
        said.append("no published run is longer than 960 epochs")
    if trajectories != rule and (epochs, trajectories) != (960, 5):
        said.append(f"the rule gives {rule} trajectories, not {trajectories}")
    if epochs >= CYCLES_FROM and epochs_per_cycle != EPOCHS_PER_CYCLE:
        said.append("2 epochs a cycle were best, but no other value's losses are published")
    return tuple(said)


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def _count(number: float, one: str, many: str) -> str:
    return f"{number:g} {one if number == 1 else many}"
