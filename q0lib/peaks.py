"""Peaks of memory, measured: of training, and of reading a population of whatever size.

Each is measured by a process of its own, so that nothing else is in it.
"""

import dataclasses
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
import torch
from tokenizers.models import BPE

from q0lib import config, corpus, ensemble, population, presets, runtime, train
from q0lib.trajectory import SPENT

T = TypeVar("T")
FITNESS = 131_072  # tokens, as the paper has
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32",
         "methods.batch_tokens=256"]  # fmt: skip


def noise(run: config.Run, **held_out: int) -> corpus.Text:
    """Random tokens in place of a run's corpus: two batches, or as many as a split is given."""
    rng = np.random.default_rng(0)
    size = max(run.method.batch_tokens, 16 * run.model.context) * 2
    splits = {}
    for name in corpus.SPLITS:
        tokens = rng.integers(run.model.vocab_size, size=held_out.get(name, size), dtype=np.uint32)
        splits[name] = corpus.Split(name, tokens, np.array([0]), "noise")
    return corpus.Text(run.corpus, splits, run.model.vocab_size, tokenizers.Tokenizer(BPE()))


def training(run: config.Run) -> float:
    """Bytes that training takes at its peak beyond what the process held before.

    A few steps on random tokens, the snapshot after them, and where members teach a cycle with a
    teacher: on a CPU the resident set, elsewhere what PyTorch has reserved.
    """
    return _alone(_training, run)


def _training(run: config.Run) -> float:
    small = presets.load("quick", overrides=SMALL).run("q0")
    how = dataclasses.replace(run.runtime, micro_batch=0, compile=False)
    _train(dataclasses.replace(small, precision=run.precision, runtime=how))  # loads what it calls
    device = runtime.device(run.runtime.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_reserved(device)
        _train(run)
        return float(torch.cuda.max_memory_reserved(device) - held)
    before = _resident()
    _train(run)
    return _resident() - before


def _train(run: config.Run) -> None:
    chain = run.method.teacher == "chain"
    method = dataclasses.replace(
        run.method, epochs_per_cycle=1.0, edge_batch_tokens=0, distill_after=1
    )
    short = dataclasses.replace(run, method=method, trajectories=1, cycles=1 + chain)
    with tempfile.TemporaryDirectory() as folder:
        train.train_population(short, noise(run), directory=Path(folder), progress=False)


def simulated(directory: Path, members: int, tokens: int) -> None:
    """Write a run directory of so many members, as training would, with made-up rows: `FITNESS`
    tokens of fitness text and so many of test."""
    run = dataclasses.replace(presets.load("quick").run("q0"), trajectories=1, cycles=members)
    text = noise(run, fitness=FITNESS + 1, test=tokens + 1)
    population.open_directory(run, directory, text)
    rng = np.random.default_rng(0)
    row = {}
    for name in corpus.HELD_OUT:
        scored = corpus.held_out_rows(text[name].tokens, run.model.context) * run.model.context
        row[name] = -rng.gamma(2.0, 1.5, scored).astype(np.float32)
    record = {"trajectory": 0, "epochs": 1.0, **dict.fromkeys(SPENT, 1.0),
              "fingerprints": text.fingerprints, "commit": "none"}  # fmt: skip
    for cycle in range(members):
        rows = {name: torch.from_numpy(np.roll(values, cycle)) for name, values in row.items()}
        rows["fitness"] = torch.from_numpy(-rng.gamma(2.0, 1.5, len(row["fitness"]))).float()
        path = population.member_path(directory, 0, cycle)
        population.write_member(path, rows, record | {"cycle": cycle})
    population.write_result(run, directory)


def reading(directory: Path, members: int) -> tuple[float, float, float, float]:
    """Seconds to open so many members of a run directory, to fit their weights, and to mix them on
    test; and the process's peak in bytes, PyTorch included."""
    return _alone(_reading, directory, members)


def _reading(directory: Path, members: int) -> tuple[float, float, float, float]:
    clock = [time.perf_counter()]
    opened = population.Population.open(directory, cycles=members)
    clock.append(time.perf_counter())
    weights = opened.fitted().weights
    clock.append(time.perf_counter())
    everyone = 0.5 * weights + 0.5 / len(weights)  # a fit may leave most of them out
    ensemble.mixture_nll(everyone, opened.P["test"])
    clock.append(time.perf_counter())
    opening, fitting, mixing = np.diff(clock).tolist()
    return opening, fitting, mixing, _resident()


def _resident() -> float:
    """The largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # there ru_maxrss would include what the parent had used
        return 1024.0 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    import resource  # not on every system

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1.0 if sys.platform == "darwin" else 1024.0
    )


def _alone(work: Callable[..., T], *given: Any) -> T:
    """What `work(*given)` returns, in a process of its own on one thread."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begun) as alone:
        return alone.submit(work, *given).result()


def _begun() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
