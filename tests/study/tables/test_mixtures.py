"""Tables from populations whose numbers are known."""

import dataclasses

import numpy as np
import pytest
from tiny import made, tiny_study

from q0lib import ensemble, prior
from q0lib.study.tables import epoch_efficiency, learned_prior, mixtures


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
def test_budgets_are_prefixes():
    q0 = made(tiny_study().run("q0", 16), 8)
    table = epoch_efficiency.rows(q0, [2, 3, 8, 16, 32], [1, 4])
    assert sorted(table.epochs.unique()) == [2, 8, 16], "what the run does not contain is left out"
    part = table[(table.epochs == 8) & (table.choice == "uniform")].iloc[0]
    assert part.k == 4
    assert part.test == pytest.approx(-np.log(q0.P["test"][:4].mean(0)).mean(), abs=1e-6)
    assert table.groupby("epochs").best_k.sum().tolist() == [1, 1, 1]
    for k in (0, 9, True, 2.5):
        with pytest.raises(ValueError, match=rf"K must be in 1\.\.8, got {k}"):
            epoch_efficiency.table([q0], [8], [k])
    assert table[(table.epochs == 16) & (table.choice == "truncate")].k.tolist() == [1, 2, 4, 8]
    base = made(tiny_study().run("ensemble", 8), 4)
    table = epoch_efficiency.rows(base, [2, 4, 8])
    assert table[table.choice == "uniform"].k.tolist() == [1, 2, 4]
    with pytest.raises(ValueError, match=r"no budget of \[3\] is part of q0 at 16 epochs"):
        epoch_efficiency.table([q0], [3], [1])


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_every_number_of_trajectories_is_read_off_its_prefix():
    q0 = made(tiny_study(0, "q0.trajectories=2").run("q0", 16), 8)  # 2 x 4 cycles of 2 epochs
    longer = made(tiny_study().run("q0", 16), 8)  # 1 x 8
    assert epoch_efficiency.table([q0], [6], [1]).trajectories.unique().tolist() == [1]
    table = epoch_efficiency.table([q0, longer], [4, 8, 16], [1])
    held = table[table.choice == "uniform"][["trajectories", "epochs", "k"]]
    assert held.to_numpy().tolist() == [
        [1, 4, 2], [1, 8, 4], [2, 4, 2], [2, 8, 4], [2, 16, 8], [1, 16, 8],
    ]  # fmt: skip
    wide = table[(table.trajectories == 2) & (table.epochs == 8) & (table.choice == "uniform")]
    mixed = q0.P["test"][[0, 1, 4, 5]].mean(0)
    assert wide.test.item() == pytest.approx(-np.log(mixed).mean(), abs=1e-6)


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


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_prior_tables_are_consistent(monkeypatch):
    runs = [tiny_study(seed).run("q0", 16) for seed in (0, 1)]
    populations = {run.seed: made(run, 8, seed=run.seed) for run in runs}
    monkeypatch.setattr(learned_prior, "load", lambda run: populations[run.seed])
    with pytest.raises(ValueError, match=r"K must be in 1\.\.8, got 99"):
        learned_prior.tables(runs, [1, 99], [200], k=2)
    with pytest.raises(ValueError, match=r"K must be in 1\.\.8, got True"):
        learned_prior.tables(runs, [1], [200], k=True)
    tables = learned_prior.tables(runs, [1, 2, 4, 8], [200], k=2)
    assert list(tables) == list(learned_prior.TABLES)
    assert all(table.seed.unique().tolist() == [0, 1] for table in tables.values())
    fits = tables["prior_fits"].set_index(["seed", "fit"])
    assert (fits.gap >= 0).all()
    for seed in (0, 1):
        assert fits.nll[seed, "exact"] <= fits.nll[seed, "adamw"] + 1e-6
        weights = tables["prior_weights"].query("seed == @seed").weight.to_numpy()
        nll = ensemble.mixture_nll(weights, populations[seed].P["fitness"])
        assert nll == pytest.approx(fits.nll[seed, "exact"])
    choices = tables["prior_choices"].set_index(["seed", "choice", "k"])
    assert choices.behind_all[0, "greedy", 8] == 0
    assert choices.behind_all[0, "greedy", 2] == pytest.approx(
        choices.test[0, "greedy", 2] - choices.test[0, "greedy", 8]
    )
    assert choices.flops_per_token[0, "greedy", 8] == 8 * choices.flops_per_token[0, "greedy", 1]
    held_out = tables["prior_cross_validation"]
    assert held_out.groupby("seed").chosen.sum().tolist() == [1, 1]
    sizes = tables["prior_fitness_size"]
    assert sorted(sizes.tokens.unique()) == [200, 600]
    flat = sizes[(sizes.seed == 0) & (sizes.choice == "uniform")].loss
    assert flat.nunique() == 1, "uniform weights need no fitness text"
