"""Training what is missing of the study, and what it cost."""

from contextlib import nullcontext

import pandas as pd
import pytest
from tiny import tiny_study

from q0lib import paths, population, presets, train
from q0lib.study import plan, runs
from q0lib.study.tables import store
from q0lib.sweeps import sweep


@pytest.mark.parametrize(
    ("preset", "parts", "words"),
    [
        ("huge", ["main"], "unknown preset 'huge', known: quick, cpu, gpu, paper"),
        ("cpu", ["mian"], "unknown part 'mian', known: tuning, main, "),
    ],
)
def test_unknown_names_are_one_sentence(preset, parts, words, capsys):
    with pytest.raises(ValueError, match=words):
        plan.experiments(preset, parts)
    assert runs.main(["--preset", preset, "--parts", *parts]) == 2
    assert words in capsys.readouterr().err


def test_costs_are_measured_once_for_what_is_trained_once(text, run_folder):
    shorter, longer, wider = (
        (plan.Experiment("main", name, "q0", epochs),
         tiny_study(0, f"q0.trajectories={count}").run("q0", epochs))
        for name, epochs, count in (("short", 2, 1), ("long", 4, 1), ("wide", 4, 2))
    )  # fmt: skip
    found = [shorter, longer, wider, shorter]
    before = runs.cost_table(found)
    assert not before.done.any()
    assert before.charged.tolist() == [2, 2, 2, 0]
    assert before.hours.tolist() == [0, 0, 0, 0]
    train.train_population(longer[1], text, progress=False)
    partly = runs.cost_table([wider])  # its first trajectory went further than it needs
    assert partly.done.tolist() == [False]
    assert partly.trained.tolist() == [2]
    assert (partly.hours > 0).all()
    train.train_population(wider[1], text, progress=False)
    after = runs.cost_table(found)
    assert after.trained.tolist() == after.charged.tolist()
    assert after.done.all()
    assert (after.hours[:3] > 0).all()
    assert after.hours[3] == 0
    records = [
        population.read_record(population.member_path(longer[1].directory, *at))
        for at in ((0, 1), (1, 0))
    ]
    whole = sum(record["train_seconds"] for record in records) / 3600
    parts = runs.summarise(after)
    assert parts.loc["all", "hours"] == pytest.approx(whole)
    assert parts.loc["main", ["runs", "done", "epochs"]].tolist() == [4, 4, 6]


def test_trials_are_trained_for_one_seed():
    planned = plan.experiments("cpu", ["tuning", "small"])
    found = runs.runs_of(planned, "cpu", [1, 2])
    assert {run.seed for each, run in found if each.part == "tuning"} == {1}
    assert {run.seed for each, run in found if each.part == "small"} == {1, 2}


def test_the_longest_population_is_trained_first(monkeypatch, run_folder):
    tiny = tiny_study()
    monkeypatch.setattr(presets, "load", lambda name, *, seed=0, overrides=(): tiny)
    begun = []

    def swept(notebook, fixed, grid, *, listed, **options) -> pd.DataFrame:
        begun.extend((one["method"], one["epochs"]) for one in listed)
        return pd.DataFrame([{"status": "done", "seconds": 1.0, "reason": "", "output": "n"}])

    monkeypatch.setattr(sweep, "sweep", swept)
    planned = [plan.Experiment("main", "", "single", epochs) for epochs in (2, 8, 4)]
    found = runs.train([*planned, plan.Experiment("main", "", "q0", 8)], "quick", [0])
    assert begun == [("q0", 8), ("single", 8), ("single", 4), ("single", 2)], "q0 has a teacher"
    assert [run.epochs for _, run in found] == [2, 8, 4, 8], "as planned"


def test_a_part_without_runs_is_one_sentence(capsys):
    assert runs.main(["--preset", "quick", "--parts", "tuning"]) == 2
    assert "preset quick has no runs in the parts tuning" in capsys.readouterr().err


def test_the_published_runs_are_those_of_todays_plan():
    """Else a preset or the plan has changed, and the tables and notebooks have not."""
    table = store.read(paths.RESULTS / "cpu" / "runs.csv")
    listed = runs.runs_of(plan.experiments("cpu"), "cpu", [0, 1, 2])
    assert table.part.tolist() == [each.part for each, _ in listed]
    assert table.label.tolist() == [each.label for each, _ in listed]
    assert table.run.tolist() == [f"cpu/{run.directory.name}" for _, run in listed]


@pytest.fixture
def swept(monkeypatch, run_folder):
    """What is asked of a sweep, which trains the first process's share and loses the others'."""
    asked = []

    def sweep_them(notebook, fixed, grid, *, listed, jobs, force, engine, writes):
        asked.extend(listed)
        status = ["failed" if point["share"] else "done" for point in listed]
        return pd.DataFrame({"status": status, "seconds": 1.0, "reason": "killed", "output": "a"})

    monkeypatch.setattr(sweep, "sweep", sweep_them)
    return asked


@pytest.mark.parametrize(("jobs", "shares"), [(1, [0]), (2, [0, 1]), (8, [0, 1, 2])])
def test_trajectories_that_need_no_other_are_shared_among_processes(swept, jobs, shares):
    study = tiny_study()
    pairs = [
        (plan.Experiment("main", name, name, 6), study.run(name, 6))
        for name in ("ensemble", "distilled_ensemble")
    ]
    with pytest.raises(RuntimeError, match="failed: killed") if jobs > 1 else nullcontext():
        runs._train_at_once(pairs, "quick", jobs)
    by_method = {name: [p["share"] for p in swept if p["method"] == name]
                 for name in ("ensemble", "distilled_ensemble")}  # fmt: skip
    assert by_method == {"ensemble": shares, "distilled_ensemble": [0]}
    assert [point["share"] for point in swept[:2]] == [0, 0], "every population is begun first"


def test_a_process_that_fails_is_no_failure_when_others_finish_its_population(swept, text):
    run = tiny_study().run("ensemble", 4)
    train.train_population(run, text, progress=False)
    runs._train_at_once([(plan.Experiment("main", "e", "ensemble", 4), run)], "quick", 2)
    assert len(swept) == 2
