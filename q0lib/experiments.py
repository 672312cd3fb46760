"""The measured study: the runs it is made of, what each is for, and what they cost.

    python -m q0lib.experiments --preset cpu           # list the runs: what is done, what is not
    python -m q0lib.experiments --preset cpu --train   # train what is missing, go on after a stop
    python -m q0lib.experiments --preset cpu --train --parts main ablation --seeds 0

A *part* is the runs behind one notebook. Runs that share a directory (a budget that is the prefix
of a longer one) are trained once.
"""

import argparse
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from q0lib import allocation, config, paths, population, sweep, trajectory

PARTS = ("tuning", "main", "splits", "ablation", "reference", "small")
FULL = "full recipe"  # the ablations' own reference: q0 as the preset has it
UNDISTILLED = "no distillation"


@dataclass(frozen=True)
class Extent:
    """How far the study goes at one preset; lengths in epochs."""

    budgets: tuple[float, ...]  # at which the curves have points
    q0: tuple[tuple[int, float], ...]  # trajectories, and how long each is
    ensemble: float
    splits: dict[float, str]  # epochs a member, beside the preset's, and the fields tuned for it
    single: tuple[float, ...]
    ablation: tuple[float, ...]  # where variants are compared; they are trained to the last
    small: tuple[float, ...]
    multiples: tuple[int, ...]  # of the training tokens, for the one-epoch reference
    sizes: dict[str, tuple[str, ...]]  # ... of these models
    recipe: tuple[str, ...]  # ... all trained like this
    trials: tuple[tuple[str, float, str], ...] = ()  # that fixed the preset: method, epochs, fields


_MULTIPLES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)


def _size(width: int, layers: int, heads: int) -> dict[str, tuple[str, ...]]:
    shape = {"width": width, "layers": layers, "heads": heads}
    return {f"width {width}": tuple(f"model.{name}={n}" for name, n in shape.items())}


# One seed, judged on validation: q0 by its learned mixture, an ensemble by its uniform one. What
# a field is where a trial does not name it, the preset says; the presets took the best.
_CPU_TRIALS = (
    *(("q0", epochs, fields) for epochs, fields in (
        (64, "weight_decay=0.7"), (64, "weight_decay=1.0"), (64, "weight_decay=0.5"),
        (32, "matrix_lr=0.055"), (32, "matrix_lr=0.03"), (32, "batch_tokens=1024"),
        (32, "alpha=0.6"),
    )),
    *(("ensemble", epochs, f"epochs_per_cycle={fields}") for epochs, fields in (
        (64, "16 weight_decay=1.0"), (64, "16 weight_decay=1.5"), (256, "16 weight_decay=0.7"),
        (64, "16 weight_decay=0.5"), (32, "16 weight_decay=1.0 matrix_lr=0.045"),
        (48, "16 weight_decay=0.7 matrix_lr=0.02"), (48, "16 weight_decay=0.7 batch_tokens=1024"),
        (48, "16 weight_decay=0.7 dropout=0.1"), (64, "8 weight_decay=0.7"),
        (256, "32 weight_decay=1.0"), (64, "32 weight_decay=1.3"),
    )),
)  # fmt: skip

EXTENTS = {
    "quick": Extent(
        budgets=(1, 2, 4, 8, 16, 24, 32, 48), q0=((1, 48),), ensemble=48,
        splits={8: ""}, single=(1, 2, 4, 8, 16, 32), ablation=(16, 32, 48),
        small=(1, 2, 4, 8), multiples=_MULTIPLES[:6],
        sizes=_size(64, 2, 2) | _size(96, 3, 3) | _size(128, 4, 4), recipe=(),
    ),
    "cpu": Extent(
        budgets=(1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160,
                 192, 224, 256, 288, 320, 384, 448, 512),
        q0=((4, 128),), ensemble=256,
        splits={8: "weight_decay=0.7", 16: "weight_decay=0.7"}, single=(1, 2, 4, 8, 16, 32, 64),
        ablation=(32, 64, 128), small=(1, 2, 4, 8), multiples=_MULTIPLES,
        sizes=_size(96, 3, 3) | _size(128, 4, 4) | _size(192, 6, 6), recipe=(),
        trials=_CPU_TRIALS,
    ),
    "gpu": Extent(
        budgets=(1, 2, 4, 8, 16, 24, 32, 48, 64), q0=((1, 64),), ensemble=64, splits={16: ""},
        single=(1, 2, 4, 8, 16, 32), ablation=(16, 32), small=(1, 2, 4, 8), multiples=_MULTIPLES,
        sizes=_size(384, 6, 6) | _size(768, 12, 6) | _size(1280, 20, 10), recipe=(),
    ),
    "paper": Extent(
        budgets=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256), q0=((2, 128),), ensemble=256,
        splits={16: ""}, single=(1, 2, 4, 8, 16, 32), ablation=(64, 128, 256), small=(1, 2, 4, 8),
        multiples=_MULTIPLES,
        recipe=("model.loop_start=0", "model.loop_end=0", "model.multi_token=false"),
        sizes=_size(768, 12, 6) | _size(1280, 20, 10) | _size(1664, 26, 13),
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


def plan(
    preset: str, parts: Sequence[str] = PARTS, methods: Sequence[str] | None = None
) -> list[Experiment]:
    """The experiments of a preset, part by part, of all methods or of some.

    Raises:
        ValueError: an unknown preset, part or method.
    """
    base = config.preset(preset)
    extent = EXTENTS[preset]
    known = {"tuning": _tuning, "main": _main, "splits": _splits, "ablation": _ablations,
             "reference": _reference, "small": _small}  # fmt: skip
    for part in parts:
        if part not in known:
            raise ValueError(f"unknown part {part!r}, known: {', '.join(known)}")
    for method in methods or ():
        if method not in base.methods:
            raise ValueError(f"unknown method {method!r}, known: {', '.join(base.methods)}")
    found = [experiment for part in parts for experiment in known[part](extent, base)]
    return [each for each in found if methods is None or each.method in methods]


def _main(extent: Extent, base: config.Study) -> list[Experiment]:
    return [
        Experiment("main", "ensemble", "ensemble", extent.ensemble),
        *(Experiment("main", "q0", "q0", count * epochs, (f"q0.trajectories={count}",))
          for count, epochs in extent.q0),
        Experiment("main", "distilled_ensemble", "distilled_ensemble", extent.ensemble),
        *(Experiment("main", "single", "single", epochs) for epochs in extent.single),
    ]  # fmt: skip


def _tuning(extent: Extent, base: config.Study) -> list[Experiment]:
    found = []
    for method, epochs, fields in extent.trials:
        changed = tuple(f"{method}.{field}" for field in fields.split())
        if method == "q0":
            changed = ("q0.trajectories=1", *changed)
        found.append(Experiment("tuning", fields, method, epochs, changed))
    return found


def _splits(extent: Extent, base: config.Study) -> list[Experiment]:
    all_splits = {base.methods["ensemble"].epochs_per_cycle: "", **extent.splits}
    found = []
    for epochs, fields in sorted(all_splits.items()):
        changed = [f"ensemble.{each}" for each in (f"epochs_per_cycle={epochs:g}", *fields.split())]
        label = f"{extent.ensemble / epochs:g} models x {epochs:g} epochs"
        found.append(Experiment("splits", label, "ensemble", extent.ensemble, tuple(changed)))
    return found


def _ablations(extent: Extent, base: config.Study) -> list[Experiment]:
    q0 = base.methods["q0"]

    def length(epochs: float) -> tuple[str, ...]:  # noise and teacher keep their place in epochs
        cycles = q0.epochs_per_cycle / epochs
        return (f"q0.epochs_per_cycle={epochs:g}", f"q0.horizon={round(q0.horizon * cycles)}",
                f"q0.distill_after={round(q0.distill_after * cycles)}")  # fmt: skip

    changes = {
        FULL: (),
        UNDISTILLED: ("q0.teacher=none",),
        "teacher every second cycle": ("q0.teacher_every=2",),
        "flat weight decay": ("q0.wd_schedule=flat",),
        "weight decay in phase": ("q0.wd_schedule=in_phase",),
        "no perturbation": ("q0.perturb_start=0", "q0.perturb_end=0"),
        "cycles of 1 epoch": length(1),
        "cycles of 4 epochs": length(4),
        "EMA in the cycle": ("q0.ema_fraction=0.5",),
    }
    last = max(extent.ablation)
    # A third longer, so that it can be read where it has cost as much as the full recipe.
    longer = math.ceil(4 / 3 * last / q0.epochs_per_cycle) * q0.epochs_per_cycle
    return [
        Experiment("ablation", label, "q0", longer if label == UNDISTILLED else last,
                   ("q0.trajectories=1", *changed))
        for label, changed in changes.items()
    ]  # fmt: skip


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
            Experiment("small", "one model, snapshots in its tail", "tail", epochs,
                       (f"tail.tail={allocation.tail(epochs):.6g}",)),
            Experiment("small", "cycles", "q0", epochs, cycles),
            *(Experiment("small", f"models of {each:g} epochs", "ensemble", epochs,
                         (f"ensemble.epochs_per_cycle={each:g}",))
              for each in (epochs / 4, epochs / 2) if each >= 1),
        ]  # fmt: skip
    return found


def train(
    experiments: Sequence[Experiment], preset: str, seeds: Sequence[int], jobs: int = 2
) -> list[tuple[Experiment, config.Run]]:
    """Train what is missing of the experiments, seed by seed, `jobs` populations at a time.

    Each goes through the notebook that sweeps run, in a process of its own; what is complete is
    reused. Returns every experiment with its run.

    Raises:
        ValueError: an unknown preset or method, a bad seed or budget, before anything runs.
        RuntimeError: a population failed; says which, and why.
        sweep.Interrupted: after Ctrl-C, with everything saved.
    """
    found = [(each, each.run(preset, seed)) for seed in seeds for each in experiments]
    complete = sum(population.is_complete(run) for _, run in found)
    if complete:
        print(f"     complete already, reused: {complete} of {len(found)} populations")
    # Runs of one directory share trajectories, so they take turns: the longest first, and the
    # others for what it lacks.
    waves: list[dict[Path, tuple[Experiment, config.Run]]] = []
    for each, run in sorted(found, key=lambda pair: -pair[1].cycles):
        wave = next((wave for wave in waves if run.directory not in wave), None)
        if wave is None:
            waves.append(wave := {})
        wave[run.directory] = each, run
    for wave in waves:
        missing = [pair for pair in found if pair in wave.values()]
        missing = [(each, run) for each, run in missing if not population.is_complete(run)]
        if missing:
            _train_at_once(missing, preset, jobs)
    return found


def train_methods(
    preset: str, seeds: Sequence[int], methods: Sequence[str], epochs: float, jobs: int = 2
) -> list[config.Run]:
    """Train the methods of a preset at one budget, as `train` does; the runs, seed by seed."""
    experiments = [Experiment("methods", method, method, epochs) for method in methods]
    return [run for _, run in train(experiments, preset, seeds, jobs)]


def _train_at_once(wave: Sequence[tuple[Experiment, config.Run]], preset: str, jobs: int) -> None:
    points = [
        {"preset": preset, "method": each.method, "seed": run.seed, "epochs": float(each.epochs),
         "overrides": list(each.overrides)}
        for each, run in wave
    ]  # fmt: skip
    with _member_bar([run for _, run in wave]):
        table = sweep.sweep(
            paths.NOTEBOOKS / "train_population.ipynb", {}, {}, listed=points, jobs=jobs,
            force=True,  # a point that was done is not skipped: its population has gone
        )  # fmt: skip
    say(table)


def say(table: pd.DataFrame) -> None:
    """Print what came of each point of a sweep; RuntimeError if one failed."""
    for row in table.itertuples():
        word = {"skipped": "still valid, reused", "done": f"done in {row.seconds:.0f} s"}
        status = str(row.status)
        print(f"     {Path(str(row.output)).stem}: {word.get(status, f'{status}: {row.reason}')}")
    failed = table[~table.status.isin(["done", "skipped"])]
    if len(failed):
        raise RuntimeError(f"{len(failed)} of {len(table)} failed: {failed.reason.iloc[0]}")


@contextmanager
def _member_bar(runs: Sequence[config.Run]) -> Iterator[None]:
    """A bar of the snapshots that training leaves, counted in the run directories."""
    members = {
        population.member_path(run.directory, trajectory, cycle)
        for run in runs
        for trajectory in range(run.trajectories)
        for cycle in range(run.cycles)
    }
    ended = threading.Event()
    with tqdm(total=len(members), unit="snapshot", position=1, leave=False) as bar:

        def watch() -> None:
            while not ended.wait(1.0):
                bar.update(sum(path.exists() for path in members) - bar.n)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def cost_table(found: Sequence[tuple[Experiment, config.Run]]) -> pd.DataFrame:
    """What each run is for, what it needs, and, once it is trained, what it took.

    What two runs share (a prefix, in one directory) is charged to the first of them.

    Columns: part, label, method, seed, epochs; charged (epochs that are not charged above);
    tokens and flops (of training them, foretold); done; hours (of training them, on one device,
    which on a CPU is one core; nan before); run, overrides.
    """
    rows, trained = [], dict[tuple[Path, int], int]()
    for each, run in found:
        need, done = trajectory.estimate(run), population.is_complete(run)
        cycles, seconds = 0, 0.0
        for index in range(run.trajectories):
            before = trained.get((run.directory, index), 0)
            trained[run.directory, index] = max(before, run.cycles)
            if before < run.cycles:
                cycles += run.cycles - before
                seconds += _train_seconds(run, index, run.cycles) if done else math.nan
                seconds -= _train_seconds(run, index, before) if done and before else 0.0
        share = cycles / (run.trajectories * run.cycles)
        rows.append(
            {"part": each.part, "label": each.label, "method": each.method, "seed": run.seed,
             "epochs": run.epochs, "charged": share * run.epochs, "tokens": share * need["tokens"],
             "flops": share * need["flops"], "done": done, "hours": seconds / 3600,
             "run": f"{run.preset}/{run.directory.name}", "overrides": " ".join(each.overrides)}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _train_seconds(run: config.Run, trajectory: int, cycles: int) -> float:
    path = population.member_path(run.directory, trajectory, cycles - 1)
    return float(population.read_record(path)["train_seconds"])


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """A `cost_table` by part: runs, how many are done, epochs, tokens, FLOPs, hours; and in all."""
    parts = table.groupby("part", sort=False).agg(
        runs=("done", "size"), done=("done", "sum"), epochs=("charged", "sum"),
        tokens=("tokens", "sum"), flops=("flops", "sum"), hours=("hours", "sum"),
    )  # fmt: skip
    return pd.concat([parts, parts.sum().to_frame("all").T.rename_axis("part")])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status: 0, 1 on a failure, 2 on bad usage, 130."""
    parser = argparse.ArgumentParser(
        prog="python -m q0lib.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="cpu", help="default: cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--train", action="store_true", help="train what is missing")
    given = parser.parse_args(argv)

    def work() -> None:
        experiments = plan(given.preset, given.parts)
        if given.train:
            train(experiments, given.preset, given.seeds, given.jobs)
        table = cost_table(
            [(each, each.run(given.preset, seed)) for seed in given.seeds for each in experiments]
        )
        columns = ["part", "label", "seed", "epochs", "charged", "done", "hours"]
        print(table[columns].to_string(index=False, na_rep="", float_format="%.3g"))
        print(f"\n{summarise(table).round(2).to_string()}")

    return exit_status(parser.prog, work)


def exit_status(prog: str, work: Callable[[], None]) -> int:
    """Do a command's work; 0, or one sentence about what went wrong and the status for it."""
    try:
        work()
    except sweep.Interrupted:
        print("stopped; what was trained is saved, run it again to go on")
        return 130
    except RuntimeError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
