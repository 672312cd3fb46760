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

import pandas as pd
from tqdm import tqdm

from q0lib import config, paths, population, results, sweep

METHODS = ("q0", "ensemble", "distilled_ensemble")


def run_study(preset: str, seeds: Sequence[int], jobs: int, out: Path) -> bool:
    """Train the populations of a preset, execute the two notebooks, and print what came out.

    Returns whether all of it worked.

    Raises:
        ValueError: an unknown preset or a bad seed, before anything runs.
        sweep.Interrupted: after Ctrl-C, with everything saved.
    """
    studies = [config.preset(preset, seed=seed) for seed in seeds]
    epochs = studies[0].epochs
    runs = [study.run(method) for study in studies for method in METHODS]
    print(f"1/2  training {len(runs)} populations of {epochs} epochs, {jobs} at a time")
    with _member_bar(runs):
        trained = sweep.sweep(
            paths.NOTEBOOKS / "train_population.ipynb",
            {"preset": preset, "epochs": epochs},
            {"seed": list(seeds), "method": list(METHODS)},
            jobs=jobs,
        )
    if not _said(trained):
        return False
    print("2/2  notebooks")
    finished = [run.directory / "result.json" for run in runs]
    parts = {
        "00_quickstart": {"preset": preset, "seed": seeds[0], "epochs": epochs, "out": str(out)},
        "04_epoch_efficiency": {
            "preset": preset, "seeds": list(seeds), "methods": list(METHODS), "recompute": True,
            "out": str(out),
        },
    }  # fmt: skip
    for name, parameters in parts.items():
        table = sweep.sweep(
            paths.NOTEBOOKS / f"{name}.ipynb", parameters, {}, out=out / name, inputs=finished
        )
        if not _said(table):
            return False
    print(f"\nfigures, tables  {_shown(out)}\nnotebooks        {_shown(out)}/*/*.ipynb\n")
    print(results.multiplier_sentence(results.read(out / "epoch_multipliers.csv")))
    return True


def _said(table: pd.DataFrame) -> bool:
    """Print what came of each point of a sweep; whether none failed."""
    for row in table.itertuples():
        name = Path(str(row.output))
        word = {"skipped": "still valid, reused", "done": f"done in {row.seconds:.0f} s"}
        print(f"     {name.stem}: {word.get(str(row.status), f'{row.status}: {row.reason}')}")
    return set(table.status) <= {"done", "skipped"}


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
        worked = run_study(given.preset, given.seeds, given.jobs, out)
    except sweep.Interrupted:
        print("stopped; what was trained is saved, run it again to go on")
        return 130
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if worked else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
