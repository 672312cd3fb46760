"""How many times fewer epochs or FLOPs one method needs than another: `epoch_multipliers.csv`.

Tables of `epoch_efficiency` in, small tables and sentences out. A multiplier is a geometric mean
over training seeds; its interval holds the seeds (Student's t) and the test documents (drawn
anew, the same draw for every point).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from q0lib import efficiency
from q0lib.study.tables import intervals

OPEN = 0.025  # an interval is marked where more of the draws have no crossing


def against(
    curves: pd.DataFrame,
    references: Sequence[str] = ("ensemble", "distilled_ensemble"),
    documents: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """What each method saves against the last point of each reference, seed by seed.

    One row a (method, reference, axis) with axis epochs or flops: the geometric mean of the
    multiplier over seeds with its 95% interval, nan when a seed has no crossing; `reached` counts
    the seeds that have one, and `cases` says in words what each seed did. The interval is
    `efficiency.ratio_interval`: Student's over training seeds and, with `documents`
    (`epoch_efficiency.document_losses` of these curves), what other test documents would have said.
    `clipped` is the share of resampled texts without a crossing, where the end of the curve stood
    in for it; `own_k` the reference's members at its last point.

    Raises:
        ValueError: a seed without one of the curves, a reference that ends at another budget for
            another seed, or documents of other curves.
    """
    rows = []
    others = [name for name in curves.method.unique() if name not in references]
    for reference in references:
        theirs = curves[curves.method == reference].sort_values("epochs")
        for method in others if len(theirs) else []:
            both = curves[curves.method.isin([method, reference])]
            _check_pairs(both, method, reference)
            for axis, unit in (("epochs", "epochs"), ("flops", "FLOPs")):
                pair = both.drop_duplicates(["seed", "method", axis])  # a tie in FLOPs
                found = [
                    efficiency.crossings(block, reference, axis, unit).iloc[0]
                    for _, block in pair.groupby("seed")
                ]
                values = [float(each.multiplier) for each in found]
                spread, clipped = 0.0, math.nan
                if documents is not None and np.isfinite(values).all():
                    spread, clipped = _document_spread(pair, method, reference, axis, documents)
                mean, low, high = efficiency.ratio_interval(values, spread)
                rows.append(
                    {"method": method, "reference": reference, "axis": axis, "multiplier": mean,
                     "low": low, "high": high, "seeds": len(values),
                     "reached": int(np.isfinite(values).sum()), "clipped": clipped,
                     "own_k": int(theirs.k.iloc[-1]),
                     "cases": "; ".join(str(each.label) for each in found)}
                )  # fmt: skip
    columns = ["method", "reference", "axis", "multiplier", "low", "high", "seeds", "reached"]
    return pd.DataFrame(rows, columns=[*columns, "clipped", "own_k", "cases"])


def _check_pairs(pair: pd.DataFrame, method: str, reference: str) -> None:
    seeds = {name: set(pair[pair.method == name].seed) for name in (method, reference)}
    for one, other in ((method, reference), (reference, method)):
        if lacking := seeds[one] - seeds[other]:
            raise ValueError(f"seed {min(lacking)} has a curve of {one} but none of {other}")
    ends = pair[pair.method == reference].groupby("seed").epochs.max()
    if ends.nunique() > 1:
        raise ValueError(f"{reference} ends at another budget by seed: {ends.to_dict()}")


def by_budget(
    curves: pd.DataFrame, method: str = "q0", reference: str = "ensemble"
) -> pd.DataFrame:
    """`against` on epochs for every budget of the reference, not only its last.

    A reference that has stopped improving makes any multiplier against its last point larger the
    longer it is trained; this shows how much. Columns: epochs (of the reference), multiplier, low,
    high (Student's over seeds), reached (seeds that have a crossing; without it the mean is nan).

    Raises:
        ValueError: as `against`.
    """
    rows = []
    curves = curves[curves.method.isin([method, reference])]
    _check_pairs(curves, method, reference)
    for epochs in sorted(curves[curves.method == reference].epochs.unique()):
        values = []
        for _, block in curves.groupby("seed"):
            ours = block[block.method == method].sort_values("epochs")
            theirs = block[(block.method == reference) & (block.epochs == epochs)]
            matched = efficiency.matched_epochs(ours.epochs, ours.loss, theirs.loss.item())
            values.append(efficiency.multiplier(epochs, matched))
        mean, low, high = efficiency.ratio_interval(values)
        rows.append({"epochs": epochs, "multiplier": mean, "low": low, "high": high,
                     "reached": int(np.isfinite(values).sum())})  # fmt: skip
    return pd.DataFrame(rows)


def _document_spread(
    curves: pd.DataFrame, method: str, reference: str, axis: str, documents: pd.DataFrame
) -> tuple[float, float]:
    """`intervals.crossing_spread` of a method's curves and the last points of a reference's.

    Raises:
        ValueError: documents that do not add up to the losses of `curves`.
    """
    losses = intervals.resampled_losses(documents)
    means = documents.set_index(intervals.POINT).filter(regex=r"^d\d+$").sum(axis=1)
    means /= means.loc["tokens"].iloc[0]
    drawn = []
    for seed, block in curves.sort_values(axis).groupby("seed"):
        ours, theirs = (block[block.method == name] for name in (method, reference))
        rows = pd.concat([ours, theirs.tail(1)])
        points = list(rows[intervals.POINT].itertuples(index=False, name=None))
        for point, loss in zip(points, rows.loss, strict=True):
            if not abs(means.get(point, np.nan) - loss) < 1e-4:
                raise ValueError(
                    f"the documents do not add up to the loss of {point[0]}, seed {seed}, "
                    f"{point[2]:g} epochs: they are of other curves"
                )
        *curve, goals = (losses[point] for point in points)
        drawn.append((ours[axis].to_numpy(), np.stack(curve), goals))
    return intervals.crossing_spread(drawn)


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `against` for reading: methods down, what they are measured against across.

    A cell is "6.9x [6.1, 7.7]", with a star where the interval is too narrow because more than
    2.5% of the resampled texts have no crossing, or how many seeds cross where not all do.
    """
    cells = [(row.method, f"{row.reference}, {row.axis}", _said(row)) for row in table.itertuples()]
    frame = pd.DataFrame(cells, columns=["method", "against", "times fewer"])
    wide = frame.pivot(index="method", columns="against", values="times fewer")
    return wide.loc[frame.method.unique(), frame.against.unique()]


def marked(
    means: pd.DataFrame, table: pd.DataFrame, method: str = "q0", reference: str = "ensemble"
) -> pd.DataFrame:
    """The crossing that a figure of `means` marks: `efficiency.crossings`, with the
    range and the label of the multiplier in a table of `against`.

    Raises:
        ValueError: one of the two curves is missing.
    """
    if lacking := {method, reference} - set(means.method):
        raise ValueError(
            f"a crossing needs a curve of {sorted(lacking)[0]!r}, there are "
            f"{sorted(set(means.method))}"
        )
    rows = table[(table.method == method) & (table.reference == reference)]
    row = next(rows[rows.axis == "epochs"].itertuples())
    found = efficiency.crossings(means[means.method.isin([method, reference])], reference)
    cost = found.reference_cost
    label = _said(row, " fewer epochs")
    return found.assign(earliest=cost / row.high, latest=cost / row.low, label=label)


def sentence(table: pd.DataFrame, method: str = "q0") -> str:
    """The headline of a table of `against`, for a terminal or the foot of a figure."""
    lines = []
    for row in table[table.method == method].itertuples():
        axis = {"flops": "FLOPs"}.get(row.axis, row.axis)
        seeds = f"{row.seeds} seeds" if row.seeds > 1 else "one seed"
        more = row.cases if np.isnan(row.multiplier) else seeds
        lines.append(
            f"{method} matches the {row.reference} with fewer {axis}: {_said(row)} ({more})"
        )
    return "\n".join(lines)


def _said(row: Any, what: str = "") -> str:
    """A row of `against` in a few characters."""
    if np.isnan(row.multiplier):
        return f"{row.reached} of {row.seeds} seeds cross"
    span = f" [{row.low:.1f}, {row.high:.1f}]" if np.isfinite(row.low) else ""
    return f"{row.multiplier:.1f}x{what}{span}{'*' if row.clipped > OPEN else ''}"
