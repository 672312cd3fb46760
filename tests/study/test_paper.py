"""The paper's numbers are loaded as they were printed."""

import math

import pandas as pd
import pytest

from q0lib import paths
from q0lib.study import paper


@pytest.mark.parametrize("name", paper.TABLES)
def test_every_table_loads_with_its_documented_types(name):
    frame = paper.load(name)
    table = paper.TABLES[name]
    assert list(frame.columns) == list(table.columns)
    for column, (kind, meaning) in table.columns.items():
        assert frame[column].dtype == kind
        assert meaning
    assert len(frame) >= 2
    assert frame.attrs["title"] == table.title
    assert frame.attrs["source"] == table.source


def test_every_file_is_documented_and_every_table_has_a_file():
    files = {path.stem for path in paths.PUBLISHED.glob("*.csv")}
    assert files == set(paper.TABLES)
    readme = (paths.PUBLISHED / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.csv`" in readme for name in files)


def test_reading_errors_stand_beside_digitised_figures_only():
    errors = {name: paper.load(name).attrs["reading_error"] for name in paper.TABLES}
    assert errors.pop("figure2_epoch_curves") == 0.0005
    assert errors.pop("figure3_trajectories") == 0.002
    assert errors.pop("figure4_prior_by_k") == 0.0005
    assert math.isnan(errors.pop("figure4_weights_at_k8"))
    assert set(errors.values()) == {0.0}


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no published table 'table9'; there are .*table1_main"):
        paper.load("table9")


def test_a_file_with_other_columns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path)
    (tmp_path / "table4_ablation.csv").write_text("configuration,loss\nfull,3.0\n")
    with pytest.raises(ValueError, match="columns must be"):
        paper.load("table4_ablation")
    with pytest.raises(FileNotFoundError):
        paper.load("table1_main")


def test_averages_of_table_2_are_the_means_of_its_tasks():
    frame = paper.load("table2_downstream").set_index(["approach", "task"])["accuracy"]
    tasks = frame.unstack()
    means = tasks[["arc_easy", "piqa", "sciq"]].mean(axis=1)
    assert (means - tasks["average"]).abs().max() < 0.00005 + 1e-9
    assert tasks["average"].to_dict() == {"baseline": 0.6443, "q0": 0.6573, "q0_scaled": 0.6600}


def test_figure_2_ends_where_table_1_says():
    ends = paper.figure2_curves().groupby("method")["loss"].last()
    main = paper.load("table1_main").set_index("approach")["val_loss"]
    assert ends["ensemble"] == main["baseline"]
    assert ends["q0"] == main["q0"]


def test_epoch_curves_are_long_and_without_gaps():
    frame = paper.figure2_curves()
    assert list(frame.columns) == ["method", "epochs", "loss", "low", "high"]
    assert frame.groupby("method").size().to_dict() == {
        "ensemble": 8,
        "q0": 8,
        "q0_k8": 8,
        "single": 2,
    }
    assert not frame.isna().any(axis=None)
    pd.testing.assert_series_equal(
        frame["high"] - frame["loss"], frame["loss"] - frame["low"], check_names=False
    )
    assert (frame["high"] - frame["loss"]).max() == pytest.approx(0.0005)


def test_a_missing_count_stays_missing():
    main = paper.load("table1_main").set_index("approach")
    assert main.loc["baseline", "cycles"] is pd.NA
    assert main.loc["q0_scaled", "cycles"] == 96
