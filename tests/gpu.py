"""Train, resume and measure on the device that DEVICE names; one table; status 0 if all is well.

The quick study's runs must lose what they lose on the CPU (the committed table), a run that was
stopped must end with the bits of one that was not, and the bench must run to its end.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from q0lib import config, corpus, ensemble, memory, paths, population, presets, runtime, train
from q0lib.study.tables import store

DEVICE = os.environ.get("DEVICE", "cuda")
TOLERANCE = 0.03  # nats; dropout draws other units on another device, and seeds differ by 0.01
STOP_AT = 50  # step of 128, within a cycle that has a teacher


def quick(method: str, epochs: int, *changes: str) -> config.Run:
    overrides = [f"runtime.device={DEVICE}", *changes]
    return presets.load("quick", overrides=overrides).run(method, epochs)


def losses(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """The quick study's runs, all members alike, beside those that a CPU has trained."""
    table = paths.RESULTS / "quick" / "epoch_efficiency.csv"
    for method in ("q0", "ensemble", "distilled_ensemble"):
        run = quick(method, 48)
        found = train.train_population(run, directory=folder / method)
        loss = ensemble.mixture_nll(np.full(len(found), 1 / len(found)), found.P["test"])
        asked = {"method": [method], "seed": [0], "epochs": [48], "choice": ["uniform"]}
        theirs = store.read(table, **asked).query(f"k == {len(found)}").test.item()
        words = f"{loss:.4f} nats, on a CPU {theirs:.4f}"
        yield f"loss of {method}", words, abs(loss - theirs) < TOLERANCE


def resumed(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Deterministic kernels: a run that is stopped and goes on, against one that is not."""
    torch.use_deterministic_algorithms(True)
    run = memory.fitted(quick("q0", 8, "q0.distill_after=1"))
    text = corpus.load(run.corpus)
    whole = train.train_population(run, text, directory=folder / "whole")
    steps = itertools.count(1)
    try:
        population.open_directory(run, folder / "parts", text)
        with runtime.threads(run.runtime.threads):
            train.train_trajectory(
                run, 0, text, folder / "parts", lambda: next(steps) == STOP_AT, tqdm(disable=True)
            )
    except train.Stopped:
        parts = train.train_population(run, text, directory=folder / "parts")
        same = all(np.array_equal(whole.P[split], parts.P[split]) for split in corpus.HELD_OUT)
        yield "resumed after a stop", "the same bits" if same else "other bits", same
    else:
        yield "resumed after a stop", "it did not stop", False
    torch.use_deterministic_algorithms(False)


def benched(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """The bench of the largest preset that the device is meant for."""
    preset = "quick" if DEVICE == "cpu" else "gpu"
    task = [sys.executable, "-m", "q0lib.bench", "--preset", preset, "--seconds", "1"]
    status = subprocess.run(task, cwd=paths.ROOT).returncode
    yield f"bench of preset {preset}", f"printed above, status {status}", status == 0


def main() -> int:
    where = runtime.device(DEVICE)
    print(torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU", torch.__version__)
    rows = []
    for step in (losses, resumed, benched):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            for name, said, well in step(Path(folder)):
                rows.append((name, said, well, time.perf_counter() - started))
                started = time.perf_counter()
    print(f"\non {where}")
    for name, said, well, took in rows:
        print(f"{name:<30}{said:<40}{'ok' if well else 'FAILED':<8}{took:>5.0f} s")
    return 0 if all(well for _, _, well, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
