"""The quick study in one command: train, weigh, compare, draw.

    python -m q0lib.study
    python -m q0lib.study --seeds 0 1 2 --jobs 4

What is trained or executed already, and still valid, is reused.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from q0lib import config, paths, population, results, sweep

METHODS = ("q0", "ensemble", "distilled_ensemble")


def train(
    preset: str, seeds: Sequence[int], methods: Sequence[str], epochs: float, jobs: int = 2
) -> list[config.Run]:
    """Train populations through the notebook that sweeps run, `jobs` at a time; return their runs.

    What is complete already is reused.

    Raises:
        ValueError: an unknown preset or method, a bad seed or budget, before anything runs.
        RuntimeError: a population failed; says which, and why.
    """
    return train_points(
        [
            {"preset": preset, "method": method, "seed": seed, "epochs": float(epochs),
             "overrides": []}
            for seed in seeds
            for method in methods
        ],
        jobs,
    )  # fmt: skip


def train_points(points: Sequence[dict[str, Any]], jobs: int = 2) -> list[config.Run]:
    """Train the populations of `points`, sets of parameters of the notebook that sweeps run.

    A point is what `config.preset` and `Study.run` take: preset, seed, overrides, method, epochs.
    Complete populations are reused. Returns the runs, in the order of the points.

    Raises:
        ValueError, RuntimeError: as `train`.
    """
    runs = [
        config.preset(point["preset"], seed=point["seed"], overrides=point["overrides"]).run(
            point["method"], point["epochs"]
        )
        for point in points
    ]
    missing = [not population.is_complete(run) for run in runs]
    if reused := len(points) - sum(missing):
        print(f"     complete already, reused: {reused} of {len(points)} populations")
    if any(missing):
        with _member_bar(runs):
            trained = sweep.sweep(
                paths.NOTEBOOKS / "train_population.ipynb",
                {},
                {},
                listed=[point for point, lacks in zip(points, missing, strict=True) if lacks],
                jobs=jobs,
                force=True,  # a point that was done is not skipped: its population has gone
            )
        _say(trained)
    return runs


def run_study(preset: str, seeds: Sequence[int], jobs: int, out: Path) -> None:
    """Train the populations of a preset, execute the two notebooks, and print what came out.

    Raises:
        ValueError, RuntimeError: as `train`.
        sweep.Interrupted: after Ctrl-C, with everything saved.
    """
    study = config.preset(preset, seed=seeds[0])
    budgets = results.budgets_of(study)
    print(f"1/2  training {len(METHODS) * len(seeds)} populations of {max(budgets):g} epochs")
    runs = train(preset, seeds, METHODS, max(budgets), jobs)
    print("2/2  notebooks")
    finished = [run.directory / "result.json" for run in runs]
    parts: dict[str, dict[str, Any]] = {
        "00_quickstart": {"seed": seeds[0], "epochs": max(budgets)},
        "04_epoch_efficiency": {
            "seeds": list(seeds), "epoch_budgets": budgets, "methods": list(METHODS),
            "recompute": True,
        },
    }  # fmt: skip
    for name, parameters in parts.items():
        given = {"preset": preset, "out": str(out), **parameters}
        notebook = paths.NOTEBOOKS / f"{name}.ipynb"
        _say(sweep.sweep(notebook, given, {}, out=out / name, inputs=finished))
    print(f"\nfigures, tables  {_shown(out)}\nnotebooks        {_shown(out)}/*/*.ipynb\n")
    print(results.multiplier_sentence(results.read(out / "epoch_multipliers.csv")))


def _say(table: pd.DataFrame) -> None:
    """Print what came of each point of a sweep; RuntimeError if one failed."""
    for row in table.itertuples():
        word = {"skipped": "still valid, reused", "done": f"done in {row.seconds:.0f} s"}
        status = str(row.status)
        print(f"     {Path(str(row.output)).stem}: {word.get(status, f'{status}: {row.reason}')}")
    failed = table[~table.status.isin(["done", "skipped"])]
    if len(failed):
        raise RuntimeError(f"{len(failed)} of {len(table)} failed: {failed.reason.iloc[0]}")


def _shown(path: Path) -> Path:
    return path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path


@contextmanager
def _member_bar(runs: Sequence[config.Run]) -> Iterator[None]:
    """A bar of the snapshots that training leaves, counted in the run directories."""
    members = [
        population.member_path(run.directory, trajectory, cycle)
        for run in runs
        for trajectory in range(run.trajectories)
        for cycle in range(run.cycles)
    ]
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status: 0, 1 on a failure, 2 on bad usage, 130."""
    parser = argparse.ArgumentParser(
        prog="python -m q0lib.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="quick", help="default: quick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    parser.add_argument("--jobs", type=int, default=2, help="populations at a time (default 2)")
    parser.add_argument("--out", type=Path, help="default: data/runs/study/<preset>")
    given = parser.parse_args(argv)
    began = time.monotonic()
    out = (given.out or paths.RUNS / "study" / given.preset).resolve()
    try:
        run_study(given.preset, given.seeds, given.jobs, out)
    except sweep.Interrupted:
        print("stopped; what was trained is saved, run it again to go on")
        return 130
    except RuntimeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
