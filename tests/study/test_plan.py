"""The list of runs that the measured study is made of: what each changes, and what it is for."""

import pytest

from q0lib import config, paths, presets
from q0lib.study import plan
from q0lib.study.tables import store


def changed(one: config.Run, other: config.Run) -> set[str]:
    """The fields by which two runs differ, of what decides them."""
    left, right = one.decides, other.decides
    plain = {name for name in left if not isinstance(left[name], dict)}
    found = {name for name in plain if left[name] != right[name]}
    for section in ("corpus", "model", "method"):
        found |= {
            f"{section}.{name}"
            for name in left[section].keys() | right[section].keys()
            if left[section].get(name) != right[section].get(name)
        }
    return found


@pytest.mark.parametrize("preset", presets.NAMES)
def test_every_experiment_resolves_to_its_budget_and_curves_end_where_training_does(preset):
    for each in plan.experiments(preset):
        assert each.run(preset, 0).epochs == pytest.approx(each.epochs), each.label
    extent = plan.load(preset)
    assert extent.budgets[-1] == max(count * epochs for count, epochs in extent.q0)
    assert {extent.ensemble, *extent.single} <= set(extent.budgets)
    study = presets.load(preset)
    member = study.methods["ensemble"].epochs_per_cycle
    assert sum(budget % member == 0 for budget in extent.budgets) >= 2


def test_methods_can_be_asked_for():
    some = plan.experiments("quick", ["main"], ["q0", "ensemble"])
    assert {each.method for each in some} == {"q0", "ensemble"}
    with pytest.raises(ValueError, match="unknown method 'q9', known: q0, ensemble"):
        plan.experiments("quick", ["main"], ["q9"])


def test_an_ablation_differs_from_the_full_recipe_by_what_it_says():
    runs = {each.label: each.run("cpu", 0) for each in plan.experiments("cpu", ["ablation"])}
    full = runs.pop(plan.FULL)
    pace = {"method.epochs_per_cycle", "method.horizon", "method.distill_after"}
    assert {label: changed(run, full) for label, run in runs.items()} == {
        "no distillation": {"method.teacher"},
        "teacher every second cycle": {"method.teacher_every"},
        "flat weight decay": {"method.wd_schedule"},
        "weight decay in phase": {"method.wd_schedule"},
        "the paper's perturbation": {"method.perturb_start", "method.perturb_end"},
        "cycles of 1 epoch": pace,
        "cycles of 4 epochs": pace,
        "cycles of 4 epochs, no distillation": {*pace, "method.teacher"},
        "EMA in the cycle": {"method.ema_fraction"},
    }
    for run in runs.values():  # the teacher comes at the same epoch, however long a cycle is
        assert run.method.distill_after * run.method.epochs_per_cycle == pytest.approx(
            full.method.distill_after * full.method.epochs_per_cycle
        )


def test_prefixes_are_trained_once():
    """The splits' own point and the ablations' full recipe are runs of the main part."""
    main = {each.run("cpu", 1).directory for each in plan.experiments("cpu", ["main"])}
    for part, label in (("splits", "8 models x 32 epochs"), ("ablation", plan.FULL)):
        same = [each for each in plan.experiments("cpu", [part]) if each.label == label]
        assert same
        assert {each.run("cpu", 1).directory for each in same} <= main


def test_the_reference_is_one_epoch_on_more_and_more_tokens():
    planned = plan.experiments("cpu", ["reference", "reference_sizes"])
    runs = [each.run("cpu", 0) for each in planned]
    base = presets.load("cpu").corpus
    assert {run.epochs for run in runs} == {1.0}
    assert sorted({run.corpus.train_tokens / base.train_tokens for run in runs}) == [
        1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20,
    ]  # fmt: skip
    assert len({run.method for run in runs}) == 1, "one recipe for all"
    assert len({run.model for run in runs}) == 3
    assert len({run.key for run in runs}) == 33


def test_where_the_best_size_is_settled_other_seeds_train_it_alone():
    extent = plan.load("cpu")
    settled = [multiple for multiple in extent.multiples if multiple <= extent.settled_to]
    runs = [each.run("cpu", 1) for each in plan.experiments("cpu", ["reference"])]
    assert len(runs) == len(settled)
    table = store.read(paths.RESULTS / "cpu" / "reference.csv", seed=[0])
    table = table[table.recipe.isna()]
    best = table.loc[table.groupby("multiple").validation.idxmin()]
    assert {f"width {run.model.width}" for run in runs} == set(best["size"])
    assert plan.experiments("quick", ["reference_sizes"]) == []
    quick = [each.run("quick", 1) for each in plan.experiments("quick", ["reference"])]
    assert len({run.model for run in quick}) == 3


def test_a_tuned_reference_is_the_settled_model_by_other_recipes_only():
    extent = plan.load("cpu")
    runs = [each.run("cpu", 0) for each in plan.experiments("cpu", ["tuned_reference"])]
    others = [each.run("cpu", 0) for each in plan.experiments("cpu", ["reference"])]
    assert len(runs) == len(others) * len(extent.recipes) > 0
    assert {run.model for run in runs} == {run.model for run in others}
    assert len({run.key for run in (*runs, *others)}) == len(runs) + len(others)


def test_a_plan_that_cannot_be_read_names_its_file(tmp_path, monkeypatch):
    good = (plan.PLANS / "quick.toml").read_text()
    bad = {
        "budgets = [1\n" + good: r"quick\.toml: Unclosed array",
        "bugdets = [1]\n" + good: r"quick\.toml: unknown field 'bugdets', known: budgets, q0,",
        good.replace("ensemble = 48", ""): r"quick\.toml: missing field 'ensemble', known",
        good + "\n[small.16]\nq9 = 'alpha=1'\n": r"quick\.toml: unknown method 'q9', known: q0",
        "trials = 'some.csv'\n" + good: r"some\.csv: columns must be \['method', 'epochs',",
    }
    (tmp_path / "some.csv").write_text("method,fields\nq0,alpha=1\n")
    monkeypatch.setattr(plan, "PLANS", tmp_path)
    for text, words in bad.items():
        (tmp_path / "quick.toml").write_text(text)
        with pytest.raises(ValueError, match=words):
            plan.load.__wrapped__("quick")


def test_the_published_runs_changed_what_todays_plan_changes():
    """What it says beyond the keys, such as that a trial of q0 is one trajectory."""
    table = store.read(paths.RESULTS / "cpu" / "runs.csv", seed=[0]).fillna({"overrides": ""})
    planned = plan.experiments("cpu")
    assert table.overrides.tolist() == [" ".join(each.overrides) for each in planned]
    assert table.epochs.tolist() == pytest.approx([each.epochs for each in planned])
    trials = [each for each in planned if each.part == "tuning" and each.method == "q0"]
    assert all("q0.trajectories=1" in each.overrides for each in trials)


@pytest.mark.parametrize("budget", [1, 2, 4, 8])
def test_the_recipes_of_small_budgets_are_the_best_of_their_trials(budget):
    """By validation loss: q0's learned mixture, the others' uniform one."""
    trials = store.read(paths.RESULTS / "cpu" / "tuning.csv")
    trials = trials[(trials.epochs == budget) & ~trials.changed.str.contains("corpus")]
    tuned = dict(plan.load("cpu").small[budget])
    assert tuned.pop("tail") == tuned["single"]
    for method, fields in tuned.items():
        rows = trials[(trials.method == method) & trials.changed.str.contains("batch_tokens")]
        rows = rows[rows.members >= (1 if method == "single" else 2)]
        best = rows.loc[rows[presets.load("cpu").methods[method].mixture].idxmin()]
        assert len(rows) > 1
        assert set(fields.split()) <= set(best.changed.split())


def test_snapshots_in_the_tail_are_of_the_same_run_as_the_one_model():
    planned = plan.experiments("cpu", ["small"])
    runs = {(each.label, each.epochs): each.run("cpu", 0) for each in planned}
    for budget in plan.load("cpu").small:
        one, tail = (
            runs[name, budget] for name in ("one model", "one model, snapshots in its tail")
        )
        assert changed(tail, one) >= {"method.tail"}
        for field in ("batch_tokens", "weight_decay", "matrix_lr", "schedule"):
            assert getattr(tail.method, field) == getattr(one.method, field)
