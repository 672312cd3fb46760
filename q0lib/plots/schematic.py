"""Figure 5: the method in one picture, aligned along the epochs of one trajectory."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from q0lib.plots.figures import METHOD_COLORS
from q0lib.plots.labels import Note, end_labels

BLUE, BLACK, GREY = METHOD_COLORS["q0"], "0.1", "0.55"


def cycles(ax: Axes, frame: pd.DataFrame, snapshots: Sequence[float]) -> None:
    """Draw learning rate and weight decay over the cycles.

    frame: columns epoch, learning_rate, weight_decay (multiples of their peaks); snapshots: the
    epochs after which one is taken.
    """
    for column, color in (("weight_decay", GREY), ("learning_rate", BLACK)):
        ax.plot(frame["epoch"], frame[column], color=color, lw=1.0, label=column)
    ax.grid(visible=False)
    ax.set(ylabel="Multiple of peak", ylim=(0, 1.08), yticks=(0, 0.5, 1))
    floors = frame.groupby("epoch")["learning_rate"].min().loc[list(snapshots)]
    ax.plot(snapshots, floors, "o", mfc="white", mec=BLUE, label="snapshots")
    end = float(frame["epoch"].iloc[-1])
    decay, rate = (float(frame[name].iloc[-1]) for name in ("weight_decay", "learning_rate"))
    end_labels(
        ax,
        [
            Note(end, decay, "weight\ndecay", GREY),
            Note(end, rate, "learning\nrate", BLACK),
        ],
    )


def chain(ax: Axes, snapshots: Sequence[float], distil_from: int, noise: Sequence[float]) -> None:
    """Draw each snapshot, whom it teaches, and the noise at each boundary.

    snapshots: their epochs; distil_from: cycles before the first that has a teacher; noise:
    standard deviations of each tensor, one a boundary, drawn as hanging bars.
    """
    for number, (teacher, student) in enumerate(pairwise(snapshots), 1):
        if number >= distil_from:
            look = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=-0.8", "color": BLUE}
            size = {"lw": 0.8, "mutation_scale": 6, "shrinkA": 4, "shrinkB": 4}
            ax.annotate("", (student, 0.0), (teacher, 0.0), arrowprops=look | size)
    ax.plot(
        snapshots, np.zeros(len(snapshots)), "o", ms=9, mfc="white", mec=BLUE, label="snapshots"
    )
    for number, at in enumerate(snapshots, 1):
        ax.text(at, -0.03, str(number), ha="center", va="center", fontsize=6)
    ends = [-0.5 - 2.5 * size for size in noise]
    ax.vlines(snapshots[:-1], -0.5, ends, color="0.45", lw=2.5, label="noise")
    plain = (snapshots[0] + snapshots[distil_from - 1]) / 2
    taught = (snapshots[distil_from - 1] + snapshots[-1]) / 2
    for at, text, color in ((plain, "cross-entropy", "0.3"), (taught, "+ teacher", BLUE)):
        ax.text(at, 0.72, text, ha="center", color=color, fontsize=7)
    ax.set(ylim=(-1.3, 1.1), yticks=())
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(bottom=False)
    ax.grid(visible=False)
    for y, text in ((0.0, "snapshots"), (-0.85, "noise added")):
        across = ax.get_yaxis_transform()
        ax.text(1.02, y, text, va="center", color="0.3", fontsize=7, transform=across)


def weighting(ax: Axes, snapshots: Sequence[float], weights: Sequence[float], k: int) -> None:
    """Draw the members' learned weights, the K largest of them kept.

    snapshots: their epochs [M]; weights [M], not negative.
    """
    kept = np.zeros(len(weights), dtype=bool)
    kept[np.argsort(weights)[::-1][:k]] = True
    ax.bar(snapshots, weights, width=1.0, color=np.where(kept, BLUE, "0.75"))
    ax.set(xlabel="Epochs of one trajectory", ylabel="Weight", yticks=(0,))
    for y, text, color in ((0.75, f"K = {k}\nkept", BLUE), (0.2, "dropped", "0.5")):
        ax.text(1.02, y, text, va="center", color=color, fontsize=7, transform=ax.transAxes)
