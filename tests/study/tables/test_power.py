"""The part "power": what its tables hold is what its populations lose on the longer text."""

import dataclasses

import numpy as np
import pytest
from tiny import tiny_study, with_runtime

from q0lib import ensemble, paths, population, train
from q0lib.study import longer_test, plan
from q0lib.study.tables import power


def test_tables_are_of_the_longer_text(tmp_path, monkeypatch):
    for name in ("RUNS", "CACHE"):
        monkeypatch.setattr(paths, name, tmp_path / name)
    study = tiny_study(0, "corpus.test_tokens=900", "corpus.document_chars=60")
    found = []
    for label, method, epochs in (("q0", "q0", 4), ("ensemble", "ensemble", 4),
                                  ("width 32, 1x tokens", "single", 1)):  # fmt: skip
        run = with_runtime(study.run(method, epochs), keep_weights=True)
        train.train_population(run, progress=False)
        found.append((plan.Experiment(plan.POWER, label, method, epochs), run))
    longer = study.corpus.test_tokens + 128
    made = power.tables(
        found, longer, [2, 4], [2], study.methods, study.corpus.train_tokens, progress=False
    )
    whole = longer_test.read(population.load(found[1][1]), longer, progress=False)
    M = len(whole)
    loss = ensemble.mixture_nll(np.full(M, 1 / M), whole.P["test"])
    table = made["power"].set_index(["method", "epochs", "choice", "k"])
    assert table.test["ensemble", 4, "uniform", M] == pytest.approx(loss)
    assert set(made["power"].method) == {"q0", "ensemble"}
    by_document = made["power_documents"].set_index("method").filter(regex=r"^d\d+$")
    tokens = by_document.loc["tokens"].sum()
    assert tokens == whole.P["test"].shape[1] > found[0][1].corpus.test_tokens
    reference = made["power_reference"]
    assert reference.multiple.tolist() == [1.0]
    sums = made["power_reference_documents"].set_index("method").filter(regex=r"^d\d+$")
    assert reference.test[0] == pytest.approx(sums.loc["width 32"].sum() / tokens)


def test_the_plan_keeps_weights_and_has_one_trajectory_of_q0():
    planned = plan.experiments("cpu", [plan.POWER])
    assert all("runtime.keep_weights=true" in each.overrides for each in planned)
    (q0,) = [each for each in planned if each.label == "q0"]
    run = q0.run("cpu", 5)
    assert (run.trajectories, run.epochs, run.seed) == (1, 128, 5)
    assert plan.experiments("quick", [plan.POWER]) == []
    downstream = {each.run("cpu", 0).key for each in plan.experiments("cpu", [plan.DOWNSTREAM])
                  if not each.teachers}  # fmt: skip
    power_keys = {dataclasses.replace(each, part=plan.DOWNSTREAM).run("cpu", 0).key
                  for each in planned if "6x" not in each.label or "16x" in each.label}  # fmt: skip
    assert power_keys == downstream, "what one part has trained the other reuses"
