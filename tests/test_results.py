"""Tables from populations whose numbers are known."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from conftest import made, tiny_study

from q0lib import efficiency, ensemble, prior, results


def test_selections_are_the_mixtures_they_name():
    run = tiny_study().run("q0", 16)
    population = made(run, 8)
    with pytest.warns(UserWarning, match="tokens"):
        table = results.selections(population, [1, 4, 8, 20], ["truncate", "lowest", "uniform"])
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
    table = results.budget_rows(q0, [2, 3, 8, 16, 32], [1, 4])
    assert sorted(table.epochs.unique()) == [2, 8, 16], "what the run does not contain is left out"
    part = table[(table.epochs == 8) & (table.choice == "uniform")].iloc[0]
    assert part.k == 4
    assert part.test == pytest.approx(-np.log(q0.P["test"][:4].mean(0)).mean(), abs=1e-6)
    assert table.groupby("epochs").best_k.sum().tolist() == [1, 1, 1]
    for k in (0, 9):
        with pytest.raises(ValueError, match=rf"K must be in 1\.\.8, got {k}"):
            results.budget_table([q0], [8], [k])
    base = made(tiny_study().run("ensemble", 8), 4)
    table = results.budget_rows(base, [2, 4, 8])
    assert table[table.choice == "uniform"].k.tolist() == [1, 2, 4]
    with pytest.raises(ValueError, match=r"no budget of \[3\] is part of q0 at 16 epochs"):
        results.budget_rows(q0, [3], [1])


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_every_number_of_trajectories_is_read_off_its_prefix():
    q0 = made(tiny_study(0, "q0.trajectories=2").run("q0", 16), 8)  # 2 x 4 cycles of 2 epochs
    longer = made(tiny_study().run("q0", 16), 8)  # 1 x 8
    table = results.budget_table([q0, longer], [4, 8, 16], [1])
    held = table[table.choice == "uniform"][["trajectories", "epochs", "k"]]
    assert held.to_numpy().tolist() == [
        [1, 4, 2], [1, 8, 4], [2, 4, 2], [2, 8, 4], [2, 16, 8], [1, 16, 8],
    ]  # fmt: skip
    wide = table[(table.trajectories == 2) & (table.epochs == 8) & (table.choice == "uniform")]
    mixed = q0.P["test"][[0, 1, 4, 5]].mean(0)
    assert wide.test.item() == pytest.approx(-np.log(mixed).mean(), abs=1e-6)


def test_trajectories_are_chosen_on_validation_over_seeds_and_by_the_paper_on_test():
    rows = pd.DataFrame(
        [
            {"method": "q0", "seed": seed, "epochs": 8, "trajectories": n, "choice": "truncate",
             "k": k, "best_k": k == 4, "flops": 1.0, "validation": validation, "test": test}
            for seed in (0, 1)
            for n, k, validation, test in [
                (1, 4, 4.0, 4.5), (1, 2, 4.2, 4.6), (2, 4, 4.1, 4.3), (2, 2, 4.3, 4.2),
            ]
        ]
    )  # fmt: skip
    alone = rows.iloc[:1].assign(trajectories=3, validation=3.0, test=3.0)  # of one seed only
    table = pd.concat([rows, alone], ignore_index=True)
    clean = results.epoch_curves(table, [2]).set_index(["method", "seed"])
    assert clean.trajectories.unique().tolist() == [1]
    assert clean.loss["q0", 0] == 4.5
    assert clean.loss["q0_k2", 1] == 4.6
    paper = results.epoch_curves(table, [2], "paper").set_index(["method", "seed"])
    assert paper.loss["q0", 1] == 4.2
    assert paper.k["q0", 1] == 2
    assert paper.trajectories["q0_k2", 0] == 2


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_document_losses_add_up_and_widen_the_interval():
    q0 = [made(tiny_study(seed).run("q0", 16), 8, seed=seed) for seed in (0, 1)]
    base = [made(tiny_study(seed).run("ensemble", 8), 4, seed=9 + seed) for seed in (0, 1)]
    populations = [*q0, *base]
    curves = results.epoch_curves(results.budget_table(populations, [2, 4, 8, 16], [2]), [2])
    documents = results.document_losses(populations, curves)
    tokens = documents[documents.method == "tokens"].filter(regex="^d").to_numpy()[0]
    assert tokens.sum() == 600
    assert len(documents) == len(curves) + 1
    keys = ["method", "seed", "epochs"]
    sums = documents.set_index(keys).filter(regex="^d").sum(axis=1)
    for row in curves.itertuples():
        assert sums[row.method, row.seed, row.epochs] / 600 == pytest.approx(row.loss, abs=1e-6)
    plain = results.multipliers(curves, ["ensemble"])
    wider = results.multipliers(curves, ["ensemble"], documents)
    pd.testing.assert_series_equal(plain.multiplier, wider.multiplier)
    known = plain.low.notna()
    assert known.any()
    assert (wider.high[known] > plain.high[known]).all()
    with pytest.raises(ValueError, match="of other curves"):
        results.multipliers(curves.assign(loss=curves.loss + 0.01), ["ensemble"], documents)
    # The same by hand for one pair: a bootstrap of documents with the same draws.
    draws = np.random.default_rng(0).multinomial(20, np.full(20, 1 / 20), size=results.DRAWS)
    at = documents.set_index(results.POINT).filter(regex="^d")
    one = curves[curves.method.isin(["q0_uniform", "ensemble"])]
    values, clipped = np.zeros(results.DRAWS), 0
    for seed in (0, 1):
        ours = one[(one.seed == seed) & (one.method == "q0_uniform")].sort_values("epochs")
        x = ours.epochs.tolist()
        for draw, counts in enumerate(draws):
            total = counts @ tokens
            y = [(counts * at.loc[("q0_uniform", seed, e)]).sum() / total for e in x]
            goal = (counts * at.loc[("ensemble", seed, 8.0)]).sum() / total
            matched = efficiency.matched_epochs(x, y, goal)
            clipped += not math.isfinite(matched)
            matched = x[-1] if math.isinf(matched) else x[0] if math.isnan(matched) else matched
            values[draw] += 8 / matched / 2
    found, share = results._resampled_multipliers(
        one, "q0_uniform", "ensemble", "epochs", documents
    )
    np.testing.assert_allclose(found, values)
    assert share == clipped / (2 * results.DRAWS)


def test_one_seed_has_the_interval_of_the_documents():
    rng = np.random.default_rng(3)
    points = [("q0", 0, 8.0, 4.9), ("q0", 0, 16.0, 4.5), ("ensemble", 0, 16.0, 4.7)]
    common = rng.normal(0, 0.05, 50)
    sums = {("tokens", -1, 0.0): np.full(50, 10.0)}
    for method, seed, epochs, loss in points:
        noise = common + rng.normal(0, 0.05, 50)
        sums[method, seed, epochs] = 10 * (loss + noise - noise.mean())
    curves = pd.DataFrame(
        [{"method": m, "seed": s, "epochs": e, "flops": e, "k": 2, "loss": loss}
         for m, s, e, loss in points]
    )  # fmt: skip
    row = results.multipliers(curves, ["ensemble"], results.document_frame(sums)).iloc[0]
    assert row.multiplier == pytest.approx(16 / 12)
    assert 0.01 < row.high - row.multiplier < 0.3
    assert row.clipped == 0
    assert row.own_k == 2
    assert np.isnan(results.multipliers(curves, ["ensemble"]).low.iloc[0])


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_k_is_chosen_without_validation_or_test():
    population = made(tiny_study().run("q0", 16), 8)
    blind = dataclasses.replace(
        population, P={"fitness": population.P["fitness"]}, documents=population.documents
    )
    assert results.chosen_k(blind, [1, 2, 4, 8]) in (1, 2, 4, 8)
    assert results.chosen_k(blind, [8]) == 8


def curve(method, seed, losses, epochs=(8, 16, 32)):
    return pd.DataFrame({"seed": seed, "method": method, "epochs": epochs,
                         "flops": [2.0 * e for e in epochs], "k": 1, "loss": losses})  # fmt: skip


def test_multipliers_by_seed_with_an_interval():
    curves = pd.concat(
        [curve("ensemble", s, [5.0, 4.8, 4.5]) for s in (0, 1)]
        + [curve("q0", 0, [4.7, 4.4, 4.0]), curve("q0", 1, [4.6, 4.5, 4.2])]
        + [curve("distilled_ensemble", s, [5.0, 4.8, 3.9]) for s in (0, 1)]
    )
    table = results.multipliers(curves).set_index(["method", "reference", "axis"])
    row = table.loc[("q0", "ensemble", "epochs")]
    # seed 0 crosses 4.5 at 8 + 8 * 2/3, seed 1 at 16
    expected = [32 / (8 + 8 * 2 / 3), 2.0]
    assert row.multiplier == pytest.approx(np.mean(expected))
    half = 12.7062 * np.std(expected, ddof=1) / math.sqrt(2)
    assert row.high - row.multiplier == pytest.approx(half, rel=1e-4)
    assert (row.seeds, row.reached) == (2, 2)
    never = table.loc[("q0", "distilled_ensemble", "epochs")]
    assert never.reached == 0
    assert math.isnan(never.multiplier)
    cells = results.multiplier_table(results.multipliers(curves)).loc["q0"]
    assert cells["ensemble, epochs"].startswith("2.2 [")
    assert cells["distilled_ensemble, epochs"] == "0 of 2 seeds cross"
    said = results.multiplier_sentence(results.multipliers(curves))
    assert "q0 matches the ensemble with fewer epochs: 2.2x" in said
    assert "0 of 2 seeds cross: never reached" in said


def test_multipliers_grow_with_a_reference_that_stands_still():
    flat = [curve("ensemble", s, [5.0, 4.8, 4.8]) for s in (0, 1)]
    ours = [curve("q0", s, [4.9, 4.7, 4.0]) for s in (0, 1)]
    table = results.multiplier_by_budget(pd.concat([*flat, *ours])).set_index("epochs")
    assert math.isnan(table.multiplier[8]), "q0 is better before its first point"
    assert table.reached[8] == 0
    assert table.multiplier[16] == pytest.approx(16 / 12)
    assert table.multiplier[32] == pytest.approx(32 / 12)


def test_curves_and_intervals(tmp_path):
    run = tiny_study().run("q0", 16)
    with pytest.warns(UserWarning, match="tokens"):
        table = results.budget_rows(made(run, 8), [4, 16], [1, 4])
    curves = results.epoch_curves(table, [1, 4])
    assert sorted(curves.method.unique()) == [
        "q0", "q0_greedy_k1", "q0_greedy_k4", "q0_k1", "q0_k4", "q0_uniform",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"K must be in 1\.\.8, got 9"):
        results.epoch_curves(table, [9])
    assert table.run.unique().tolist() == [f"quick/{run.directory.name}"]
    assert curves[curves.method == "q0_k4"].epochs.tolist() == [16], "4 epochs hold 2 snapshots"
    summary = results.over_seeds(curves)
    assert summary.seeds.tolist() == [1] * len(summary)
    assert summary.low.isna().all()
    path = tmp_path / "t.csv"
    results.write(table, path)
    pd.testing.assert_frame_equal(results.read(path), table, rtol=1e-5, check_dtype=False)
    asked = results.read(path, epochs=[16], method=["q0"])
    assert asked.epochs.unique().tolist() == [16]
    with pytest.raises(ValueError, match=r"has no epochs 8, it has \[4, 16\]; run the notebook"):
        results.read(path, epochs=[4, 8])
    with pytest.raises(FileNotFoundError, match="recompute=True"):
        results.read(tmp_path / "none.csv")


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_snapshot_curve_ends_at_the_whole_mixture():
    population = made(tiny_study().run("q0", 8), 4)
    curve = results.snapshot_curve(population)
    fit = prior.fit_prior(population.P["fitness"])
    assert curve.mixture.iloc[-1] == pytest.approx(
        ensemble.mixture_nll(fit.weights, population.P["test"])
    )
    assert curve.member.tolist() == population.members.test_loss.tolist()


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_prior_tables_are_consistent(monkeypatch):
    runs = [tiny_study(seed).run("q0", 16) for seed in (0, 1)]
    populations = {run.seed: made(run, 8, seed=run.seed) for run in runs}
    monkeypatch.setattr(results, "load", lambda run: populations[run.seed])
    with pytest.raises(ValueError, match=r"K must be in 1\.\.8, got 99"):
        results.prior_tables(runs, [1, 99], [200], k=2)
    tables = results.prior_tables(runs, [1, 2, 4, 8], [200], k=2)
    assert list(tables) == list(results.PRIOR_TABLES)
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
