"""The quick study in one command: train, weigh, compare, draw.

    python -m q0lib.study
    python -m q0lib.study --seeds 0 1 2 --jobs 4

What is trained or executed already, and still valid, is reused.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from q0lib import paths, presets
from q0lib.study import plan, runs
from q0lib.study.tables import multipliers, store
from q0lib.sweeps import sweep

METHODS = ("q0", "ensemble", "distilled_ensemble")


def run_study(preset: str, seeds: Sequence[int], jobs: int, out: Path) -> None:
    """Train the populations of a preset, execute the two notebooks, and print what came out.

    Raises:
        ValueError, RuntimeError, sweep.Interrupted: as `campaign.train`.
    """
    planned = plan.experiments(preset, ["main"], METHODS)
    print(f"1/2  training {len(planned) * len(seeds)} populations")
    found = runs.train(planned, preset, seeds, jobs)
    print("2/2  notebooks")
    finished = sorted({run.directory / "result.json" for _, run in found})
    study = presets.load(preset, seed=seeds[0])
    parts: dict[str, dict[str, Any]] = {
        "00_quickstart": {"seed": seeds[0], "epochs": study.epochs},
        "04_epoch_efficiency": {
            "seeds": list(seeds), "methods": list(METHODS), "recompute": True,
        },
    }  # fmt: skip
    for name, parameters in parts.items():
        given = {"preset": preset, "out": str(out), **parameters}
        notebook = paths.NOTEBOOKS / f"{name}.ipynb"
        # What lies there is of the last call, perhaps with other seeds: forced, it is written anew.
        runs.say(sweep.sweep(notebook, given, {}, out=out / name, inputs=finished, force=True))
    print(f"\nfigures, tables  {_shown(out)}\nnotebooks        {_shown(out)}/*/*.ipynb\n")
    ours = store.read(out / "epoch_multipliers.csv", protocol=["clean"])
    print(multipliers.sentence(ours))


def _shown(path: Path) -> Path:
    return path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path


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
    status = runs.exit_status(
        parser.prog, lambda: run_study(given.preset, given.seeds, given.jobs, out)
    )
    if not status:
        print(f"{time.monotonic() - began:.0f} s")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
