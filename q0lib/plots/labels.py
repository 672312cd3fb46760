"""Texts on figures: placed so that they cover neither each other nor the lines."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from scipy.optimize import isotonic_regression

LINE_POINTS = 8.5  # height of a line of text
LETTER_POINTS = 3.1  # mean width of a letter


class Note(NamedTuple):
    """A text that belongs to the point (x, y): its label, its colour."""

    x: float
    y: float
    text: str
    color: str


def end_labels(ax: Axes, notes: Sequence[Note]) -> None:
    """Name each line at its end: those that reach the right edge beside it; spread apart, and
    above the lines that go on where they stand."""
    edge = max(note.x for note in notes)
    low, high = ax.get_ylim()
    for x in sorted({note.x for note in notes}):
        ending = [note for note in notes if note.x == x]
        line = LINE_POINTS * (high - low) / _height(ax)
        sizes = [(note.text.count("\n") + 1) * line for note in ending]
        heights = spread([note.y for note in ending], sizes)
        if x < edge:
            heights += _lift(ax, x, ending, heights, line)
        for note, y in zip(ending, heights, strict=True):
            if x == edge:
                across = ax.get_yaxis_transform()  # x in axes widths, y in data
                say(ax, note.text, (1.0, float(y)), note.color, (5, 0), xycoords=across)
            else:
                text = say(ax, note.text, (x, float(y)), note.color, (5, 0))
                text.set_bbox(None)  # other lines go on here, and must be seen
                text.set_path_effects([withStroke(linewidth=1.5, foreground="white")])


def _lift(ax: Axes, x: float, notes: Sequence[Note], heights: np.ndarray, line: float) -> float:
    """Return by how much texts that start at `x` must rise to stand clear of every other line, the
    ends of error bars joined up; negative where to sink is the much shorter way, and has room."""
    rows = [note.text.split("\n") for note in notes]
    width = (5 + LETTER_POINTS * max(len(row) for text in rows for row in text)) * _dpi(ax) / 72
    start = ax.transData.transform((x, notes[0].y))[0]
    pixels = np.column_stack([np.linspace(start + 1, start + width, 20), np.zeros(20)])
    across = ax.transData.inverted().transform(pixels)[:, 0]
    lines = [np.asarray(each.get_xydata()) for each in ax.get_lines()
             if each.get_transform() == ax.transData]  # fmt: skip
    passing = [
        np.interp(across, points[:, 0], points[:, 1], left=np.nan, right=np.nan)
        for points in lines
        if len(points)
    ]
    ys = np.sort(np.concatenate(passing)) if passing else np.array([])
    half = [len(text) * line / 2 for text in rows]
    bottom, top = min(heights - half), max(heights + half)
    rise = 0.0
    for y in ys[np.isfinite(ys)]:
        if bottom + rise - line / 2 < y < top + rise:
            rise = y + line / 2 - bottom
    sink = 0.0
    for y in ys[np.isfinite(ys)][::-1]:
        if bottom - sink < y < top - sink + line / 2:
            sink = top + line / 2 - y
    return -sink if sink < rise / 2 and bottom - sink > ax.get_ylim()[0] else rise


def spread(positions: Sequence[float], sizes: Sequence[float]) -> np.ndarray:
    """Return centres for things of these sizes that do not overlap, in the same order, moved least
    in squares."""
    order = np.argsort(positions, kind="stable")
    size = np.asarray(sizes, float)[order]
    steps = np.concatenate([[0.0], np.cumsum((size[1:] + size[:-1]) / 2)])
    placed = np.empty(len(positions))
    placed[order] = isotonic_regression(np.asarray(positions, float)[order] - steps).x + steps
    return placed


def drop_labels(ax: Axes, notes: Sequence[Note]) -> None:
    """Run a line from each point down to its text, in rows below everything drawn so far.

    All texts stand right of their lines, the line furthest right ending in the highest row, so
    that none crosses a text; if they fit only on the left, all stand there, in the opposite
    order. Notes without a finite x have no line and come last.
    """
    low, high = ax.get_ylim()
    points = _height(ax)
    share = (LINE_POINTS * len(notes) + 4) / points
    floor = (low - share * high) / (1 - share)
    ax.set_ylim(floor, high)
    ax.autoscale(False)
    row = LINE_POINTS * (high - floor) / points
    placed = [note for note in notes if np.isfinite(note.x)]
    nowhere = [note for note in notes if not np.isfinite(note.x)]
    right = _room(ax, placed, "right") or not _room(ax, placed, "left")
    side, shift = ("left", 3) if right else ("right", -3)
    ordered = sorted(placed, key=lambda note: note.x, reverse=right) + nowhere
    for index, note in enumerate(ordered):
        y = floor + (len(notes) - index - 0.4) * row
        if note in nowhere:
            across = ax.get_yaxis_transform()
            say(ax, note.text, (1.0, y), note.color, (0, 0), ha="right", xycoords=across)
            continue
        ax.plot([note.x, note.x], [note.y, y], color=note.color, lw=0.8, ls=":", label="drop")
        say(ax, note.text, (note.x, y), note.color, (shift, 0), ha=side)


def _room(ax: Axes, notes: Sequence[Note], side: str) -> bool:
    """Return whether every text fits between its point and that side of the axes."""
    box, scale = ax.get_window_extent(), _dpi(ax) / 72
    for note in notes:
        at = ax.transData.transform((note.x, note.y))[0]
        room = box.x1 - at if side == "right" else at - box.x0
        if room < LETTER_POINTS * len(note.text) * scale:
            return False
    return True


def say(
    ax: Axes,
    text: str,
    at: tuple[float, float],
    color: str,
    shift: tuple[float, float],
    ha: str = "left",
    va: str = "center",
    xycoords: Any = "data",
) -> Annotation:
    """Write a small text at a point, moved by `shift` points, on white."""
    return ax.annotate(
        text,
        at,
        shift,
        xycoords=xycoords,
        textcoords="offset points",
        ha=ha,
        va=va,
        color=color,
        fontsize=7,
        linespacing=1.0,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85},
    )


def _height(ax: Axes) -> float:
    """Return the axes' height in points."""
    return ax.get_window_extent().height * 72 / _dpi(ax)


def _dpi(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    assert figure is not None, "the axes were removed from their figure"
    return figure.dpi
