"""Multipliers from curves and documents whose numbers are known."""

import math

import numpy as np
import pandas as pd
import pytest
from tiny import made, tiny_study

from q0lib import efficiency, presets
from q0lib.study.tables import epoch_efficiency, intervals, multipliers

METHODS = presets.load("quick").methods


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_document_losses_add_up_and_widen_the_interval():
    q0 = [made(tiny_study(seed).run("q0", 16), 8, seed=seed) for seed in (0, 1)]
    base = [made(tiny_study(seed).run("ensemble", 8), 4, seed=9 + seed) for seed in (0, 1)]
    populations = [*q0, *base]
    table = epoch_efficiency.table(populations, [2, 4, 8, 16], [2])
    curves = epoch_efficiency.curves(table, METHODS, [2])
    documents = epoch_efficiency.document_losses(populations, curves)
    tokens = documents[documents.method == "tokens"].filter(regex="^d").to_numpy()[0]
    scored, D = q0[0].P["test"].shape[1], len(tokens)
    assert tokens.sum() == scored
    assert len(documents) == len(curves) + 1
    assert set(curves[curves.method == "q0_greedy_k2"].base) == {"q0"}
    keys = ["method", "seed", "epochs"]
    sums = documents.set_index(keys).filter(regex="^d").sum(axis=1)
    for row in curves.itertuples():
        assert sums[row.method, row.seed, row.epochs] / scored == pytest.approx(row.loss, abs=1e-6)
    plain = multipliers.against(curves, ["ensemble"])
    wider = multipliers.against(curves, ["ensemble"], documents)
    pd.testing.assert_series_equal(plain.multiplier, wider.multiplier)
    with pytest.raises(ValueError, match="of other curves"):
        multipliers.against(curves.assign(loss=curves.loss + 0.01), ["ensemble"], documents)
    # The same by hand for one pair: a bootstrap of documents with the same draws.
    draws = np.random.default_rng(0).multinomial(D, np.full(D, 1 / D), size=intervals.DRAWS)
    at = documents.set_index(intervals.POINT).filter(regex="^d")
    one = curves[curves.method.isin(["q0_uniform", "ensemble"])]
    values, clipped = np.zeros(intervals.DRAWS), 0
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
            values[draw] += np.log(8 / matched) / 2
    row = wider[(wider.method == "q0_uniform") & (wider.axis == "epochs")].iloc[0]
    assert row.clipped == clipped / (2 * intervals.DRAWS)
    alone = plain[(plain.method == "q0_uniform") & (plain.axis == "epochs")].iloc[0]
    halves = [np.log(each.high / each.multiplier) for each in (row, alone)]
    assert halves[0] == pytest.approx(np.hypot(halves[1], 1.96 * values.std()))
    with pytest.raises(ValueError, match=r"hold .* twice"):
        multipliers.against(curves, ["ensemble"], pd.concat([documents, documents]))


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
    row = multipliers.against(curves, ["ensemble"], intervals.document_frame(sums)).iloc[0]
    assert row.multiplier == pytest.approx(16 / 12)
    # Linearised: log(16 / (8 + 8 (y8 - goal) / (y8 - y16))), with the documents' covariance.
    y8, y16, goal = (sums[each[:3]] / 10 for each in points)
    share, fall = 0.5, 0.4
    moved = ((y8 - goal) - share * (y8 - y16)) / fall
    error = 8 / 12 * np.std(moved) / np.sqrt(50)
    assert np.log(row.high / row.multiplier) == pytest.approx(1.96 * error, rel=0.05)
    assert row.clipped == 0
    assert row.own_k == 2
    assert np.isnan(multipliers.against(curves, ["ensemble"]).low.iloc[0])


def curve(method, seed, losses, epochs=(8, 16, 32)):
    return pd.DataFrame({"seed": seed, "method": method, "epochs": epochs,
                         "flops": [2.0 * e for e in epochs], "k": 1, "loss": losses})  # fmt: skip


def test_multipliers_by_seed_with_an_interval():
    curves = pd.concat(
        [curve("ensemble", s, [5.0, 4.8, 4.5]) for s in (0, 1)]
        + [curve("q0", 0, [4.7, 4.4, 4.0]), curve("q0", 1, [4.6, 4.5, 4.2])]
        + [curve("distilled_ensemble", s, [5.0, 4.8, 3.9]) for s in (0, 1)]
    )
    table = multipliers.against(curves).set_index(["method", "reference", "axis"])
    row = table.loc[("q0", "ensemble", "epochs")]
    # seed 0 crosses 4.5 at 8 + 8 * 2/3, seed 1 at 16
    expected = [32 / (8 + 8 * 2 / 3), 2.0]
    assert row.multiplier == pytest.approx(math.sqrt(math.prod(expected)))
    half = 12.7062 * np.std(np.log(expected), ddof=1) / math.sqrt(2)
    assert row.high / row.multiplier == pytest.approx(math.exp(half), rel=1e-4)
    assert (row.seeds, row.reached) == (2, 2)
    never = table.loc[("q0", "distilled_ensemble", "epochs")]
    assert never.reached == 0
    assert math.isnan(never.multiplier)
    cells = multipliers.wide(multipliers.against(curves)).loc["q0"]
    assert cells["ensemble, epochs"].startswith("2.2x [")
    assert cells["distilled_ensemble, epochs"] == "0 of 2 seeds cross"
    said = multipliers.sentence(multipliers.against(curves))
    assert "q0 matches the ensemble with fewer epochs: 2.2x" in said
    assert "fewer FLOPs: 0 of 2 seeds cross (never reached" in said
    starred = multipliers.against(curves).assign(clipped=0.03)
    assert multipliers.wide(starred).loc["q0", "ensemble, epochs"].endswith("]*")
    mark = multipliers.marked(intervals.over_seeds(curves), starred).iloc[0]
    assert (mark.earliest, mark.latest) == pytest.approx((32 / row.high, 32 / row.low))
    assert mark.label.startswith("2.2x fewer epochs [")
    alone = intervals.over_seeds(curves[curves.method != "ensemble"])
    with pytest.raises(ValueError, match="needs a curve of 'ensemble', there are"):
        multipliers.marked(alone, starred)
    with pytest.raises(ValueError, match="seed 1 has a curve of ensemble but none of q0"):
        multipliers.against(curves[(curves.method != "q0") | (curves.seed == 0)], ["ensemble"])
    short = (curves.method == "ensemble") & (curves.seed == 1) & (curves.epochs == 32)
    with pytest.raises(ValueError, match=r"ensemble ends at another budget by seed: \{0: 32"):
        multipliers.against(curves[~short], ["ensemble"])


def test_multipliers_grow_with_a_reference_that_stands_still():
    flat = [curve("ensemble", s, [5.0, 4.8, 4.8]) for s in (0, 1)]
    ours = [curve("q0", s, [4.9, 4.7, 4.0]) for s in (0, 1)]
    table = multipliers.by_budget(pd.concat([*flat, *ours])).set_index("epochs")
    assert math.isnan(table.multiplier[8]), "q0 is better before its first point"
    assert table.reached[8] == 0
    assert table.multiplier[16] == pytest.approx(16 / 12)
    assert table.multiplier[32] == pytest.approx(32 / 12)
