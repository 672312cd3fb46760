"""The measured study: the runs it is made of, what each is for, and what they cost.

    python -m q0lib.experiments --preset cpu           # list the runs: what is done, what is not
    python -m q0lib.experiments --preset cpu --train   # train what is missing, go on after a stop
    python -m q0lib.experiments --preset cpu --train --parts main ablation --seeds 0

A *part* is the runs behind one notebook. Runs that share a directory (a budget that is the prefix
of a longer one) are trained once.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from q0lib import config, population, study, sweep, trajectory

PARTS = ("main", "splits", "ablation", "reference", "small")
FULL = "full recipe"  # the ablations' own reference: q0 as the preset has it


@dataclass(frozen=True)
class Extent:
    """How far the study goes at one preset; budgets in epochs."""

    ensemble: float
    splits: tuple[float, ...]  # epochs a member, beside the preset's
    trajectories: int
    trajectory: float
    single: tuple[float, ...]
    ablation: float
    small: tuple[float, ...]
    multiples: tuple[int, ...]  # of the training tokens, for the one-epoch reference
    sizes: dict[str, tuple[str, ...]]  # ... and its models
    recipe: tuple[str, ...]  # ... and how all of them are trained


_MULTIPLES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)

EXTENTS = {
    "quick": Extent(
        ensemble=48, splits=(8,), trajectories=2, trajectory=48, single=(1, 2, 4, 8, 16, 32),
        ablation=48, small=(1, 2, 4, 8), multiples=_MULTIPLES[:6],
        sizes={
            "width 64": ("model.width=64", "model.heads=2", "model.layers=2"),
            "width 96": (),
            "width 128": ("model.width=128", "model.heads=4", "model.layers=4"),
        },
        recipe=(),
    ),
    "cpu": Extent(
        ensemble=256, splits=(8, 32), trajectories=4, trajectory=128,
        single=(1, 2, 4, 8, 16, 32, 64), ablation=128, small=(1, 2, 4, 8), multiples=_MULTIPLES,
        sizes={
            "width 96": ("model.width=96", "model.heads=3", "model.layers=3"),
            "width 128": (),
            "width 192": ("model.width=192", "model.heads=6", "model.layers=6"),
        },
        recipe=(),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """One line of the study: a method at a budget, as the preset has it but for `overrides`."""

    part: str
    label: str
    method: str
    epochs: float
    overrides: tuple[str, ...] = ()

    def run(self, preset: str, seed: int) -> config.Run:
        """The run behind it."""
        chosen = config.preset(preset, seed=seed, overrides=list(self.overrides))
        return chosen.run(self.method, self.epochs)


def plan(preset: str, parts: Sequence[str] = PARTS) -> list[Experiment]:
    """The experiments of a preset, in the order in which they are worth having.

    Raises:
        ValueError: a preset without a measured study, or an unknown part.
    """
    if preset not in EXTENTS:
        raise ValueError(f"there is a measured study for {', '.join(EXTENTS)}, not for {preset!r}")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}, known: {', '.join(PARTS)}")
    known = {
        "main": _main,
        "splits": _splits,
        "ablation": _ablations,
        "reference": _reference,
        "small": _small,
    }
    extent, base = EXTENTS[preset], config.preset(preset)
    return [experiment for part in parts for experiment in known[part](extent, base)]


def _main(extent: Extent, base: config.Study) -> list[Experiment]:
    wide = (f"q0.trajectories={extent.trajectories}",)
    return [
        Experiment("main", "ensemble", "ensemble", extent.ensemble),
        Experiment("main", "q0", "q0", extent.trajectory * extent.trajectories, wide),
        Experiment("main", "distilled_ensemble", "distilled_ensemble", extent.ensemble),
        *(Experiment("main", "single", "single", epochs) for epochs in extent.single),
    ]


def _splits(extent: Extent, base: config.Study) -> list[Experiment]:
    own = base.methods["ensemble"].epochs_per_cycle
    return [
        Experiment("splits", f"{extent.ensemble / epochs:g} models x {epochs:g} epochs",
                   "ensemble", extent.ensemble, (f"ensemble.epochs_per_cycle={epochs:g}",))
        for epochs in sorted({*extent.splits, own})
    ]  # fmt: skip


def _ablations(extent: Extent, base: config.Study) -> list[Experiment]:
    q0 = base.methods["q0"]

    def length(epochs: float) -> tuple[str, ...]:  # noise and teacher keep their place in epochs
        cycles = q0.epochs_per_cycle / epochs
        return (f"q0.epochs_per_cycle={epochs:g}", f"q0.horizon={round(q0.horizon * cycles)}",
                f"q0.distill_after={round(q0.distill_after * cycles)}")  # fmt: skip

    changes = {
        FULL: (),
        "no distillation": ("q0.teacher=none",),
        "teacher every second cycle": ("q0.teacher_every=2",),
        "flat weight decay": ("q0.wd_schedule=flat",),
        "weight decay in phase": ("q0.wd_schedule=in_phase",),
        "no perturbation": ("q0.perturb_start=0", "q0.perturb_end=0"),
        "cycles of 1 epoch": length(1),
        "cycles of 4 epochs": length(4),
        "EMA in the cycle": ("q0.ema_fraction=0.5",),
    }
    return [
        Experiment("ablation", label, "q0", extent.ablation, ("q0.trajectories=1", *changed))
        for label, changed in changes.items()
    ]


def _reference(extent: Extent, base: config.Study) -> list[Experiment]:
    return [
        Experiment("reference", f"{size}, {multiple}x tokens", "single", 1.0,
                   (f"corpus.train_tokens={multiple * base.corpus.train_tokens}", *model,
                    *extent.recipe))
        for multiple in extent.multiples
        for size, model in extent.sizes.items()
    ]  # fmt: skip


def _small(extent: Extent, base: config.Study) -> list[Experiment]:
    found = []
    for epochs in extent.small:
        tau = min(base.methods["q0"].epochs_per_cycle, epochs / 2)
        cycles = ("q0.trajectories=1", f"q0.epochs_per_cycle={tau:g}")
        found += [
            Experiment("small", "one model", "single", epochs),
            Experiment("small", "one model, snapshots in its tail", "tail", epochs),
            Experiment("small", "cycles", "q0", epochs, cycles),
            *(Experiment("small", f"models of {each:g} epochs", "ensemble", epochs,
                         (f"ensemble.epochs_per_cycle={each:g}",))
              for each in (epochs / 4, epochs / 2) if each >= 1),
        ]  # fmt: skip
    return found


def train(
    preset: str, seeds: Sequence[int], parts: Sequence[str] = PARTS, jobs: int = 2
) -> list[tuple[Experiment, config.Run]]:
    """Train what is missing of the experiments, seed by seed, `jobs` runs at a time.

    Raises:
        ValueError, RuntimeError: as `study.train`.
    """
    found = [(each, each.run(preset, seed)) for seed in seeds for each in plan(preset, parts)]
    points = [
        {"preset": preset, "method": each.method, "seed": run.seed, "epochs": float(each.epochs),
         "overrides": list(each.overrides)}
        for each, run in found
    ]  # fmt: skip
    study.train_points(points, jobs)
    return found


def cost_table(found: Sequence[tuple[Experiment, config.Run]]) -> pd.DataFrame:
    """What each run is for, what it needs, and, once it is trained, what it took.

    Columns: part, label, method, seed, epochs, tokens and flops (of training, foretold), done,
    core_hours (of training, measured; nan before), shared (a row above trained the same
    directory at least as far, so that this one cost nothing more), run, overrides.
    """
    rows, trained = [], dict[Path, float]()
    for each, run in found:
        need, done = trajectory.estimate(run), population.is_complete(run)
        hours = float("nan")
        if done:
            members = population.load(run).members
            hours = members.groupby("trajectory").train_seconds.max().sum() / 3600
        before = trained.get(run.directory, 0.0)
        trained[run.directory] = max(before, run.epochs)
        rows.append(
            {"part": each.part, "label": each.label, "method": each.method, "seed": run.seed,
             "epochs": run.epochs, "tokens": need["tokens"], "flops": need["flops"], "done": done,
             "core_hours": hours, "shared": before >= run.epochs,
             "run": f"{run.preset}/{run.directory.name}", "overrides": " ".join(each.overrides)}
        )  # fmt: skip
    return pd.DataFrame(rows)


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """A `cost_table` by part: runs, how many are done, tokens, FLOPs and core-hours; and in all."""
    own = table[~table.shared]
    parts = own.groupby("part", sort=False).agg(
        runs=("done", "size"), done=("done", "sum"), tokens=("tokens", "sum"),
        flops=("flops", "sum"), core_hours=("core_hours", "sum"),
    )  # fmt: skip
    return pd.concat([parts, parts.sum().to_frame("all").T.rename_axis("part")])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status: 0, 1 on a failure, 2 on bad usage, 130."""
    parser = argparse.ArgumentParser(
        prog="python -m q0lib.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="cpu", help="quick or cpu (default)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--train", action="store_true", help="train what is missing")
    given = parser.parse_args(argv)
    try:
        found = [(each, each.run(given.preset, seed)) for seed in given.seeds
                 for each in plan(given.preset, given.parts)]  # fmt: skip
        if given.train:
            train(given.preset, given.seeds, given.parts, given.jobs)
        table = cost_table(found)
    except sweep.Interrupted:
        print("stopped; what was trained is saved, run it again to go on")
        return 130
    except RuntimeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    columns = ["part", "label", "seed", "epochs", "done", "core_hours", "shared"]
    print(table[columns].to_string(index=False, na_rep="", float_format="%.3g"))
    print(f"\n{summarise(table).round(2).to_string()}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
