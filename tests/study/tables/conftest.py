"""A fixture that the tests of tables share."""

import pytest
from tiny import made, tiny_study

from q0lib import population
from q0lib.study.plan import FULL, Experiment


@pytest.fixture
def found(monkeypatch):
    """The full recipe and a variant with longer cycles, two seeds each."""
    pairs, populations = [], {}
    for seed in (0, 1):
        for label, change in ((FULL, ()), ("slow", ("q0.epochs_per_cycle=4",))):
            run = tiny_study(seed, *change).run("q0", 32)
            pairs.append((Experiment("ablation", label, "q0", 32, change), run))
            populations[run.directory] = made(run, run.cycles, seed=seed + 7 * len(change))
    monkeypatch.setattr(population, "load", lambda run: populations[run.directory])
    return pairs
