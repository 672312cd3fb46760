"""What a variant is worth beside the full recipe, from populations whose numbers are known."""

import numpy as np
import pandas as pd
import pytest

from q0lib import ensemble, population, prior
from q0lib.study.plan import FULL
from q0lib.study.tables import ablations

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")


def test_ablations_are_paired_with_the_full_recipe_at_the_same_budget(found):
    tables = ablations.tables(found, [16, 32])
    table = tables["ablations"].set_index(["variant", "seed", "epochs"])
    assert (table.loc[FULL].behind == 0).all()
    slow = table.loc[("slow", 1, 16)]
    assert slow.members == 4
    assert table.loc[(FULL, 1, 16)].members == 8
    assert slow.behind == pytest.approx(slow.learned - table.loc[(FULL, 1, 16)].learned)
    assert slow.behind_se > 0
    part = population.load(found[3][1]).prefix(1, 4)
    weights = prior.fit_prior(part.P["fitness"]).weights
    assert slow.learned == pytest.approx(ensemble.mixture_nll(weights, part.P["test"]))
    assert np.isnan(slow.k8), "four snapshots have no eight"
    longer = ablations.tables(found, [16, 64])
    assert set(longer["ablations"].epochs) == {16}, "what a run ends before is left out"
    alone = ablations.tables([found[0], *found[2:], found[1]][1:], [16])["ablations"]
    alone = alone.set_index(["variant", "seed"])
    assert np.isnan(alone.behind["slow", 0]), "there is no full recipe of this seed"
    assert alone.behind["slow", 1] == pytest.approx(slow.behind)
    assert alone.mean_behind_se["slow", 1] == pytest.approx(alone.behind_se["slow", 1])
    with pytest.raises(ValueError, match="slow has no snapshot after 6 epochs"):
        ablations.tables(found, [6])
    # The error of the mean over seeds is that of the mean difference, token by token.
    differences = []
    for full, other in ((found[0][1], found[1][1]), (found[2][1], found[3][1])):
        pair = [population.load(run).prefix(1, 16 // int(run.method.epochs_per_cycle))
                for run in (other, full)]  # fmt: skip
        nll = [-ensemble.mixture_log_probs(prior.fit_prior(p.P["fitness"]).weights, p.P["test"])
               for p in pair]  # fmt: skip
        differences.append(nll[0] - nll[1])
    error = ensemble.standard_error(np.mean(differences, axis=0), pair[0].documents["test"])
    assert slow.mean_behind_se == pytest.approx(error)
    snapshots = tables["snapshots"]
    assert snapshots.groupby("variant").size().to_dict() == {FULL: 32, "slow": 16}


def test_variants_are_compared_over_seeds_and_documents():
    rows = pd.DataFrame(
        [{"variant": v, "seed": s, "epochs": 8, "snapshot": 5.0, "learned": 4.0,
          "behind": 0.01 * s + shift, "behind_se": 0.003, "mean_behind_se": 0.002, "paired": 2}
         for v, shift in (("a", 0.0), ("b", 0.1), ("c", 0.0)) for s in (0, 1)]
    )  # fmt: skip
    table = ablations.against_full(rows, ["a", "b"]).set_index("variant")
    assert table.index.tolist() == ["b", "a"]
    half = np.hypot(12.7062 * 0.01 / np.sqrt(2) / np.sqrt(2), 1.96 * 0.002)
    assert table.high["a"] - table.behind["a"] == pytest.approx(half, rel=1e-4)
    alone = ablations.against_full(rows[rows.seed == 1], ["a"]).iloc[0]
    assert alone.high == pytest.approx(0.01 + 1.96 * 0.003)
    with pytest.raises(ValueError, match="no pair of 'd' and the full recipe"):
        ablations.against_full(rows, ["a", "d"])


def test_leads_of_variants_are_read_off_their_own_seeds():
    """Two seeds of the full recipe and one of a variant, against an ensemble of four epochs."""
    snapshots = pd.DataFrame(
        [(FULL, 0, 1, 10, 5.0), (FULL, 0, 2, 20, 4.0), (FULL, 1, 1, 10, 4.6), (FULL, 1, 2, 20, 4.4),
         ("rare", 1, 1, 8, 4.7), ("rare", 1, 2, 16, 4.6)],
        columns=["variant", "seed", "epochs", "flops", "mixture"],
    )  # fmt: skip
    curves = pd.DataFrame(
        [("ensemble", seed, epochs, 8 * epochs, choice, 4.5 + 0.1 * (4 - epochs), epochs)
         for seed in (0, 1) for epochs in (2, 4) for choice in ("uniform", "truncate")],
        columns=["method", "seed", "epochs", "flops", "choice", "test", "k"],
    )  # fmt: skip
    found = ablations.leads(snapshots, curves).set_index(["method", "axis"])
    assert found.multiplier[FULL, "epochs"] == pytest.approx(4 / 1.5)  # both cross at 1.5 epochs
    assert found.multiplier[FULL, "flops"] == pytest.approx(32 / 15)
    assert found.seeds[FULL, "epochs"] == 2
    assert found.reached["rare", "epochs"] == 0
    with pytest.raises(ValueError, match="seed 0 has a curve of"):
        ablations.leads(snapshots, curves[curves.seed == 1])
