"""Students in the study: planned after their teachers, charged for them, compared with them."""

import numpy as np
import pandas as pd
import pytest
from tiny import tiny_overrides

from q0lib import ensemble, paths, population, student, train
from q0lib.study import plan, runs
from q0lib.study.tables import students

TINY = (*tiny_overrides(), "corpus.document_chars=100", "runtime.keep_weights=true")


def planned(method, epochs, label, *overrides, teachers=(), k=0):
    return plan.Experiment("student", label, method, epochs, (*TINY, *overrides), teachers, k)


@pytest.fixture(scope="module")
def generations(tmp_path_factory):
    """q0, two students of its first three cycles, and a student of those students; trained."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("generations")
    patch.setattr(paths, "RUNS", folder / "runs")
    patch.setattr(paths, "CACHE", folder / "cache")
    q0 = planned("q0", 8, "q0", "q0.trajectories=1")
    first = planned("student", 4, "student, 6 epochs", "student.trajectories=2",
                    teachers=(plan.Part(q0, 1, 3),))  # fmt: skip
    second = planned("student", 2, "student of students", teachers=(plan.Part(first, 2, 1),))
    found = []
    for each in (q0, first, second):
        run = each.run("quick", 0)
        train.train_population(run, progress=False)
        found.append((each, run))
    yield found
    patch.undo()


def test_a_student_waits_for_its_teachers(generations, tmp_path, monkeypatch):
    experiments = [each for each, _ in generations]
    assert [each.waits("quick", 0) for each in experiments] == [False, False, False]
    assert [each.waits("quick", 1) for each in experiments] == [False, True, True]
    assert len(runs.runs_of(experiments, "quick", [0])) == 3
    assert len(runs.runs_of(experiments, "quick", [1])) == 1
    monkeypatch.setattr(runs, "_train_at_once", lambda *_: None)
    with pytest.raises(RuntimeError, match="2 students wait"):
        runs.train(experiments, "quick", [1])


def test_a_teacher_is_named_by_its_run_and_how_much_of_it(generations):
    (_, run), (first, taught), _ = generations
    assert first.taught_by("quick", 0) == [f"quick/{run.directory.name}@1x3"]
    assert {cycle for _, _, cycle in taught.teaching.members} <= {0, 1, 2}
    part = population.Population.open(run.directory, 1, 3)
    assert student.teaching(part) == taught.teaching
    with pytest.raises(ValueError, match="trajectories x cycles"):
        student.taught_by([f"quick/{run.directory.name}@3"])
    with pytest.raises(FileNotFoundError, match="run directory"):
        student.taught_by(["quick/nothing"])
    with pytest.raises(FileNotFoundError, match="complete"):
        student.taught_by([f"quick/{run.directory.name}@1x9"])


@pytest.fixture(scope="module")
def made(generations):
    return students.tables(generations)


def test_a_student_is_charged_for_everyone_who_taught(generations, made):
    table = made["students"].set_index(["label", "choice", "k", "epochs"])
    q0, first, second = (population.load(run) for _, run in generations)
    part = q0.prefix(1, 3)
    alone = table.loc[("student, 6 epochs", "uniform", 1, 2.0)]
    assert alone.total_epochs == 6 + 2
    assert alone.flops == pytest.approx(first.prefix(1, 1).flops)
    assert alone.total_flops == pytest.approx(part.flops + first.prefix(1, 1).flops)
    last = table.loc[("student of students", "uniform", 1, 2.0)]
    assert last.total_epochs == 6 + 4 + 2
    assert last.total_flops == pytest.approx(part.flops + first.flops + second.flops)
    assert table.loc[("q0", "learned", 3, 6.0)].total_flops == pytest.approx(part.flops)
    generation = made["students"].groupby("label").generation.first().to_dict()
    assert generation == {"q0": 0, "student, 6 epochs": 1, "student of students": 2}


def test_losses_are_those_of_the_mixtures(generations, made):
    _, first, _ = (population.load(run) for _, run in generations)
    table = made["students"].set_index(["label", "choice", "k", "epochs"])
    both = table.loc[("student, 6 epochs", "uniform", 2, 4.0)]
    for split in ("validation", "test"):
        assert both[split] == pytest.approx(ensemble.mixture_nll(np.full(2, 0.5), first.P[split]))
    assert both.inference == 2 * table.loc[("student, 6 epochs", "uniform", 1, 2.0)].inference
    documents = made["student_documents"]
    sums = documents.set_index(["method", "seed", "epochs"]).filter(regex="^d")
    tokens = sums.loc[("tokens", -1, 0.0)].sum()
    assert sums.loc[("student, uniform 2", 0, 10.0)].sum() / tokens == pytest.approx(both.test)


def test_the_teachers_mixture_stands_beside_its_student(generations, made):
    q0 = population.load(generations[0][1])
    rows = made["students"]
    alone = rows[(rows.label == "student, 6 epochs") & (rows.k == 1)].iloc[0]
    part = q0.prefix(1, 3)
    learned = rows[(rows.label == "q0") & (rows.choice == "learned") & (rows.epochs == 6)].iloc[0]
    assert alone.teacher_test == pytest.approx(learned.test, abs=1e-5)
    best = part.members.fitness_loss.idxmin()
    assert alone.snapshot_test == part.members.test_loss[best]
    assert rows[rows.label == "q0"].teacher_test.isna().all()


def test_the_share_kept_is_of_the_gain_from_snapshot_to_mixture():
    rows = pd.DataFrame({
        "label": ["a", "a", "q0"], "k": 1, "choice": ["uniform", "uniform", "greedy"],
        "snapshot_test": [5.0, 5.2, np.nan], "teacher_test": [4.0, 4.2, np.nan],
        "test": [4.25, 4.25, 5.0],
    })  # fmt: skip
    (row,) = students.kept(rows).itertuples()
    assert row.share == pytest.approx((0.75 + 0.95) / 2)
    assert row.seeds == 2


def test_means_are_over_seeds(made):
    table = pd.concat([made["students"], made["students"].assign(seed=1)])
    table.loc[table.seed == 1, "test"] += 0.2
    means = students.means(table)
    assert (means.seeds == 2).all()
    first = made["students"].test.to_numpy()
    np.testing.assert_allclose(means.loss, first + 0.1)


def test_the_plan_of_students_names_teachers_that_come_before():
    known = set()
    for each in plan.experiments("cpu", plan.STUDENTS):
        assert all(part.of.label in known for part in each.teachers)
        known.add(each.label)
    assert known
    assert not plan.experiments("quick", plan.STUDENTS)
