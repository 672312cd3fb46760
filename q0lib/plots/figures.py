"""Figures in the house style: each function draws one on the `Axes` it is given.

Frames in, ink out: nothing here computes a result. A method has the same colour and marker in
every figure. Losses are nats per token.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from q0lib import files
from q0lib.plots.labels import Note, drop_labels, end_labels, say

STYLE = Path(__file__).with_name("q0.mplstyle")
COLUMN, PAGE = 3.4, 7.0  # widths in inches

# Okabe and Ito's palette, safe for the usual kinds of colour blindness
METHOD_COLORS = {
    "q0": "#0072B2",
    "q0_k8": "#009E73",
    "q0_greedy_k8": "#56B4E9",
    "q0_scaled": "#0072B2",
    "ensemble": "#D55E00",
    "distilled_ensemble": "#CC79A7",
    "single": "#000000",
    "lowest_loss": "#E69F00",
    "q0_undistilled": "#E69F00",
    "student": "#882255",
    "reference": "#666666",
}
METHOD_LABELS = {
    "q0": "q0, best K",
    "q0_k8": "q0, K = 8",
    "q0_greedy_k8": "q0, K = 8, greedy",
    "q0_scaled": "q0, 960 epochs",
    "ensemble": "ensemble",
    "distilled_ensemble": "distilled\nensemble",
    "single": "single model",
    "lowest_loss": "lowest loss",
    "reference": "one epoch on\nfresh tokens",
}
METHOD_MARKERS = {
    "q0": "o",
    "q0_k8": "D",
    "q0_greedy_k8": "d",
    "q0_scaled": "*",
    "ensemble": "s",
    "distilled_ensemble": "v",
    "single": "^",
    "lowest_loss": "s",
    "reference": ".",
}
CHOICE_COLORS = {
    "prior": "#56B4E9",
    "greedy": "#0072B2",
    "refit": "#009E73",
    "truncate": "#CC79A7",
    "lowest": "#E69F00",
    "uniform": "#666666",
}
CHOICE_LABELS = {
    "prior": "all, exact weights",
    "greedy": "greedy, refitted",
    "refit": "cut, refitted",
    "truncate": "cut (paper)",
    "lowest": "lowest losses",
    "uniform": "evenly spread",
}
LOSS = "Validation loss (nats per token)"
TRAJECTORY_COLORS = ["#440154", "#414487", "#2a788e", "#22a884", "#5cb85c"]  # in order of N


def style() -> None:
    """Apply the house style; within `matplotlib.rc_context()` only there."""
    mpl_style.use(STYLE)


def save(fig: Figure, path: Path | str) -> None:
    """Write `path`.png (200 dpi) and `path`.pdf, each whole or not at all, without dates."""
    undated = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}
    for kind, metadata in undated.items():
        target = Path(path)
        with files.replacing(target.with_name(f"{target.name}.{kind}")) as temporary:
            fig.savefig(temporary, metadata=metadata)


def epoch_curves(
    ax: Axes,
    frame: pd.DataFrame,
    crossings: pd.DataFrame | None = None,
    *,
    x: str = "epochs",
    xlabel: str = "Total training epochs",
    ylabel: str = LOSS,
    log: bool = False,
) -> None:
    """Draw loss against cost, a line a method, and where each meets the reference's last loss.

    frame: columns method, `x`, loss; optionally low and high, drawn as error bars.
    crossings: as `efficiency.crossings` returns them for this frame. A crossing is a hollow
    marker with its range, a line down to its label; one before the first point is an arrowhead
    there; "never reached" is text alone.
    log: a logarithmic x axis. The lines stay linear in x, as crossings are interpolated, so they
    bend there.
    """
    ends = []
    ranged = {"low", "high"} <= set(frame.columns)
    drawn = [name for name in reversed(METHOD_COLORS) if name in set(frame["method"])]
    for method in [*sorted(set(frame["method"]) - set(drawn)), *drawn]:  # q0 on top
        rows = frame[frame["method"] == method].sort_values(x)
        _curve(ax, rows[x], rows["loss"], method, dense=log)
        if ranged:
            _error_bars(ax, rows[x], rows["loss"], rows["low"], rows["high"], method)
        last = rows.iloc[-1]
        text = f"{_label(method)}\n{last['loss']:.{3 if ranged else 4}f}"
        ends.append(Note(float(last[x]), float(last["loss"]), text, _color(method)))
    if log:
        ax.set_xscale("log", base=2)
        _plain_ticks(ax, _apart(frame[x].unique()))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if crossings is not None and len(crossings):
        _mark_crossings(ax, crossings, frame.groupby("method")[x].min())
    end_labels(ax, ends)


def trajectories(
    ax: Axes, frame: pd.DataFrame, error: float, regimes: Sequence[tuple[float, float, str]] = ()
) -> None:
    """Draw loss against total epochs for each number of trajectories, over the regimes' bands.

    frame: columns total_epochs, n1, n2, ..., and extrapolated (the column that is, or missing);
    error: of a reading (0: none); regimes: (from epochs, to epochs, label) of each band.
    """
    budgets = frame["total_epochs"].to_numpy(float)
    for color, name in zip(TRAJECTORY_COLORS, _counts(frame), strict=False):
        known = frame[frame[name].notna()]
        x, losses = (known[column].to_numpy(float) for column in ("total_epochs", name))
        text = f"N = {name[1:]}"
        _extrapolated(ax, x, losses, _guessed(known, name), color, text)
        ax.errorbar(x, losses, yerr=error, fmt="none", ecolor=color, elinewidth=0.7)
        say(ax, text, (x[0], losses[0]), color, (-5, 0), ha="right")
    ax.set_ylabel(LOSS)
    _budget_axis(ax, budgets, regimes)


def trajectory_gaps(
    ax: Axes, frame: pd.DataFrame, error: float, regimes: Sequence[tuple[float, float, str]] = ()
) -> None:
    """Draw how far each number of trajectories is above the best at its budget (millinats).

    Arguments as `trajectories`; a budget with a single number has no gap to draw. Below the dashed
    line, if there is one, the reading cannot tell two apart: both are uncertain by `error`.
    """
    budgets = frame["total_epochs"].to_numpy(float)
    names = _counts(frame)
    gaps = frame[names].sub(frame[names].min(axis=1), axis=0) * 1000
    gaps = gaps.where(frame[names].notna().sum(axis=1) > 1)
    for color, name in zip(TRAJECTORY_COLORS, names, strict=False):
        known = gaps[name].notna().to_numpy()
        x, above, guessed = budgets[known], gaps[name].to_numpy()[known], _guessed(frame, name)
        _extrapolated(ax, x, above, guessed[known], color, f"N = {name[1:]}")
    if error:
        ax.axhline(2000 * error, color="0.4", linewidth=0.7, linestyle="--", label="resolution")
        across = ax.get_yaxis_transform()
        say(ax, "reading error", (0.0, 2000 * error), "0.4", (3, 5), xycoords=across)
    ax.set(ylim=(-1, 22), ylabel="Above the best N\n(0.001 nats)")
    _budget_axis(ax, budgets, regimes)


def along_trajectories(ax: Axes, frame: pd.DataFrame, *, ylabel: str, log: bool = False) -> None:
    """Draw what single snapshots lose, and what the mixture of all up to there loses, by epochs.

    frame: columns method, seed, epochs, member, mixture; a line is the mean over seeds and its
    band their range. Snapshots are thin and dashed, mixtures solid, a method in one colour. A
    method without mixtures (nan) is drawn as single models, solid. log: a logarithmic x axis.
    """
    ends = []
    for method, rows in frame.groupby("method", sort=False):
        color, alone = _color(str(method)), rows["mixture"].isna().all()
        for column in ["member"] if alone else ["member", "mixture"]:
            by = rows.groupby("epochs")[column]
            mean, faint = by.mean(), column == "member" and not alone
            ax.plot(mean.index, mean, color=color, ls="--" if faint else "-",
                    lw=0.8 if faint else 1.4, label=f"{method} {column}")  # fmt: skip
            ax.fill_between(mean.index, by.min(), by.max(), color=color, alpha=0.15, lw=0)
            name = _CURVE_NAMES.get(str(method), str(method))
            what = name if alone else f"{name}: {_CURVE_PARTS[column]}"
            ends.append(Note(float(mean.index[-1]), float(mean.iloc[-1]), what, color))
    if log:
        ax.set_xscale("log", base=2)
        first, last = np.log2([frame["epochs"].min(), frame["epochs"].max()]).round()
        _plain_ticks(ax, 2.0 ** np.arange(first, last + 1))
    ax.set(xlabel="Epochs", ylabel=ylabel)
    end_labels(ax, ends)


_CURVE_NAMES = {"single": "single models", "q0_undistilled": "undistilled"}
_CURVE_PARTS = {"member": "a snapshot", "mixture": "mixture"}


def multiplier_by_budget(
    ax: Axes, frame: pd.DataFrame, *, xlabel: str = "Epochs of the reference that are matched"
) -> None:
    """Draw how many times fewer epochs, by the reference budget whose loss is matched.

    frame: columns source (a line each: the method's name, or "paper"), epochs, multiplier, low,
    high (nan: none).
    """
    for source, rows in frame.groupby("source", sort=False):
        color = "0.4" if source == "paper" else _color(str(source))
        ax.plot(rows["epochs"], rows["multiplier"], "o-", color=color, label=str(source))
        ax.fill_between(rows["epochs"], rows["low"], rows["high"], color=color, alpha=0.15, lw=0)
        end = rows.iloc[-1]
        name = "the paper" if source == "paper" else _label(str(source))
        say(ax, name, (float(end["epochs"]), float(end["multiplier"])), color, (5, 0))
    ax.set_xscale("log", base=2)
    _plain_ticks(ax, _apart(frame["epochs"].unique()))
    ax.set(xlabel=xlabel, ylabel="Times fewer epochs")


def multipliers(ax: Axes, frame: pd.DataFrame, *, xlabel: str) -> None:
    """Draw multipliers with their intervals, one row a `what`, one mark a `source`.

    frame: columns what, source ("paper" is drawn as a star without an interval), multiplier, low,
    high; the first row on top, the first source above.
    """
    names = list(frame["what"].unique())
    sources = [each for each in frame["source"].unique() if each != "paper"]
    colors = dict(zip(sources, [*["0.6"] * (len(sources) - 1), METHOD_COLORS["q0"]], strict=True))
    for row in frame.to_dict("records"):
        source, at = row["source"], float(names.index(row["what"]))
        if source == "paper":
            ax.plot(row["multiplier"], at, "*", color="0.2", ms=8, label=source, zorder=3)
            continue
        at += 0.28 * (sources.index(source) - (len(sources) - 1) / 2)
        ax.plot([row["low"], row["high"]], [at, at], color=colors[source], lw=1.6)
        ax.plot(row["multiplier"], at, "o", color=colors[source], ms=4, label=source)
    ax.set_xscale("log", base=2)
    least, most = frame.low.min(), frame[["high", "multiplier"]].max().max()
    _plain_ticks(ax, (t for t in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16) if least <= t <= most))
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.5, -0.5), xlabel=xlabel)
    marks, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, marks, strict=True))
    ax.legend(list(once.values()), list(once), fontsize=7)


def forest(ax: Axes, frame: pd.DataFrame, *, xlabel: str) -> None:
    """Draw one line a variant: its mean difference with its interval, and every seed's own.

    frame: columns variant, value, low, high (nan: none), and seeds (a list of values), all in the
    unit of `xlabel`; the first row on top. Zero is the full recipe.
    """
    for y, row in enumerate(frame.to_dict("records")):
        ax.plot(row["seeds"], [y] * len(row["seeds"]), "o", color="0.6", ms=3, label="seeds")
        if np.isfinite([row["low"], row["high"]]).all():
            ax.plot([row["low"], row["high"]], [y, y], color=METHOD_COLORS["q0"], label="interval")
        ax.plot([row["value"]], [y], "D", color=METHOD_COLORS["q0"], ms=4, label="mean")
    ax.axvline(0, color="0.4", lw=0.7, ls="--", label="full recipe")
    ax.set_yticks(range(len(frame)), frame["variant"])
    ax.set(ylim=(len(frame) - 0.5, -0.5), xlabel=xlabel)


def prior_by_k(ax: Axes, frame: pd.DataFrame, error: float) -> None:
    """Draw loss against K for learned weights and for the lowest fitness losses.

    frame: columns k, learned_top_k, lowest_fitness_loss_uniform; error: of a reading.
    """
    named = {"lowest_fitness_loss_uniform": "lowest_loss", "learned_top_k": "q0"}
    for column, method in named.items():
        _curve(ax, frame["k"], frame[column], method, dense=False)
        _error_bars(
            ax, frame["k"], frame[column], frame[column] - error, frame[column] + error, method
        )
    lowest, learned = (frame[column].to_numpy() for column in named)
    for row, side, shift in ((0, "left", (5, 12)), (-1, "right", (0, -9))):
        k = float(frame["k"].iloc[row])
        ax.plot([k, k], [learned[row], lowest[row]], color="0.4", lw=0.7, ls=":", label="gap")
        text = f"{lowest[row] - learned[row]:.4f} apart"
        say(ax, text, (k, float(learned[row])), "0.2", shift, ha=side)
    ax.margins(y=0.12)
    ax.set_xscale("log", base=2)
    _plain_ticks(ax, frame["k"])
    ax.set(xlabel="Members used, K", ylabel=LOSS)
    second = float(frame["k"].iloc[1])
    orange, blue = METHOD_COLORS["lowest_loss"], METHOD_COLORS["q0"]
    say(ax, "K lowest fitness losses,\nuniform weights", (second, lowest[1]), orange, (8, 8))
    say(ax, "K largest learned weights", (second, learned[1]), blue, (0, -20), ha="center")


def weights_by_loss(ax: Axes, frame: pd.DataFrame) -> None:
    """Draw each member's learned weight against its fitness loss, kept and dropped ones apart.

    frame: columns fitness_loss (nats per token), weight, group (one of three names).
    """
    looks = {
        "low fitness loss and kept": ("o", METHOD_COLORS["q0"], "low loss, kept"),
        "high fitness loss and kept": ("^", METHOD_COLORS["q0"], "high loss, kept"),
        "low fitness loss and dropped": ("x", METHOD_COLORS["lowest_loss"], "low loss, dropped"),
    }
    for group, (marker, color, text) in looks.items():
        rows = frame[frame["group"] == group]
        ax.plot(rows["fitness_loss"], rows["weight"], marker, color=color, ms=4.5, label=text)
        top = rows.iloc[int(rows["weight"].argmax())]
        say(ax, text, (top["fitness_loss"], top["weight"]), color, (6, 6))
    ax.axhline(1 / 8, color="0.4", linewidth=0.7, linestyle="--", label="uniform")
    across = ax.get_yaxis_transform()
    say(ax, "uniform", (1.0, 1 / 8), "0.4", (0, 5), "right", xycoords=across)
    ax.set(xlabel="Fitness loss (nats per token)", ylabel="Learned weight", ylim=(-0.012, 0.21))


def by_choice(
    ax: Axes, frame: pd.DataFrame, *, x: str = "k", xlabel: str = "Members used, K",
    ylabel: str = LOSS,
) -> None:  # fmt: skip
    """Draw the loss of each way to choose members against `x`: mean over seeds, and their range.

    frame: one row a point and seed, columns choice, `x` (drawn in powers of two), loss.
    """
    import seaborn  # here, since it imports pyplot, and importing a library picks no backend

    choices = [name for name in CHOICE_COLORS if name in set(frame["choice"])]
    seaborn.lineplot(
        frame, x=x, y="loss", hue="choice", hue_order=choices, palette=CHOICE_COLORS,
        errorbar=("pi", 100), err_kws={"alpha": 0.12, "linewidth": 0},
        marker="o", markersize=4, linewidth=1.3, legend=False, ax=ax,
    )  # fmt: skip
    ax.set_xscale("log", base=2)
    _plain_ticks(ax, sorted(frame[x].unique()))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    handles = [Line2D([], [], color=CHOICE_COLORS[name], marker="o", ms=4) for name in choices]
    labels = [CHOICE_LABELS[name] for name in choices]
    ax.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5))


def efficiency_curve(
    ax: Axes,
    curve: pd.DataFrame,
    points: pd.DataFrame,
    *,
    budget_tokens: float,
    ylabel: str = LOSS,
    sizes: pd.DataFrame | None = None,
) -> None:
    """Draw the reference's score by fresh tokens and where each method's score lies on it.

    curve: columns tokens, value; points: columns method, value, tokens (where the curve meets
    the value; inf or nan if it does not), label; sizes: a column tokens and one a model size.
    The upper axis counts in budgets of `budget_tokens`.
    """
    tokens, scores = curve["tokens"].to_numpy(float), curve["value"].to_numpy(float)
    grey = METHOD_COLORS["reference"]
    ax.plot(tokens, scores, color=grey, marker=".", label="reference")
    _zoom(ax, scores, points["value"].to_numpy(float))
    ax.set_xlim(0, 1.03 * tokens[-1])
    if sizes is not None:
        ends = []
        for name in sizes.columns[1:]:
            ax.plot(sizes["tokens"], sizes[name], color="0.6", lw=0.7, ls=":", label=name)
            last = float(sizes["tokens"].iloc[-1]), float(sizes[name].iloc[-1])
            ends.append(Note(*last, str(name), "0.4"))
        end_labels(ax, ends)
    low, high = ax.get_ylim()
    seen = np.flatnonzero((scores > low) & (scores < high))
    roomy = [i for i in seen[1:] if tokens[i] > 0.15 * tokens[-1]]  # else it runs over the axis
    named = roomy[0] if roomy else seen[:2].max()
    say(
        ax,
        _label("reference"),
        (tokens[named], scores[named]),
        grey,
        (-8, 4 if scores[-1] > scores[0] else -8),
        ha="right",
    )
    notes = []
    for row in points.to_dict("records"):
        color = _color(row["method"])
        if np.isfinite(row["tokens"]):
            marker = METHOD_MARKERS.get(row["method"], "o")
            ax.plot(
                [row["tokens"]], [row["value"]], marker, color=color, ms=4.5, label=row["method"]
            )
        notes.append(Note(row["tokens"], row["value"], row["label"], color))
    drop_labels(ax, notes)
    unit, name = next((u, n) for u, n in _UNITS.items() if tokens[-1] >= u)
    ax.set(xlabel=f"Fresh training tokens of the reference ({name})", ylabel=ylabel)
    ax.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / unit:g}")
    per_budget, back = partial(np.multiply, 1 / budget_tokens), partial(np.multiply, budget_tokens)
    upper = ax.secondary_xaxis("top", functions=(per_budget, back))
    budget = f"{budget_tokens / 1e6:g}M" if budget_tokens >= 1e6 else f"{budget_tokens / 1e3:.3g}K"
    upper.set_xlabel(f"Data efficiency (times {budget} tokens)")


_UNITS = {1e9: "billions", 1e6: "millions", 1e3: "thousands", 1.0: "tokens"}


def _mark_crossings(ax: Axes, crossings: pd.DataFrame, first: pd.Series) -> None:
    """Mark each crossing on the dashed line of the target, and label it below the curves.

    first: where each method's curve begins.
    """
    target, cost = crossings["target"].iloc[0], crossings["reference_cost"].iloc[0]
    notes = []
    for row in crossings.to_dict("records"):
        color = _color(row["method"])
        at = float(first[row["method"]]) if np.isnan(row["matched"]) else row["matched"]
        if np.isfinite(at):
            shape = "<" if np.isnan(row["matched"]) else "o"
            ax.plot(
                [at], [target], shape, color=color, mfc="white", ms=5, zorder=4, label="crossing"
            )
        if np.isfinite([row["earliest"], row["latest"]]).all():
            ax.plot([row["earliest"], row["latest"]], [target] * 2, color=color, lw=3, alpha=0.5)
        name = _label(row["method"]).replace("\n", " ")
        text = row["label"] if np.isfinite(at) else f"{name}: {row['label']}"
        notes.append(Note(at, target, text, color))
    left = min([note.x for note in notes if np.isfinite(note.x)], default=float(first.min()))
    ax.plot([left, cost], [target] * 2, color="0.4", lw=0.7, ls="--", zorder=1, label="target")
    drop_labels(ax, notes)


def _curve(ax: Axes, x: pd.Series, y: pd.Series, method: str, dense: bool = False) -> None:
    """Draw points joined by straight lines in x, which `dense` samples for a log axis."""
    xs, ys = x.to_numpy(float), y.to_numpy(float)
    marker = METHOD_MARKERS.get(method, "o")
    if dense:
        grid = np.union1d(xs, np.geomspace(xs[0], xs[-1], 200))
        ax.plot(grid, np.interp(grid, xs, ys), color=_color(method), label="between points")
    joined = "none" if dense else "-"
    ax.plot(xs, ys, color=_color(method), marker=marker, linestyle=joined, label=method)


def _error_bars(
    ax: Axes, x: pd.Series, y: pd.Series, low: pd.Series, high: pd.Series, method: str
) -> None:
    reach = [(y - low).to_numpy(float), (high - y).to_numpy(float)]
    ax.errorbar(
        x.to_numpy(float), y.to_numpy(float), reach, fmt="none", ecolor=_color(method),
        elinewidth=0.8, capsize=1.5, alpha=0.6, zorder=1.5,
    )  # fmt: skip


def _extrapolated(
    ax: Axes, x: np.ndarray, y: np.ndarray, guessed: np.ndarray, color: str, name: str
):
    """Draw points and solid lines; dashed and hollow where the value was extrapolated."""
    ax.plot(x, y, color=color, ls="--", lw=0.9, label=name)
    ax.plot(x[~guessed], y[~guessed], color=color, marker="o", label=f"{name} measured")
    ax.plot(
        x[guessed], y[guessed], "o", color=color, mfc="none", ms=5.5, label=f"{name} extrapolated"
    )


def _budget_axis(
    ax: Axes, budgets: np.ndarray, regimes: Sequence[tuple[float, float, str]]
) -> None:
    """Make the x axis one of doubling budgets, with a band and a name for each regime."""
    ax.set_xscale("log", base=2)
    left, right = budgets[0] * 0.62, budgets[-1] * 1.5
    ax.set_xlim(left, right)
    _plain_ticks(ax, _apart(budgets))
    for index, (start, end, text) in enumerate(regimes):
        start, end = max(start, left), min(end, right)
        if index % 2:
            ax.axvspan(start, end, color="0.95", zorder=0)
        across = ax.get_xaxis_transform()  # x in data, y in axes heights
        say(ax, text, ((start * end) ** 0.5, 1.0), "0.3", (0, 0), "center", "bottom", across)
    ax.set_xlabel("Total training epochs")


def _zoom(ax: Axes, curve: np.ndarray, values: np.ndarray) -> None:
    """Limit y to the curve's better end and rather more than that beyond the worst value."""
    best = curve[-1]
    worst = max(values, key=lambda value: abs(value - best))
    reach = worst - best
    ax.set_ylim(*sorted((best - 0.1 * reach, worst + 1.3 * reach)))


def _plain_ticks(ax: Axes, at: Iterable[float]) -> None:
    """Tick a log axis at these values only, in plain digits."""
    ticks = [float(value) for value in at]
    ax.set_xticks(ticks, [f"{value:g}" for value in ticks])
    ax.minorticks_off()


def _apart(values: Iterable[float], octaves: float = 0.4) -> list[float]:
    """Thin out values for a log axis: the ends, then powers of two, then whatever has room."""
    rising = sorted(float(value) for value in values)
    wanted = [*rising[:1], *rising[-1:], *(v for v in rising if np.log2(v) % 1 == 0), *rising]
    kept: list[float] = []
    for value in wanted:
        if all(abs(np.log2(value / other)) >= octaves for other in kept):
            kept.append(value)
    return sorted(kept)


def _counts(frame: pd.DataFrame) -> list[str]:
    """Return the columns n1, n2, ... of a frame."""
    return [str(name) for name in frame.columns if name[0] == "n" and name[1:].isdigit()]


def _guessed(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Return [rows] whether the value in column `name` was extrapolated."""
    return (frame["extrapolated"] == name).fillna(False).to_numpy(bool)


def _color(method: str) -> str:
    return METHOD_COLORS.get(method, "#56B4E9")


def _label(method: str) -> str:
    return METHOD_LABELS.get(method, method)
