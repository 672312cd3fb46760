"""What mixtures lose, from populations whose numbers are known."""

import dataclasses

import numpy as np
import pytest
from tiny import made, tiny_study

from q0lib import ensemble, prior
from q0lib.study.tables import mixtures


def test_selections_are_the_mixtures_they_name():
    run = tiny_study().run("q0", 16)
    population = made(run, 8)
    with pytest.warns(UserWarning, match="tokens"):
        papers = prior.fit_prior(population.P["fitness"], "adamw")
    choices = ["truncate", "lowest", "uniform"]
    table = mixtures.selections(population, [1, 4, 8, 20], choices, papers)
    assert sorted(table.k.unique()) == [1, 4, 8]
    row = table[(table.choice == "lowest") & (table.k == 4)].iloc[0]
    weights = prior.select(population.P["fitness"], 4, "lowest").weights
    assert row.test == pytest.approx(ensemble.mixture_nll(weights, population.P["test"]))
    everyone = table[(table.choice == "uniform") & (table.k == 8)].iloc[0]
    assert everyone.test == pytest.approx(-np.log(population.P["test"].mean(0)).mean(), abs=1e-6)
    assert everyone.flops == 80.0


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_k_is_chosen_without_validation_or_test():
    """One good member among poor ones: with the paper's weights two beat one and eight."""
    population = made(tiny_study().run("q0", 16), 8)
    P = population.P["fitness"].copy()
    P[:6] *= 1e-3
    blind = dataclasses.replace(population, P={"fitness": P}, documents=population.documents)
    assert mixtures.chosen_k(blind, [1, 2, 8]) == 2
    assert mixtures.chosen_k(blind, [1, 8]) == 8
    assert mixtures.chosen_k(blind, [8, 9]) == 8
    for k in (0, True, 2.5):
        with pytest.raises(ValueError, match=rf"K must be in 1\.\.8, got {k}"):
            mixtures.chosen_k(blind, [k, 8])


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_snapshot_curve_ends_at_the_whole_mixture():
    population = made(tiny_study().run("q0", 8), 4)
    curve = mixtures.snapshot_curve(population)
    fit = prior.fit_prior(population.P["fitness"])
    assert curve.mixture.iloc[-1] == pytest.approx(
        ensemble.mixture_nll(fit.weights, population.P["test"])
    )
    assert curve.member.tolist() == population.members.test_loss.tolist()
