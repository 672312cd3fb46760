"""Ablations, data efficiency, the summary: from populations and tables whose numbers are known."""

import numpy as np
import pandas as pd
import pytest
from conftest import made, tiny_study

from q0lib import ensemble, evidence, population, prior, results
from q0lib.experiments import FULL, Experiment

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")


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


def test_ablations_are_paired_with_the_full_recipe_at_the_same_budget(found):
    tables = evidence.ablation_tables(found, [16, 32])
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
    snapshots = tables["snapshots"]
    assert snapshots.groupby("variant").size().to_dict() == {FULL: 32, "slow": 16}


def test_variants_are_compared_over_seeds_and_documents():
    rows = pd.DataFrame(
        [{"variant": v, "seed": s, "epochs": 8, "snapshot": 5.0, "learned": 4.0,
          "behind": 0.01 * s + shift, "behind_se": 0.002}
         for v, shift in (("a", 0.0), ("b", 0.1), ("c", 0.0)) for s in (0, 1)]
    )  # fmt: skip
    table = evidence.compare(rows, ["a", "b"]).set_index("variant")
    assert table.index.tolist() == ["b", "a"]
    half = np.hypot(12.7062 * 0.01 / np.sqrt(2) / np.sqrt(2), 1.96 * 0.002)
    assert table.high["a"] - table.behind["a"] == pytest.approx(half, rel=1e-4)
    alone = evidence.compare(rows[rows.seed == 1], ["a"]).iloc[0]
    assert alone.high == pytest.approx(0.01 + 1.96 * 0.002)


def test_small_budgets_have_a_row_each(found):
    table = evidence.small_table(found)
    assert table.spent_on.tolist() == [FULL, "slow"] * 2
    assert (table.learned < table.snapshot).all()


def test_trials_are_read_on_validation_at_their_budget_and_half_of_it(found):
    table = evidence.tuning_table(found[:1]).set_index("epochs")
    assert table.index.tolist() == [16, 32]
    half = population.load(found[0][1]).prefix(1, 8)
    assert table.members[16] == 8
    assert table.uniform[16] == pytest.approx(
        -np.log(half.P["validation"].mean(0)).mean(), abs=1e-6
    )
    assert table.learned[32] < table.snapshot[32]


def reference():
    return pd.DataFrame(
        [
            {"size": size, "tokens": tokens, "seed": seed, "batch_tokens": 8, "matrix_lr": 0.1,
             "validation": loss, "test": loss + 0.1 * seed}
            for seed in (0, 1)
            for size, losses in {"s": [5.0, 4.6, 4.4], "l": [5.2, 4.5, 4.0]}.items()
            for tokens, loss in zip([100, 200, 400], losses, strict=True)
        ]
    )  # fmt: skip


def test_the_reference_takes_the_best_size_and_efficiency_reads_it():
    line = evidence.reference_curve(reference())
    assert line[line.seed == 0]["size"].tolist() == ["s", "l", "l"]
    curves = pd.DataFrame(
        {"method": ["q0"] * 4, "seed": [0, 0, 1, 1], "epochs": [8, 16] * 2,
         "loss": [4.9, 4.3, 4.8, 4.55]}
    )  # fmt: skip
    table = evidence.data_efficiency(curves, line, 100, [("q0", 16)]).iloc[0]
    # the reference's means are 5.05, 4.55, 4.05: 4.3 is halfway from 200 to 400, 4.55 at 200
    assert table.multiplier == pytest.approx((3 + 2) / 2)
    assert table.cases == "3.00x; 2.00x"
    assert evidence.data_efficiency(curves, line, 100, [("q0", 0)]).epochs.item() == 16
    beyond = evidence.data_efficiency(curves.assign(loss=3.0), line, 100, [("q0", 16)]).iloc[0]
    assert np.isnan(beyond.multiplier)
    assert beyond.cases == "beyond 4.0x; beyond 4.0x"


def test_summary_names_what_was_asked_and_skips_what_is_not_there(tmp_path):
    assert evidence.summary(tmp_path).empty
    multipliers = [
        {"protocol": protocol, "reference": reference, "axis": axis, "method": method,
         "multiplier": 2.0, "low": 1.5, "high": 2.5, "seeds": 3}
        for protocol in ("clean", "paper")
        for reference in ("ensemble", "distilled_ensemble")
        for axis in ("epochs", "flops")
        for method in ("q0", "q0_k8")
    ]  # fmt: skip
    results.write(pd.DataFrame(multipliers), tmp_path / "epoch_multipliers.csv")
    ratios = [
        {"reference": "one recipe", "method": method, "epochs": epochs, "multiplier": 7.0,
         "low": 6, "high": 8, "seeds": 3}
        for method, epochs in (("q0", 256), ("q0", 512), ("ensemble", 256))
    ]  # fmt: skip
    results.write(pd.DataFrame(ratios), tmp_path / "data_efficiency.csv")
    table = evidence.summary(tmp_path)
    assert list(table) == ["metric", "value", "low", "high", "seeds", "split"]
    asked = {
        "epoch_efficiency_best_k", "epoch_efficiency_k8", "flop_efficiency_best_k",
        "flop_efficiency_k8", "epoch_efficiency_vs_distilled_ensemble", "data_efficiency_q0",
        "data_efficiency_q0_512_epochs", "data_efficiency_baseline",
    }  # fmt: skip
    assert asked <= set(table.metric)
    assert table.metric.is_unique
    assert set(table.split) == {"test"}
