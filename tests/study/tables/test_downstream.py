"""What follows from answers, item by item, against sums done by hand."""

import numpy as np
import pandas as pd
import pytest
from tiny import tiny_study, with_runtime

from q0lib import ensemble, paths, prior, train
from q0lib.downstream import tasks
from q0lib.study import plan
from q0lib.study.tables import downstream

ITEMS = 40
TASKS = "easy", "hard"


def row(method, tokens, seed, task, right, k=1):
    """A model that has the first `right` of the items right."""
    return {"method": method, "k": k, "seed": seed, "tokens": tokens, "task": task,
            "answers": "1" * right + "0" * (ITEMS - right)}  # fmt: skip


@pytest.fixture
def items():
    """One epoch has 10, 20, 30 of 40 after 100, 200, 400 tokens; half of that on the hard task."""
    rows = [
        {"method": "documents", "k": 0, "seed": -1, "tokens": 0, "task": task,
         "answers": " ".join(str(i // 2) for i in range(ITEMS))} for task in TASKS
    ]  # fmt: skip
    for seed in range(2):
        for tokens, right in ((100, 10), (200, 20), (400, 30)):
            rows.append(row("one epoch", tokens, seed, "easy", right))
            rows.append(row("one epoch", tokens, seed, "hard", right // 2))
        for method, right in (("single", 15), ("ensemble", 25 + seed)):
            rows.append(row(method, 100, seed, "easy", right))
            rows.append(row(method, 100, seed, "hard", 12))
    return pd.DataFrame(rows)


def test_accuracy_is_the_mean_of_seeds_and_the_average_that_of_tasks(items):
    found = downstream.accuracies(items).set_index(["method", "tokens", "task"])
    assert found.accuracy["ensemble", 100, "easy"] == pytest.approx(25.5 / 40)
    assert found.accuracy["ensemble", 100, "average"] == pytest.approx((25.5 + 12) / 80)
    assert found.gain["single", 100, "easy"] == pytest.approx((15 - 25.5) / 40)
    assert found.gain["single", 100, "hard"] == found.gain_low["single", 100, "hard"] == 0
    same = found.loc["ensemble", 100, "average"]
    assert same.gain == same.gain_low == same.gain_high == 0
    assert same.low < same.accuracy < same.high
    assert set(found.seeds) == {2}


def test_items_of_a_document_are_drawn_together(items):
    answers = downstream.Answers(items)
    draws = answers.draws["easy"]
    np.testing.assert_array_equal(draws[:, ::2], draws[:, 1::2])
    assert set(draws.sum(1)) == {ITEMS}
    model = ("single", 1, 100)
    spread = answers.drawn(model, "easy")[:, 0].std()
    pairs = np.r_[np.ones(7), 0.5, np.zeros(12)]  # 15 of 40, by document
    assert spread == pytest.approx(pairs.std() / np.sqrt(20), rel=0.1)


def test_data_efficiency_is_read_off_the_reference_of_the_same_seed(items):
    found = downstream.data_efficiency(items, 100).set_index(["method", "task"])
    assert found.multiplier["single", "easy"] == pytest.approx(1.5)
    assert found.multiplier["single", "hard"] == pytest.approx(2 + 2 * 2 / 5)
    by_seed = 2 + 2 * 0.5, 2 + 2 * 0.6
    assert found.multiplier["ensemble", "easy"] == pytest.approx(np.sqrt(np.prod(by_seed)))
    assert (found["last"] == found.multiplier).all(), "the reference never goes back here"
    assert (found.reached == 2).all()


def test_a_reference_that_goes_back_has_a_first_and_a_last_crossing(items):
    for tokens, right in ((100, 20), (200, 5)):
        where = (items.method == "one epoch") & (items.tokens == tokens) & (items.task == "easy")
        items.loc[where, "answers"] = "1" * right + "0" * (ITEMS - right)
    before = [row("one epoch", 50, seed, task, 5) for seed in range(2) for task in TASKS]
    found = downstream.data_efficiency(pd.concat([items, pd.DataFrame(before)]), 100)
    single = found.set_index(["method", "task"]).loc["single", "easy"]
    assert single.multiplier == pytest.approx(0.5 + 0.5 * 10 / 15)
    assert single["last"] == pytest.approx(2 + 2 * 10 / 25)


def test_the_surplus_is_what_accuracy_has_beyond_its_loss(items):
    losses = {("one epoch", 100): 5.0, ("one epoch", 200): 4.0, ("one epoch", 400): 3.0,
              ("single", 100): 4.5, ("ensemble", 100): 4.0}  # fmt: skip
    table = items[items.method != "documents"].copy()
    table["test"] = [losses[each] for each in zip(table.method, table.tokens, strict=True)]
    found = downstream.beyond_loss(table, items).set_index("method")
    single, ensemble = found.loc["single"], found.loc["ensemble"]
    assert single.reference == pytest.approx((15 + 7.5) / 80)
    assert single.surplus == pytest.approx((15 + 12) / 80 - single.reference)
    assert ensemble.surplus == pytest.approx((25.5 + 12) / 80 - (20 + 10) / 80)
    assert ensemble.low < ensemble.surplus < ensemble.high


def test_every_model_of_a_run_is_asked(tmp_path, monkeypatch):
    for name in ("RUNS", "CACHE"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    documents = [
        " ".join(f"{name}{i % 7} of people number{i}" for i in range(30)) for name in "abcde"
    ]
    tasks.write(tmp_path / "tasks", documents, 8, passage_chars=40, continuation_chars=20)
    run = with_runtime(tiny_study().run("q0", 16), keep_weights=True)
    whole = train.train_population(run, progress=False)
    found = [(plan.Experiment(plan.DOWNSTREAM, "q0", "q0", 16.0), run)]
    names = ["which_passage", "which_continuation"]
    tables = downstream.tables(found, names, include=tmp_path / "tasks", progress=False)
    table = tables["downstream"]
    assert list(zip(table.k, table.task, strict=True)) == [(k, n) for k in (1, 8) for n in names]
    assert list(table.metric) == ["acc", "acc_mutual_info"] * 2
    chosen = prior.select(whole.P["fitness"], 1)
    assert table.test[0] == pytest.approx(ensemble.mixture_nll(chosen.weights, whole.P["test"]))
    items = tables["downstream_items"]
    assert [*items.method] == ["documents", "q0"] * 2 + ["q0"] * 2
    for each, right in zip(table.accuracy, items[items.method == "q0"].answers, strict=True):
        assert right.count("1") / len(right) == each
    assert {folder.name for folder in (run.directory / "evaluation").iterdir()} == {
        "greedy-1", "greedy-8"
    }  # fmt: skip
