"""The quick study in one command: train, weigh, compare, draw.

    python -m q0lib.study
    python -m q0lib.study --seeds 0 1 2 --jobs 4

What is trained or executed already, and still valid, is reused.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from q0lib import command, files, paths, presets
from q0lib.study import plan, runs
from q0lib.study.tables import multipliers, store
from q0lib.sweeps import engines, notebook, sweep

METHODS = ("q0", "ensemble", "distilled_ensemble")
MADE = ("*.csv", "*.png", "*.pdf", "*.svg", "*/*.ipynb")  # what the notebooks leave


def run_study(
    preset: str,
    seeds: Sequence[int],
    jobs: int | None,
    out: Path,
    engine: engines.Engine = engines.THIS_MACHINE,
) -> None:
    """Train the populations of a preset, execute the two notebooks, and print what came out.

    `<out>/study.json` says what was made of what. While both are as they were, nothing is executed.

    Raises:
        ValueError, RuntimeError, sweep.Interrupted: as `runs.train`.
    """
    planned = plan.experiments(preset, ["main"], METHODS)
    print(f"1/2  training {len(planned) * len(seeds)} populations")
    found = runs.train(planned, preset, seeds, jobs, engine)
    print("2/2  notebooks")
    finished = sorted({run.directory / "result.json" for _, run in found})
    study = presets.load(preset, seed=seeds[0])
    parts: dict[Path, dict[str, Any]] = {
        paths.NOTEBOOKS / "00_quickstart.ipynb": {"seed": seeds[0], "epochs": study.epochs},
        paths.NOTEBOOKS / "04_epoch_efficiency.ipynb": {
            "seeds": list(seeds), "methods": list(METHODS), "recompute": True,
        },
    }  # fmt: skip
    for parameters in parts.values():
        parameters |= {"preset": preset, "out": str(out)}
    manifest = out / "study.json"
    keys = [sweep.point_key(notebook.read(path), given, finished) for path, given in parts.items()]
    if _read(manifest) == {"keys": keys, "made": _made(out)}:
        print("     still valid, reused")
    else:
        # What lies there may be of other seeds: forced, it is written anew.
        manifest.unlink(missing_ok=True)
        for path, given in parts.items():
            made = sweep.sweep(
                path, given, {}, out=out / path.stem, inputs=finished, force=True, engine=engine,
                writes=[out],
            )  # fmt: skip
            runs.say(made)
        files.write_text(manifest, json.dumps({"keys": keys, "made": _made(out)}, indent=1))
    print(f"\nfigures, tables  {_shown(out)}\nnotebooks        {_shown(out)}/*/*.ipynb\n")
    ours = store.read(out / "epoch_multipliers.csv", protocol=["clean"])
    print(multipliers.sentence(ours))


def _read(manifest: Path) -> Any:
    try:
        return json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _made(out: Path) -> dict[str, str]:
    """The SHA-256 of every table, figure and executed notebook in `out`."""
    found = sorted(path for pattern in MADE for path in out.glob(pattern))
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def _shown(path: Path) -> Path:
    return path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib.study", __doc__)
    parser.add_argument("--preset", default="quick", help="default: quick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    parser.add_argument(
        "--jobs",
        type=int,
        help="populations at a time (default 2, on Ray as many as there is room for)",
    )
    parser.add_argument("--out", type=Path, help="default: data/runs/study/<preset>")
    engines.add_arguments(parser)
    given = parser.parse_args(argv)
    began = time.monotonic()
    out = (given.out or paths.RUNS / "study" / given.preset).resolve()

    def work() -> None:
        engine = engines.chosen(vars(given))
        run_study(given.preset, given.seeds, given.jobs, out, engine)
        print(f"{time.monotonic() - began:.0f} s")

    return command.status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
