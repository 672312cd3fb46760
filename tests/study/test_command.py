"""The one command: what it refuses, and that it tells the truth about what it did."""

import itertools
from pathlib import Path

import pandas as pd
import pytest
from tiny import tiny_study

from q0lib import files, population, presets
from q0lib.study import __main__ as study
from q0lib.study.tables import store
from q0lib.sweeps import sweep


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "huge"], "unknown preset 'huge', known: quick, cpu, gpu, paper"),
        (["--seeds", "-1"], "seed must be >= 0, got -1"),
        (["--jobs", "0"], "jobs must be > 0, got 0"),
    ],
)
def test_bad_usage_is_one_sentence(arguments, words, capsys, run_folder):
    assert study.main(arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert words in errors[-1]
    assert not run_folder.exists() or not list(run_folder.rglob("*.ipynb"))


def test_a_failed_point_stops_the_study(monkeypatch, run_folder, tmp_path, capsys):
    tiny = tiny_study()
    monkeypatch.setattr(presets, "load", lambda name, *, seed=0, overrides=(): tiny)
    row = {"status": "failed", "seconds": 1.0, "reason": "In [4]: OSError: no space left",
           "output": "q0.ipynb"}  # fmt: skip
    calls = []
    monkeypatch.setattr(sweep, "sweep", lambda *a, **k: (calls.append(a), pd.DataFrame([row]))[1])
    assert study.main(["--out", str(tmp_path)]) == 1
    assert len(calls) == 1
    assert "q0: failed: In [4]: OSError: no space left" in capsys.readouterr().out


@pytest.fixture
def executed(monkeypatch, run_folder, tmp_path) -> list[str]:
    """The notebooks that a tiny study executes, while training and tables are made up."""
    tiny = [tiny_study(seed) for seed in (0, 1)]
    monkeypatch.setattr(presets, "load", lambda name, *, seed=0, overrides=(): tiny[seed])
    monkeypatch.setattr(population, "is_complete", lambda run: (run.directory / "made").exists())
    names, results = [], itertools.count()

    def swept(notebook: Path, fixed, grid, *, listed=({},), **options) -> pd.DataFrame:
        if notebook.stem == "train_population":
            for one in listed:
                run = tiny[one["seed"]].run(one["method"], one["epochs"])
                files.write_text(run.directory / "result.json", str(next(results)))
                files.write_text(run.directory / "made", "")
        else:
            names.append(notebook.stem)
            assert options["force"], "or what lies there could be of other seeds"
            assert {path.name for path in options["inputs"]} == {"result.json"}
            assert not (tmp_path / "study.json").exists(), "it is of what was there before"
            files.write_text(options["out"] / "it.ipynb", str(fixed))
        if notebook.stem == "04_epoch_efficiency":
            line = {"method": "q0", "reference": "ensemble", "axis": "epochs", "multiplier": 2.5,
                    "low": None, "high": None, "seeds": 1, "reached": 1, "clipped": 0.0,
                    "cases": ""}  # fmt: skip
            both = [{**line, "protocol": name} for name in ("clean", "paper")]
            store.write(pd.DataFrame(both), tmp_path / "epoch_multipliers.csv")
        row = {"status": "done", "seconds": 3.0, "reason": "", "output": notebook.name}
        return pd.DataFrame([row])

    monkeypatch.setattr(sweep, "sweep", swept)
    return names


def test_a_finished_study_prints_places_and_multipliers(executed, tmp_path, capsys):
    assert study.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert executed == ["00_quickstart", "04_epoch_efficiency"]
    assert "00_quickstart: done in 3 s" in said
    assert str(tmp_path) in said
    assert said.count("q0 matches the ensemble with fewer epochs: 2.5x") == 1


def test_a_study_is_executed_again_only_when_something_has_changed(
    executed, tmp_path, capsys, run_folder
):
    def again(*arguments: str) -> bool:
        executed.clear()
        capsys.readouterr()
        assert study.main(["--out", str(tmp_path), *arguments]) == 0
        said = capsys.readouterr().out
        assert said.count("q0 matches the ensemble with fewer epochs: 2.5x") == 1
        assert ("still valid, reused" in said) == (not executed)
        assert executed in ([], ["00_quickstart", "04_epoch_efficiency"])
        return bool(executed)

    assert again()
    assert not again()
    assert again("--seeds", "1"), "other seeds"
    assert again("--seeds", "0"), "what lay there was of other seeds"
    assert not again("--seeds", "0")
    table = tmp_path / "epoch_multipliers.csv"
    store.write(store.read(table).assign(low=1.0), table)
    assert again(), "a table was changed"
    (tmp_path / "00_quickstart/it.ipynb").unlink()
    assert again(), "a notebook is gone"
    (tmp_path / "study.json").write_text("{")
    assert again(), "half a manifest is none"
    assert not again()
    next(run_folder.rglob("q0-seed0-*/made")).unlink()
    assert again(), "a population was trained again"
    assert not again()


def test_a_study_that_fails_in_a_notebook_is_not_taken_for_a_finished_one(
    executed, tmp_path, monkeypatch
):
    arguments = ["--out", str(tmp_path)]
    assert study.main(arguments) == 0
    well, failing = sweep.sweep, {"00_quickstart": "failed"}

    def swept(notebook: Path, *given, **options) -> pd.DataFrame:
        return well(notebook, *given, **options).assign(status=failing.get(notebook.stem, "done"))

    monkeypatch.setattr(sweep, "sweep", swept)
    assert study.main([*arguments, "--seeds", "1"]) == 1
    assert not (tmp_path / "study.json").exists()
    monkeypatch.setattr(sweep, "sweep", well)
    executed.clear()
    assert study.main(arguments) == 0
    assert executed, "what lay there was begun with other seeds"
