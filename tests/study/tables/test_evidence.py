"""Ablations, data efficiency, the summary: from populations and tables whose numbers are known."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from tiny import made, tiny_study

from q0lib import ensemble, population, prior, train
from q0lib.study.plan import FULL, Experiment
from q0lib.study.tables import (
    ablations,
    budgets,
    data_efficiency,
    intervals,
    store,
    summary,
    tuning,
)

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


def test_trials_are_read_on_validation_at_every_budget_that_has_a_trial(found):
    shorter = (Experiment("tuning", "x", "q0", 16), found[0][1])
    whole = (Experiment("tuning", "x", "q0", 32), found[0][1])
    table = tuning.table([whole, shorter]).iloc[:2].set_index("epochs")
    assert table.index.tolist() == [16, 32]
    half = population.load(found[0][1]).prefix(1, 8)
    assert table.members[16] == 8
    assert table.uniform[16] == pytest.approx(
        -np.log(half.P["validation"].mean(0)).mean(), abs=1e-6
    )
    assert table.learned[32] < table.snapshot[32]


def test_reference_tables_hold_every_run_and_refuse_two_texts(text, run_folder):
    found = []
    faster = "matrix_lr=0.05"
    for multiple, part, changed in (
        (1, "reference", ()), (2, "reference", ()), (2, "tuned_reference", (f"single.{faster}",)),
    ):  # fmt: skip
        run = tiny_study(0, f"corpus.train_tokens={600 * multiple}", *changed).run("single", 1)
        train.train_population(run, progress=False)
        found.append((Experiment(part, "", "single", 1, changed), run))
    size = f"width {run.model.width}"
    tables = data_efficiency.reference_tables(found, 600)
    assert tables["reference"].multiple.tolist() == [1, 2, 2]
    assert tables["reference"].model.tolist() == [size, size, f"{size} {faster}"]
    assert tables["reference"].recipe.tolist() == ["", "", faster]
    losses = intervals.resampled_losses(tables["reference_documents"])
    assert set(losses) == {(size, 0, 1.0), (size, 0, 2.0), (f"{size} {faster}", 0, 2.0)}
    test = population.load(found[1][1]).members.test_loss.item()
    sums = tables["reference_documents"].set_index(intervals.POINT).sum(axis=1)
    assert sums[size, 0, 2.0] / sums[intervals.TOKENS] == pytest.approx(test)
    other = tiny_study(0, "corpus.test_tokens=300").run("single", 1)
    train.train_population(other, progress=False)
    with pytest.raises(ValueError, match="evaluated on 2 different texts"):
        data_efficiency.reference_tables([*found, (found[0][0], other)], 600)


def reference():
    return pd.DataFrame(
        [
            {"model": size, "tokens": tokens, "multiple": tokens / 100, "seed": seed,
             "validation": loss, "test": loss + 0.1 * seed}
            for seed in (0, 1)
            for size, losses in {"s": [5.0, 4.6, 4.4], "l": [5.2, 4.5, 4.0]}.items()
            for tokens, loss in zip([100, 200, 400], losses, strict=True)
        ]
    )  # fmt: skip


def by_document(points, spread):
    """Documents of ten tokens that add up to the losses of `points`, each off by its own."""
    rng = np.random.default_rng(0)
    sums = {("tokens", -1, 0.0): np.full(40, 10.0)}
    for *point, loss in points:
        noise = rng.normal(0, spread, 40)
        sums[tuple(point)] = 10 * (loss + noise - noise.mean())
    return intervals.document_frame(sums)


def test_the_reference_takes_the_best_size_and_efficiency_reads_it():
    line = data_efficiency.reference_curve(reference())
    assert line[line.seed == 0].model.tolist() == ["s", "l", "l"]
    curves = pd.DataFrame(
        {"method": ["q0"] * 4, "seed": [0, 0, 1, 1], "epochs": [8, 16] * 2,
         "validation": [4.9, 4.3] * 2, "loss": [4.9, 4.3, 4.8, 4.55]}
    )  # fmt: skip
    columns = ["model", "seed", "multiple", "test"]
    texts = [
        by_document(curves[["method", "seed", "epochs", "loss"]].to_numpy(), spread)
        for spread in (0.0, 0.1)
    ]
    of_line = by_document(reference()[columns].to_numpy(), 0.0)
    given = (line, 100, [("q0", 16), ("q0", 32)])
    named = texts[0].assign(protocol="clean")  # as the table of 04 has it
    table = data_efficiency.table(curves, *given, named, of_line)
    assert len(table) == 1, "a budget that the curves do not have is left out"
    row = table.iloc[0]
    # Seed 0's reference has 4.5 at 200 and 4.0 at 400: 4.3 lies at 280. Seed 1's has 4.6 and 4.1:
    # 4.55 lies at 220.
    assert row.cases == "2.80x; 2.20x"
    assert row.multiplier == pytest.approx(np.sqrt(2.8 * 2.2))
    of_seeds = 12.7062 * np.log(2.8 / 2.2) / 2
    assert row.high / row.multiplier == pytest.approx(np.exp(of_seeds), rel=1e-4)
    # A reference without these seeds is read at its mean: 4.55 at 200, 4.05 at 400.
    others = line.assign(seed=line.seed + 5)
    unpaired = data_efficiency.table(
        curves, others, *given[1:], texts[0], by_document(
            reference().assign(seed=lambda t: t.seed + 5)[columns].to_numpy(), 0.0
        )
    ).iloc[0]  # fmt: skip
    assert unpaired.cases == "3.00x; 2.00x"
    wider = data_efficiency.table(curves, *given, texts[1], of_line).iloc[0]
    assert wider.high > row.high
    # With one seed the documents alone: the slope there is 200 tokens for 0.5 nats.
    alone = data_efficiency.table(curves[curves.seed == 0], *given, texts[1], of_line).iloc[0]
    drawn = intervals.resampled_losses(texts[1])["q0", 0, 16.0]
    spread = np.log((200 + (4.5 - drawn) / 0.5 * 200) / 100).std()
    assert np.log(alone.high / alone.multiplier) == pytest.approx(1.96 * spread, rel=1e-3)
    assert alone.clipped == 0
    best = data_efficiency.table(curves, line, 100, [("q0", 0)], texts[0], of_line)
    assert best.epochs.item() == 16
    beyond = data_efficiency.table(curves.assign(loss=3.0), *given, texts[0], of_line).iloc[0]
    assert np.isnan(beyond.multiplier)
    assert (beyond.reached, beyond.cases) == (0, "beyond 4.0x; beyond 4.0x")
    shorter = of_line.drop(columns="d39")
    with pytest.raises(ValueError, match="different documents"):
        data_efficiency.table(curves, *given, texts[0], shorter)


def test_a_reference_of_some_seeds_alone_is_not_chosen():
    table = reference()
    ended = table[(table.seed == 0) | (table.tokens < 400)]
    assert data_efficiency.reference_curve(ended).tokens.tolist() == [100, 200] * 2
    lucky = table[(table.seed == 0) & (table.model == "s")].assign(model="lucky", validation=1.0)
    line = data_efficiency.reference_curve(pd.concat([table, lucky]))
    assert "lucky" not in set(line.model)
    assert len(line) == 6


def test_summary_names_what_was_asked_and_skips_what_is_not_there(tmp_path):
    assert summary.table(tmp_path).empty
    multipliers = [
        {"protocol": protocol, "reference": reference, "axis": axis, "method": method,
         "multiplier": 2.0, "low": 1.5, "high": 2.5, "seeds": 3, "reached": 3, "own_k": 16}
        for protocol in ("clean", "paper")
        for reference in ("ensemble", "distilled_ensemble")
        for axis in ("epochs", "flops")
        for method in ("q0", "q0_k8", "q0_k16")
    ]  # fmt: skip
    store.write(pd.DataFrame(multipliers), tmp_path / "epoch_multipliers.csv")
    ratios = [
        {"method": method, "epochs": epochs, "multiplier": 7.0, "low": 6, "high": 8, "seeds": 3,
         "reached": 3, "reference": reference}
        for reference in ("one recipe", "tuned")
        for method, epochs in (("q0", 256), ("q0", 512), ("ensemble", 256))
    ]  # fmt: skip
    store.write(pd.DataFrame(ratios), tmp_path / "data_efficiency.csv")
    table = summary.table(tmp_path)
    assert list(table) == ["metric", "value", "low", "high", "seeds", "split", "reached"]
    asked = {
        "epoch_efficiency_best_k", "epoch_efficiency_k8", "flop_efficiency_best_k",
        "flop_efficiency_k8", "epoch_efficiency_own_k", "epoch_efficiency_vs_distilled_ensemble",
        "data_efficiency_q0", "data_efficiency_q0_512_epochs", "data_efficiency_baseline",
        "data_efficiency_q0_tuned_reference", "data_efficiency_q0_tuned_reference_512_epochs",
    }  # fmt: skip
    assert asked <= set(table.metric)
    assert table.metric.is_unique
    eight = pd.DataFrame(multipliers).assign(own_k=8)
    store.write(eight, tmp_path / "epoch_multipliers.csv")
    assert {"epoch_efficiency_k8", "epoch_efficiency_own_k"} <= set(
        summary.table(tmp_path).metric
    ), "the ensemble's own number may be eight too"
    assert (table.value[table.metric == "data_efficiency_baseline"] == 7.0).all()
