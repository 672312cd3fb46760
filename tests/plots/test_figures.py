"""What the figures draw is what the tables say; they are whole, repeatable and need no display."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from q0lib import efficiency, paths
from q0lib.plots import figures, labels
from q0lib.study import paper


@pytest.fixture(autouse=True)
def house_style():
    with mpl.rc_context():
        figures.style()
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Run the cells of paper_figures; return the figures it saved by name, and their folder."""
    folder = tmp_path_factory.mktemp("figures")
    notebook = json.loads((paths.NOTEBOOKS / "paper_figures.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    saved = {}
    keep = figures.save

    def save(fig, path):
        saved[path.name] = fig
        keep(fig, path)

    with pytest.MonkeyPatch.context() as patch, mpl.rc_context():
        patch.setattr(figures, "save", save)
        plt.switch_backend("agg")
        names: dict[str, Any] = {"display": lambda *shown: None}
        for cell in cells:
            exec(cell, names)
            if "figure_folder" in names:
                names["figure_folder"] = str(folder)
        plt.close("all")
    return saved, folder


def drawn(ax, label):
    """Return x and y of the one line of that label."""
    (line,) = [line for line in ax.get_lines() if line.get_label() == label]
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def assert_drawn(ax, label, x, y):
    xs, ys = drawn(ax, label)
    np.testing.assert_array_equal(xs, np.asarray(x, float))
    np.testing.assert_array_equal(ys, np.asarray(y, float))


# The paper's figures


def test_every_figure_is_written_twice_and_committed(pictures):
    saved, folder = pictures
    written = {path.name for path in folder.iterdir()}
    assert written == {f"{name}.{kind}" for name in saved for kind in ("png", "pdf")}
    committed = {path.name for path in (paths.FIGURES / "paper").iterdir()}
    assert committed == written


def test_pngs_have_print_width_at_200_dpi(pictures):
    _, folder = pictures
    widths = {path.stem: Image.open(path).width for path in folder.glob("*.png")}
    assert widths.pop("data_efficiency_accuracy") == 1400
    assert set(widths.values()) == {680}


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("figure1_epochs", ["ensemble", "q0", "single"]),
        ("figure2_epochs_k8", ["ensemble", "q0", "q0_k8"]),
    ],
)
def test_epoch_figures_draw_figure_2(pictures, name, methods):
    (ax,) = pictures[0][name].axes
    curves = paper.figure2_curves()
    for method in methods:
        rows = curves[curves["method"] == method]
        assert_drawn(ax, method, rows["epochs"], rows["loss"])
    assert any("55.5 epochs (4.61x)" in text.get_text() for text in ax.texts)
    x, y = drawn(ax, "target")
    assert x == pytest.approx([55.48148, 256])
    assert y == pytest.approx([3.0476, 3.0476])


def test_the_compute_figure_draws_the_same_losses(pictures):
    (ax,) = pictures[0]["figure2_compute"].axes
    wide = paper.load("figure2_epoch_curves")
    x, y = drawn(ax, "ensemble")
    np.testing.assert_allclose(x, wide["total_epochs"] * 0.150)
    np.testing.assert_array_equal(y, wide["baseline_ensemble"])
    x, y = drawn(ax, "q0")
    np.testing.assert_array_equal(y, wide["q0_best_k"])
    assert x[0] == pytest.approx((16 * 210 + 16 * 280) / 1000)
    assert x[-1] == pytest.approx((32 * 210 + 224 * 280) / 1000)  # two trajectories


def test_figure_3_draws_losses_and_gaps(pictures):
    above, below = pictures[0]["figure3_trajectories"].axes
    table = paper.load("figure3_trajectories")
    losses = table[[f"n{n}" for n in range(1, 6)]]
    gaps = losses.sub(losses.min(axis=1), axis=0) * 1000
    for n in range(1, 6):
        assert_drawn(above, f"N = {n}", table["total_epochs"], losses[f"n{n}"])
        assert_drawn(below, f"N = {n}", table["total_epochs"], gaps[f"n{n}"])
    assert_drawn(above, "N = 1 extrapolated", [256], [3.016])
    assert_drawn(above, "N = 1 measured", [32, 64, 128], [3.078, 3.039, 3.023])
    assert drawn(below, "resolution")[1] == pytest.approx([4, 4])


def test_figure_4_draws_both_priors_and_every_weight(pictures):
    (ax,) = pictures[0]["figure4_prior_by_k"].axes
    table = paper.load("figure4_prior_by_k")
    assert_drawn(ax, "q0", table["k"], table["learned_top_k"])
    assert_drawn(ax, "lowest_loss", table["k"], table["lowest_fitness_loss_uniform"])
    texts = {text.get_text() for text in ax.texts}
    assert {"0.0320 apart", "0.0023 apart"} <= texts
    (ax,) = pictures[0]["figure4_weights_at_k8"].axes
    table = paper.load("figure4_weights_at_k8")
    shown = [drawn(ax, f"{name}") for name in ("low loss, kept", "high loss, kept")]
    shown.append(drawn(ax, "low loss, dropped"))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in shown]), table["fitness_loss"])
    np.testing.assert_array_equal(np.concatenate([y for _, y in shown]), table["weight"])


def test_figure_5_draws_the_real_schedule(pictures):
    top, middle, bottom = pictures[0]["figure5_method"].axes
    epochs, rate = drawn(top, "learning_rate")
    _, decay = drawn(top, "weight_decay")
    assert rate.min() == pytest.approx(0.08)
    assert decay.min() == pytest.approx(0.7)
    np.testing.assert_allclose(decay, 0.7 + 0.3 * (1 - rate) / 0.92)
    ends = np.arange(2.0, 25, 2)
    np.testing.assert_array_equal(drawn(top, "snapshots")[0], ends)
    np.testing.assert_allclose(drawn(top, "snapshots")[1], 0.08)
    np.testing.assert_array_equal(drawn(middle, "snapshots")[0], ends)
    assert len(bottom.patches) == 12
    assert epochs[-1] == 24


def test_data_efficiency_figures_draw_tables_1_2_5_and_6(pictures):
    saved, _ = pictures
    ax = saved["data_efficiency_loss"].axes[0]
    table = paper.load("table5_reference_loss")
    assert_drawn(ax, "reference", table["tokens"], table["val_loss"])
    sizes = paper.load("repo_reference_loss_by_size")
    for size in ("d12", "d20", "d26"):
        assert_drawn(ax, size, sizes["tokens"], sizes[size])
    main = paper.load("table1_main").replace({"approach": {"baseline": "ensemble"}})
    for row in main.to_dict("records"):
        tokens, loss = drawn(ax, row["approach"])
        assert loss == row["val_loss"]
        assert tokens / 1e8 == pytest.approx(row["data_efficiency"], abs=0.001)
    accuracies, scores = (
        paper.load(name) for name in ("table6_reference_accuracy", "table2_downstream")
    )
    panels = saved["data_efficiency_accuracy"].axes
    for ax, task in zip(panels, ("average", "arc_easy", "piqa", "sciq"), strict=True):
        assert_drawn(ax, "reference", accuracies["tokens"], accuracies[task])
        for row in scores[scores["task"] == task].to_dict("records"):
            tokens, value = drawn(ax, row["approach"].replace("baseline", "ensemble"))
            assert value == row["accuracy"]
            assert round(float(tokens[0]) / 1e8, 1) == row["data_efficiency"]


def test_one_colour_per_method_in_every_figure(pictures):
    for fig in pictures[0].values():
        for ax in fig.axes:
            for line in ax.get_lines():
                color = figures.METHOD_COLORS.get(str(line.get_label()))
                assert color is None or line.get_color() == color


def test_no_text_of_a_figure_covers_another(pictures):
    for name, fig in pictures[0].items():
        canvas = FigureCanvasAgg(fig)
        canvas.draw()
        renderer = canvas.get_renderer()
        for ax in fig.axes:
            boxes = [
                text.get_window_extent(renderer).shrunk(0.96, 0.8)
                for text in ax.texts
                if re.search(r"\w", text.get_text())
            ]
            clashes = sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
            assert clashes == 0, name


# Curves of any study


def study(**losses):
    budgets = [2, 4, 8, 16, 32]
    return pd.concat(
        pd.DataFrame({"method": method, "epochs": budgets[: len(values)], "loss": values})
        for method, values in losses.items()
    )


@pytest.mark.parametrize("log", [False, True])
def test_crossings_of_every_kind_are_drawn(log):
    frame = study(ensemble=[5.3, 5.2, 5.1], q0=[5.2, 5.0, 4.9], single=[5.3, 5.25], q0_k8=[5.0])
    fig = Figure()
    ax = fig.subplots()
    figures.epoch_curves(ax, frame, efficiency.crossings(frame), log=log)
    fig.canvas.draw()
    texts = [text.get_text() for text in ax.texts]
    assert "3.0 epochs (2.67x)" in texts
    assert "single model: never reached (best 5.2500 at 4)" in texts
    assert "before 2 epochs (more than 4.0x)" in texts
    marks = [line for line in ax.get_lines() if line.get_label() == "crossing"]
    at = sorted(np.concatenate([np.asarray(line.get_xdata()) for line in marks]))
    assert at == pytest.approx([2.0, 3.0])
    for method, rows in frame.groupby("method"):
        assert_drawn(ax, method, rows["epochs"], rows["loss"])


def test_on_a_log_axis_the_crossing_lies_on_the_drawn_line():
    frame = study(ensemble=[5.3, 5.2, 5.1], q0=[5.2, 5.0, 4.9])
    ax = Figure().subplots()
    figures.epoch_curves(ax, frame, efficiency.crossings(frame), log=True)
    joined = [line for line in ax.get_lines() if line.get_label() == "between points"]
    x, y = (np.asarray(values, float) for values in joined[1].get_data())
    assert np.interp(3.0, x, y) == pytest.approx(5.1, abs=1e-9)


def test_a_single_point_an_unknown_method_and_an_unknown_interval():
    frame = pd.DataFrame({"method": ["mine"], "epochs": [4], "loss": [5.0]})
    fig = Figure()
    figures.epoch_curves(fig.subplots(), frame.assign(low=np.nan, high=np.nan))
    fig.canvas.draw()


@pytest.mark.parametrize("log", [False, True])
def test_the_name_of_a_line_that_ends_early_stands_clear_of_those_that_go_on(log):
    frame = study(q0=[5.2, 5.0, 4.9, 4.88, 4.87], ensemble=[5.3, 5.1, 4.91])
    fig = Figure(figsize=(4.8, 3.4))
    ax = fig.subplots()
    figures.epoch_curves(ax, frame, log=log)
    FigureCanvasAgg(fig).draw()
    (name,) = [text for text in ax.texts if text.get_text().startswith("ensemble")]
    box = name.get_window_extent()
    for x, y in ax.transData.transform(ax.get_lines()[0].get_xydata()):
        assert not (box.x0 <= x <= box.x1 and y >= box.y0)
    (end,) = [text for text in ax.texts if text.get_text().startswith("q0")]
    assert end.xy == pytest.approx((1.0, 4.87)), "beside the last point, where nothing goes on"


@pytest.mark.parametrize(("floor", "side"), [(0.0, "below"), (0.98, "above")])
def test_a_name_sinks_below_its_line_where_that_is_the_shorter_way_and_has_room(floor, side):
    """Lines close above the end for a long way up; below it nothing, if the axes go there."""
    ax = plt.subplots()[1]
    for height in np.linspace(1.02, 1.6, 8):
        ax.plot([0, 10], [height, height], color="0.5")
    ax.plot([0, 5], [1, 1], color="k")
    ax.set_ylim(floor, 2)
    labels.end_labels(ax, [labels.Note(5, 1, "ends", "k"), labels.Note(10, 1.6, "goes on", "0.5")])
    (name,) = [text for text in ax.texts if text.get_text() == "ends"]
    assert (name.xy[1] < 1) == (side == "below")
    assert not any(abs(name.xy[1] - height) < 0.02 for height in np.linspace(1.02, 1.6, 8))


def test_gaps_join_the_budgets_that_a_number_of_trajectories_has():
    frame = pd.DataFrame(
        {"total_epochs": [32, 64, 96], "n1": [5.0, 4.9, 4.8], "n2": [5.1, np.nan, 4.7],
         "extrapolated": None}
    )  # fmt: skip
    ax = Figure().subplots()
    figures.trajectory_gaps(ax, frame, 0.0)
    xs, ys = drawn(ax, "N = 2 measured")
    assert xs.tolist() == [32, 96]
    assert ys == pytest.approx([100, 0])
    assert "resolution" not in [line.get_label() for line in ax.get_lines()]


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 5)), min_size=1, max_size=8))
def test_spread_keeps_order_distance_and_middle(things):
    positions, sizes = np.array(things).T
    placed = labels.spread(positions, sizes)
    order = np.argsort(positions, kind="stable")
    apart = (sizes[order][1:] + sizes[order][:-1]) / 2
    assert (np.diff(placed[order]) >= apart - 1e-9).all()
    assert placed.mean() == pytest.approx(np.mean(positions), abs=1e-6)


# Files, and machines without a display


def test_saving_is_repeatable_and_leaves_nothing_else(tmp_path):
    fig = Figure()
    fig.subplots().plot([1, 2], [3, 4])
    for folder in ("one", "two"):
        figures.save(fig, tmp_path / folder / "fig.v1")
    for name in ("fig.v1.png", "fig.v1.pdf"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert len(list((tmp_path / "one").iterdir())) == 2
    assert b"CreationDate" not in (tmp_path / "one" / "fig.v1.pdf").read_bytes()


def test_import_chooses_no_backend_and_drawing_needs_no_display(tmp_path):
    program = f"""
import sys
from q0lib.plots import figures, schematic
assert "matplotlib.pyplot" not in sys.modules
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
fig = Figure()
fig.subplots().plot([1, 2])
figures.save(fig, {str(tmp_path / "fig")!r})
"""
    hidden = {"DISPLAY", "WAYLAND_DISPLAY"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"MPLBACKEND": "tkagg", "PYTHONPATH": str(paths.ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert (tmp_path / "fig.png").stat().st_size > 0


def test_choices_are_drawn_as_their_mean_over_seeds():
    frame = pd.DataFrame(
        [(seed, choice, k, base + seed / 10 - k / 100)
         for seed in (0, 1) for choice, base in (("greedy", 4.0), ("truncate", 4.2))
         for k in (1, 2, 8)],
        columns=["seed", "choice", "k", "loss"],
    )  # fmt: skip
    ax = Figure().subplots()
    figures.by_choice(ax, frame)
    lines = {line.get_color(): line for line in ax.lines}
    greedy = lines[figures.CHOICE_COLORS["greedy"]]
    assert list(greedy.get_xdata()) == [1, 2, 8]
    assert list(greedy.get_ydata()) == pytest.approx([4.04, 4.03, 3.97])
    assert {figures.CHOICE_LABELS["greedy"], figures.CHOICE_LABELS["truncate"]} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }


def test_ticks_of_a_log_axis_keep_apart():
    assert figures._apart([16, 20, 24, 28, 32, 112, 128, 144, 256, 512]) == [
        *(16, 24, 32, 128, 256, 512)
    ]  # fmt: skip
    assert figures._apart([4, 8, 24, 48]) == [4, 8, 24, 48]


def test_a_forest_has_a_line_a_variant_from_the_top_and_its_own_seeds():
    frame = pd.DataFrame(
        {"variant": ["a", "b"], "value": [3.0, -1.0], "low": [1.0, np.nan],
         "high": [5.0, np.nan], "seeds": [[2.0, 4.0], [-1.0]]}
    )  # fmt: skip
    fig = Figure()
    ax = fig.subplots()
    figures.forest(ax, frame, xlabel="x")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first row is on top"
    drawn = {line.get_label(): [] for line in ax.lines}
    for line in ax.lines:
        drawn[line.get_label()].append(list(line.get_xdata()))
    assert drawn["mean"] == [[3.0], [-1.0]]
    assert drawn["interval"] == [[1.0, 5.0]], "one seed has no interval"
    assert drawn["seeds"] == [[2.0, 4.0], [-1.0]]


def test_trajectories_show_snapshots_and_mixtures_and_single_models():
    frame = pd.DataFrame(
        {"method": ["q0"] * 4 + ["single"] * 2, "seed": [0, 0, 1, 1, 0, 0],
         "epochs": [2, 4, 2, 4, 2, 4], "member": [5.0, 4.8, 5.2, 4.6, 5.1, 5.3],
         "mixture": [5.0, 4.7, 5.2, 4.5, np.nan, np.nan]}
    )  # fmt: skip
    fig = Figure()
    ax = fig.subplots()
    figures.along_trajectories(ax, frame, ylabel="Test loss")
    lines = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert lines["q0 member"] == pytest.approx([5.1, 4.7])
    assert lines["q0 mixture"] == pytest.approx([5.1, 4.6])
    assert lines["single member"] == [5.1, 5.3]
    assert "single mixture" not in lines
    said = [text.get_text() for text in ax.texts]
    assert sorted(said) == ["q0: a snapshot", "q0: mixture", "single models"]


def test_multipliers_by_budget_are_drawn_beside_the_papers():
    frame = pd.DataFrame(
        {"source": ["q0", "q0", "paper"], "epochs": [64, 256, 256], "multiplier": [2.0, 6.0, 4.6],
         "low": [1.0, 5.0, np.nan], "high": [3.0, 7.0, np.nan]}
    )  # fmt: skip
    fig = Figure()
    ax = fig.subplots()
    figures.multiplier_by_budget(ax, frame)
    assert {line.get_label() for line in ax.lines} == {"q0", "paper"}
    assert "the paper" in [text.get_text() for text in ax.texts]


def test_multipliers_stand_in_their_rows_one_above_the_other_and_the_paper_as_a_star():
    frame = pd.DataFrame(
        [("best K", "3 seeds", 5.0, 4.0, 7.0), ("best K", "8 seeds", 5.2, 4.8, 5.6),
         ("best K", "paper", 4.6, np.nan, np.nan), ("K = 8", "8 seeds", 3.0, 2.5, 3.5)],
        columns=["what", "source", "multiplier", "low", "high"],
    )  # fmt: skip
    fig, ax = plt.subplots()
    figures.multipliers(ax, frame, xlabel="Times fewer epochs")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["best K", "K = 8"]
    lines = [line.get_xydata().tolist() for line in ax.lines]
    (few, upper), (many, lower) = lines[1][0], lines[3][0]
    assert (few, many) == (5.0, 5.2)
    assert upper < 0 < lower, "the first source above"
    assert [x for x, _ in lines[0]] == [4.0, 7.0]
    assert lines[4] == [[4.6, 0.0]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "3 seeds", "8 seeds", "paper"
    ]  # fmt: skip
    plt.close(fig)
