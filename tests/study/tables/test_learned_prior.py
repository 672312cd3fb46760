"""The tables of the notebook on the prior."""

import pytest
from tiny import made, tiny_study

from q0lib import ensemble
from q0lib.study.tables import learned_prior


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
