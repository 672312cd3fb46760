"""Train the runs of the measured study, and say what they cost.

python -m q0lib.study.runs --preset cpu           # list the runs: what is done, what is not
python -m q0lib.study.runs --preset cpu --train   # train what is missing, go on after a stop
python -m q0lib.study.runs --preset cpu --train --parts main ablation --seeds 0
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from q0lib import command, config, paths, population
from q0lib.study import plan
from q0lib.study.plan import DOWNSTREAM, ONE_SEED, PARTS, POWER, STUDENTS, Experiment
from q0lib.sweeps import engines, sweep
from q0lib.train import estimate


def runs_of(
    experiments: Sequence[Experiment], preset: str, seeds: Sequence[int]
) -> list[tuple[Experiment, config.Run]]:
    """Every experiment with its run, seed by seed; a trial for the first of the seeds alone.

    One whose teachers are yet to be trained has no run yet, and is left out.
    """
    return [
        (each, each.run(preset, seed))
        for each, seed in _pairs(experiments, seeds)
        if not each.waits(preset, seed)
    ]


def _pairs(experiments: Sequence[Experiment], seeds: Sequence[int]) -> list[tuple[Experiment, int]]:
    return [
        (each, seed)
        for seed in seeds
        for each in experiments
        if seed == seeds[0] or each.part not in ONE_SEED
    ]


def train(
    experiments: Sequence[Experiment],
    preset: str,
    seeds: Sequence[int],
    jobs: int | None = None,
    engine: engines.Engine = engines.THIS_MACHINE,
) -> list[tuple[Experiment, config.Run]]:
    """Train what is missing of the experiments, the longest first, `jobs` at a time.

    By default two on this machine, or as many as another `engine` has room for. Each goes through
    the notebook that sweeps run, in a process of its own; what is complete is reused. Returns every
    experiment with its run, seed by seed.

    Raises:
        ValueError: an unknown preset or method, a bad seed or budget, before anything runs.
        RuntimeError: a population failed; says which, and why.
        sweep.Interrupted: after Ctrl-C, with everything saved.
    """
    if jobs is None and engine.locks:
        jobs = 2
    found = runs_of(experiments, preset, seeds)
    complete = sum(population.is_complete(run) for _, run in found)
    if complete:
        print(f"     complete already, reused: {complete} of {len(found)} populations")
    _train_ready(found, preset, jobs, engine)
    while len(taught := runs_of(experiments, preset, seeds)) > len(found):
        found = taught  # the next generation: its teachers are there now
        _train_ready(found, preset, jobs, engine)
    if waiting := len(_pairs(experiments, seeds)) - len(found):
        raise RuntimeError(f"{waiting} students wait for teachers that are not among what to train")
    return found


def _train_ready(
    found: Sequence[tuple[Experiment, config.Run]],
    preset: str,
    jobs: int | None,
    engine: engines.Engine,
) -> None:
    # Runs of one directory share trajectories, so they take turns: the longest first, and the
    # others for what it lacks.
    waves: list[dict[Path, tuple[Experiment, config.Run]]] = []
    for each, run in sorted(found, key=lambda pair: -pair[1].cycles):
        wave = next((wave for wave in waves if run.directory not in wave), None)
        if wave is None:
            waves.append(wave := {})
        wave[run.directory] = each, run
    for wave in waves:
        missing = [pair for pair in wave.values() if not population.is_complete(pair[1])]
        if missing:  # a short one fits in at the end, while a long one would run alone
            missing.sort(key=lambda pair: -estimate(pair[1])["flops"])
            _train_at_once(missing, preset, jobs, engine)


def train_methods(
    preset: str,
    seeds: Sequence[int],
    methods: Sequence[str],
    epochs: float,
    jobs: int | None = None,
) -> list[config.Run]:
    """Train the methods of a preset at one budget, as `train` does; the runs, seed by seed."""
    experiments = [Experiment("methods", method, method, epochs) for method in methods]
    return [run for _, run in train(experiments, preset, seeds, jobs)]


def _train_at_once(
    wave: Sequence[tuple[Experiment, config.Run]],
    preset: str,
    jobs: int | None,
    engine: engines.Engine = engines.THIS_MACHINE,
) -> None:
    def sweep_of(several: Callable[[config.Run], int], name: str) -> pd.DataFrame:
        points: list[dict[str, Any]] = [
            {"preset": preset, "method": each.method, "seed": run.seed,
             "epochs": float(each.epochs), "overrides": list(each.overrides),
             "teachers": each.taught_by(preset, run.seed), "teacher_k": each.k,
             "generated_tokens": each.generated_tokens, **({name: part} if several(run) else {})}
            for each, run in wave
            for part in range(max(1, several(run)))
        ]  # fmt: skip
        # Processes that help another come last, for idle cores.
        points.sort(key=lambda point: bool(point.get("share")))
        return sweep.sweep(
            paths.NOTEBOOKS / "train_population.ipynb", {}, {}, listed=points, jobs=jobs,
            force=True,  # a point that was done is not skipped: its population has gone
            engine=engine, writes=[run.directory for _, run in wave],
        )  # fmt: skip

    with _member_bar([run for _, run in wave]):
        if not engine.locks:  # nothing else would keep two from training the same trajectory
            apart = {run.directory: independent(run) for _, run in wave if independent(run) > 1}
            if apart:
                say(sweep_of(lambda run: apart.get(run.directory, 0), "trajectory"))
            wave = [pair for pair in wave if not population.is_complete(pair[1])]
        at_once = jobs if jobs is not None and engine.locks else 1
        table = sweep_of(lambda run: min(at_once, independent(run)), "share")
    try:
        say(table)
    except RuntimeError:  # of processes that share a population one may fail: others finish it
        if not all(population.is_complete(run) for _, run in wave):
            raise


def say(table: pd.DataFrame) -> None:
    """Print what came of each point of a sweep; RuntimeError if one failed."""
    for row in table.itertuples():
        word = {"skipped": "still valid, reused", "done": f"done in {row.seconds:.0f} s"}
        status = str(row.status)
        print(f"     {Path(str(row.output)).stem}: {word.get(status, f'{status}: {row.reason}')}")
    failed = table[~table.status.isin(["done", "skipped"])]
    if len(failed):
        raise RuntimeError(f"{len(failed)} of {len(table)} failed: {failed.reason.iloc[0]}")


def independent(run: config.Run) -> int:
    """How many of a run's trajectories can be trained at the same time."""
    return 1 if run.method.teacher == "previous_member" else run.trajectories


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
    """What each run is for, what it needs, and what it took as far as it is trained.

    What two runs share (a prefix, in one directory) is charged to the first of them.

    Columns: part, label, method, seed, epochs; charged (epochs that are not charged above), tokens
    and flops (of training those, foretold); done; trained (of the epochs charged) and hours (that
    took, of training on one device, which on a CPU is one core); run, overrides.
    """
    rows, charged = [], dict[tuple[Path, int], int]()
    for each, run in found:
        need = estimate(run)
        cycles = trained = 0
        seconds = 0.0
        for index in range(run.trajectories):
            before = charged.get((run.directory, index), 0)
            charged[run.directory, index] = max(before, run.cycles)
            clock = [0.0, *_train_seconds(run, index)]
            cycles += max(0, run.cycles - before)
            trained += max(0, len(clock) - 1 - before)
            seconds += max(0.0, clock[-1] - clock[min(before, len(clock) - 1)])
        share = cycles / (run.trajectories * run.cycles)
        tau = run.method.epochs_per_cycle
        rows.append(
            {"part": each.part, "label": each.label, "method": each.method, "seed": run.seed,
             "epochs": run.epochs, "charged": cycles * tau, "tokens": share * need["tokens"],
             "flops": share * need["flops"], "done": population.is_complete(run),
             "trained": trained * tau, "hours": seconds / 3600,
             "run": f"{run.preset}/{run.directory.name}", "overrides": " ".join(each.overrides)}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _train_seconds(run: config.Run, trajectory: int) -> list[float]:
    """Seconds of training up to each snapshot of a trajectory that is there."""
    seconds = []
    for cycle in range(run.cycles):
        path = population.member_path(run.directory, trajectory, cycle)
        if not path.exists():
            break
        seconds.append(float(population.read_record(path)["train_seconds"]))
    return seconds


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """A `cost_table` by part, and in all: runs, how many are done, epochs, tokens and FLOPs that
    the part needs, epochs trained so far, and the hours they took."""
    parts = table.groupby("part", sort=False).agg(
        runs=("done", "size"), done=("done", "sum"), epochs=("charged", "sum"),
        tokens=("tokens", "sum"), flops=("flops", "sum"), trained=("trained", "sum"),
        hours=("hours", "sum"),
    )  # fmt: skip
    return pd.concat([parts, parts.sum().to_frame("all").T.rename_axis("part")])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib.study.runs", __doc__)
    parser.add_argument("--preset", default="cpu", help="default: cpu")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help=f"default: 0 1 2; the first alone is trained for the parts {', '.join(ONE_SEED)}",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        help=f"of {', '.join((*PARTS, *STUDENTS, DOWNSTREAM, POWER))}; "
        "by default all but the last four",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        help="runs at a time (default 2, on Ray as many as there is room for)",
    )
    parser.add_argument("--train", action="store_true", help="train what is missing")
    engines.add_arguments(parser)
    given = parser.parse_args(argv)

    def work() -> None:
        engine = engines.chosen(vars(given))
        experiments = plan.experiments(given.preset, given.parts)
        if given.train:
            train(experiments, given.preset, given.seeds, given.jobs, engine)
        if not experiments:
            parts = ", ".join(given.parts)
            raise ValueError(f"preset {given.preset} has no runs in the parts {parts}")
        table = cost_table(runs_of(experiments, given.preset, given.seeds))
        columns = ["part", "label", "seed", "epochs", "charged", "trained", "done", "hours"]
        print(table[columns].to_string(index=False, float_format="%.3g"))
        print(f"\n{summarise(table).round(2).to_string()}")

    return command.status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
