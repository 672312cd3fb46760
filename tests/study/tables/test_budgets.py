"""What a budget is spent on, from populations whose numbers are known."""

import dataclasses

import numpy as np
import pytest
from tiny import made, tiny_study

from q0lib import population
from q0lib.study.plan import FULL, Experiment
from q0lib.study.tables import budgets

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")


def test_small_budgets_have_a_row_each(found):
    table = budgets.small(found)
    assert table.spent_on.tolist() == [FULL, "slow"] * 2
    assert (table.learned < table.snapshot).all()
    assert (table.mixed == table.learned).all()
    alike = dataclasses.replace(found[0][1].method, mixture="uniform")
    alike = dataclasses.replace(found[0][1], method=alike)  # of the same directory
    apart = budgets.small([(found[0][0], alike)]).iloc[0]
    P = population.load(found[0][1]).P
    assert apart.mixed == pytest.approx(-np.log(P["test"].mean(0)).mean(), abs=1e-6)
    assert apart.mixed_validation == pytest.approx(
        -np.log(P["validation"].mean(0)).mean(), abs=1e-6
    )


def test_splits_are_uniform_mixtures_of_their_first_members(monkeypatch):
    run = tiny_study().run("ensemble", 8)
    whole = made(run, 4)
    monkeypatch.setattr(population, "load", lambda run: whole)
    table = budgets.splits([(Experiment("splits", "4 x 2", "ensemble", 8), run)])
    assert table.total.tolist() == [2, 4, 6, 8]
    assert table.test[2] == pytest.approx(-np.log(whole.P["test"][:3].mean(0)).mean(), abs=1e-6)
