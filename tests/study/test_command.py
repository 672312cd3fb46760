"""The one command: what it refuses, and that it tells the truth about what it did."""

from pathlib import Path

import pandas as pd
import pytest
from tiny import tiny_study

from q0lib import presets
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


def test_a_finished_study_prints_places_and_multipliers(monkeypatch, run_folder, tmp_path, capsys):
    tiny = tiny_study()
    monkeypatch.setattr(presets, "load", lambda name, *, seed=0, overrides=(): tiny)

    def swept(notebook: Path, fixed, grid, **options) -> pd.DataFrame:
        if notebook.stem != "train_population":
            assert options["force"], "or what lies there could be of other seeds"
        if notebook.stem == "04_epoch_efficiency":
            assert [path.name for path in options["inputs"]] == ["result.json"] * 3
            line = {"method": "q0", "reference": "ensemble", "axis": "epochs", "multiplier": 2.5,
                    "low": None, "high": None, "seeds": 1, "reached": 1, "clipped": 0.0,
                    "cases": ""}  # fmt: skip
            both = [{**line, "protocol": name} for name in ("clean", "paper")]
            store.write(pd.DataFrame(both), tmp_path / "epoch_multipliers.csv")
        row = {"status": "skipped", "seconds": 0.0, "reason": "", "output": notebook.name}
        return pd.DataFrame([row])

    monkeypatch.setattr(sweep, "sweep", swept)
    assert study.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "still valid, reused" in said
    assert str(tmp_path) in said
    assert said.count("q0 matches the ensemble with fewer epochs: 2.5x") == 1
