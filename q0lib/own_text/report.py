"""What came out, on a page: losses by K, the figure, samples, what each stage took, and where."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from q0lib import files
from q0lib.own_text import plan, work
from q0lib.own_text.work import Trained
from q0lib.plots import figures
from q0lib.plots.labels import say

FIGURE = "losses"


def draw(ax: Axes, losses: pd.DataFrame) -> None:
    """Test loss by K, with the student and the single model as lines; `work.losses`."""
    snapshots = losses[losses.model.isin(["best snapshot", "snapshots"])]
    blue, black = figures.METHOD_COLORS["q0"], figures.METHOD_COLORS["single"]
    ax.plot(snapshots.k, snapshots.test, color=blue, marker="o", ms=3)
    first = snapshots.iloc[0]
    say(ax, "snapshots of q0", (first.k, first.test), blue, (8, 5))
    # Where the curve is not: high on the left, low on the right.
    for model, color, x, shift in (
        ("student", figures.METHOD_COLORS["student"], 0, (3, -7)),
        ("single model", black, 1, (-3, 7)),
    ):
        for loss in losses[losses.model == model].test:
            ax.axhline(loss, color=color)
            at = ax.get_yaxis_transform()
            side = "right" if x else "left"
            say(ax, f"{model}, one pass", (x, loss), color, shift, ha=side, xycoords=at)
    ax.set_xscale("log", base=2)
    ax.set_xticks(snapshots.k, [str(k) for k in snapshots.k])
    ax.margins(y=0.15)
    ax.set(xlabel="Models run, K", ylabel="Test loss (nats per token)")


def write(trained: Trained, out: Path, samples: Sequence[tuple[str, str]]) -> str:
    """Write `report.md` and its figure into `out`; returns the report.

    `samples` are prompts, and what the model in `out` goes on with.
    """
    losses = work.losses(trained)
    with rc_context():
        figures.style()
        fig = Figure(figsize=(4.4, 2.8))
        draw(fig.subplots(), losses)
        figures.save(fig, out / FIGURE)
    text = "\n".join(_lines(trained, losses, out, samples)) + "\n"
    files.write_text(out / "report.md", text)
    return text


def _lines(
    trained: Trained, losses: pd.DataFrame, out: Path, samples: Sequence[tuple[str, str]]
) -> list[str]:
    table = losses.assign(
        test=[f"{row.test:.3f}{_error(row.se)}" for row in losses.itertuples()],
        difference=[f"{row.difference:+.3f}{_error(row.difference_se)}"
                    for row in losses.itertuples()],
    )  # fmt: skip
    reference = losses.model[0]
    table.loc[0, "difference"] = "0"
    named = {"model": "model", "k": "forward passes", "test": "test loss",
             "difference": f"against the {reference}"}  # fmt: skip
    costs = work.costs(trained)
    costs = costs.assign(
        epochs=costs.epochs.map("{:g}".format), flops=costs.flops.map("{:.2g}".format),
        seconds=costs.seconds.map(plan.duration), foretold=costs.foretold.map(plan.duration),
        run=[f"`{path}`" for path in costs.run],
    ).rename(columns={"seconds": "took"})  # fmt: skip
    planned = plan.table(trained.plan, out).reset_index()
    planned = planned[~planned.what.str.startswith("time:")]
    lines = [
        f"# {Path(trained.plan.asked.source).name}: one model out of a population",
        "",
        summary(losses),
        "",
        *_markdown(table[list(named)].rename(columns=named)),
        "",
        "Nats per token on text that trained and chose nothing; ± one standard error, by "
        "documents (unknown if the text is a single one). Snapshots were chosen greedily, and "
        "weighed, on fitness text. One seed: the error of another start is not in it.",
        "",
        f"![Test loss by K]({FIGURE}.png)",
        "",
        f"## Samples of the {trained.best[0]}, which is what the folder holds",
        "",
    ]  # fmt: skip
    for prompt, said in samples:
        lines += [f"> **{_line(prompt)}** {_line(said)}", ""]
    lines += ["## What it took", "", *_markdown(costs), ""]
    if len(trained.trials):
        trials = trained.trials.drop(columns=["rate", "decay"]).round(4)
        lines += [
            "## Tuning",
            "",
            f"Trials of {trained.plan.proposal.trial_epochs} epochs, losses of the mixture on "
            "validation text; the lowest was taken. Short trials lean towards little decay.",
            "",
            *_markdown(trials),
            "",
        ]
    return [*lines, "## The plan", "", *_markdown(planned)]


def summary(losses: pd.DataFrame) -> str:
    """What the losses say, in a sentence or two."""
    student = losses[losses.model == "student"].iloc[0]
    reference, best = losses.iloc[0], losses.loc[losses.test.idxmin()]
    alone = losses[losses.model == "best snapshot"].test.iloc[0]
    mixed = losses[losses.model == "snapshots"]
    text = (
        f"The student, one model, loses {student.test:.3f} nats per token, {_than(student)} "
        f"the {reference.model} ({reference.test:.3f})."
    )
    if len(mixed):
        most = mixed.iloc[-1]
        text += (
            f" All {most.k} snapshots together lose {most.test:.3f}, the best of them {alone:.3f}"
        )
        kept = (alone - student.test) / (alone - most.test) if alone > most.test else 0
        text += f": the student keeps {kept:.0%} of what mixing gains." if kept > 0 else "."
    return text + f" The lowest loss is that of {_named(best)}."


def _than(row: pd.Series) -> str:
    side = "below" if row.difference < 0 else "above"
    return f"{abs(row.difference):.3f}{_error(row.difference_se)} {side}"


def _error(se: float) -> str:
    """An error behind its number; nothing where it is not known."""
    return "" if np.isnan(se) else f" ± {se:.3f}"


def _named(row: pd.Series) -> str:
    return f"{row.k} snapshots" if row.model == "snapshots" else f"the {row.model}"


def _markdown(table: pd.DataFrame) -> list[str]:
    """A table as Markdown."""
    rows = [list(table.columns), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def _line(text: str) -> str:
    """Text on one line of Markdown, as it is."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
