"""How much less one method needs than another: crossings, data efficiency, compute, intervals.

Arrays and numbers in, numbers out. One convention holds throughout: a crossing that the curve
does not show is no number. `inf` says that the curve never gets there, `nan` that it was past the
target before its first point; `describe_crossing` and `describe_efficiency` put both into words.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats


def matched_epochs(epochs: ArrayLike, losses: ArrayLike, target: float) -> float:
    """Return the epochs at which a loss curve first comes down to `target`.

    Linear interpolation between the two points around the first crossing, as in the paper.
    epochs [n], rising strictly; losses [n] in the unit of `target`. Any measure of cost will do
    in place of epochs.

    Returns inf when no loss is as low as the target (never reached), and nan when the first is
    already lower (reached before the first point). A first loss equal to it is a crossing there.

    Raises:
        ValueError: for empty, unequal, masked, non-finite or unordered arrays, or a non-finite
            target.
    """
    return _crossing(*_curve(epochs, losses, "epochs", "losses"), _finite("target", target))


def multiplier(reference_epochs: float, matched: float) -> float:
    """Return reference_epochs / matched, and nan where `matched` is inf or nan.

    There is then no multiplier but a bound, which `describe_crossing` gives.

    Raises:
        ValueError: unless reference_epochs is finite and positive and matched not negative or 0.
    """
    if not (math.isfinite(reference_epochs) and reference_epochs > 0):
        raise ValueError(f"reference_epochs must be finite and > 0, got {reference_epochs}")
    if matched <= 0:
        raise ValueError(f"matched must be > 0, got {matched}")
    return reference_epochs / matched if math.isfinite(matched) else math.nan


def describe_crossing(
    epochs: ArrayLike,
    losses: ArrayLike,
    target: float,
    reference_epochs: float,
    unit: str = "epochs",
) -> str:
    """Say where a curve meets `target`, and how much earlier than `reference_epochs` that is.

    "55.5 epochs (4.61x)", "never reached (best 3.0512 at 256)", "before 32 epochs (more than
    8.0x)". Arguments and errors are those of `matched_epochs` and `multiplier`.
    """
    x, y = _curve(epochs, losses, "epochs", "losses")
    matched = matched_epochs(x, y, target)
    if math.isinf(matched):
        best = int(np.argmin(y))
        return f"never reached (best {y[best]:.4f} at {x[best]:g})"
    if math.isnan(matched):
        return f"before {x[0]:g} {unit} (more than {multiplier(reference_epochs, x[0]):.1f}x)"
    shown = f"{matched:.1f}" if matched < 1e5 else f"{matched:.3g}"
    return f"{shown} {unit} ({multiplier(reference_epochs, matched):.2f}x)"


def crossings(
    frame: pd.DataFrame, reference: str = "ensemble", x: str = "epochs", unit: str = "epochs"
) -> pd.DataFrame:
    """Return where each method's curve meets the last loss of the `reference` method.

    frame: one row a point, columns method, `x`, loss; optionally low and high, around the loss
    (nan: not known, as with one seed).

    Returns one row a method, the reference left out: method, target (nats per token),
    reference_cost, matched and multiplier (as the functions above give them), earliest and
    latest (the crossings of the low and high curves), and label (`describe_crossing`).

    Raises:
        ValueError: where the reference has no rows, or a curve cannot be read.
    """
    curves = {name: rows.sort_values(x) for name, rows in frame.groupby("method", sort=False)}
    if reference not in curves:
        raise ValueError(f"reference {reference!r} is not among the methods {list(curves)}")
    last = curves.pop(reference).iloc[-1]
    target, cost = float(last["loss"]), float(last[x])
    found = []
    for method, rows in curves.items():
        matched = matched_epochs(rows[x], rows["loss"], target)
        low, high = (rows.get(edge, rows["loss"]).fillna(rows["loss"]) for edge in ("low", "high"))
        found.append(
            {
                "method": method,
                "target": target,
                "reference_cost": cost,
                "matched": matched,
                "multiplier": multiplier(cost, matched),
                "earliest": matched_epochs(rows[x], low, target),
                "latest": matched_epochs(rows[x], high, target),
                "label": describe_crossing(rows[x], rows["loss"], target, cost, unit),
            }
        )
    return pd.DataFrame(found)


def data_efficiency(
    value: float,
    tokens: ArrayLike,
    reference: ArrayLike,
    budget_tokens: float,
    crossing: str = "first",
    higher_is_better: bool = False,
) -> float:
    """Return how many times `budget_tokens` the reference needs to score `value`.

    The reference [n] at tokens [n] (rising strictly) is joined by straight lines: losses, or
    scores of which the higher is better. Where it goes back and forth across the value, the "first"
    crossing, the fewest tokens at which the reference was ever as good, is the paper's reading
    (tables 2 and 6); "last" is the fewest from which on it stays as good, and the larger of the
    two.

    Returns inf when the reference is never as good (beyond the curve) and nan when its first
    point is better already (below the curve).

    Raises:
        ValueError: as `matched_epochs`; for a budget that is not positive, or another `crossing`.
    """
    x, y = _curve(tokens, reference, "tokens", "reference")
    value = _finite("value", value)
    if not (math.isfinite(budget_tokens) and budget_tokens > 0):
        raise ValueError(f"budget_tokens must be finite and > 0, got {budget_tokens}")
    if crossing not in ("first", "last"):
        raise ValueError(f"crossing must be 'first' or 'last', got {crossing!r}")
    if higher_is_better:
        y, value = -y, -value
    if crossing == "last":
        if y[-1] > value:
            return math.inf
        worse = np.flatnonzero(y > value)
        start = int(worse[-1]) if worse.size else 0
        x, y = x[start:], y[start:]
    return _crossing(x, y, value) / budget_tokens


def describe_efficiency(
    value: float,
    tokens: ArrayLike,
    reference: ArrayLike,
    budget_tokens: float,
    higher_is_better: bool = False,
) -> str:
    """Say `data_efficiency` in words: "12.87x", "beyond 20.0x", "below 1.0x"."""
    x, y = _curve(tokens, reference, "tokens", "reference")
    ratio = data_efficiency(value, x, y, budget_tokens, higher_is_better=higher_is_better)
    if math.isinf(ratio):
        return f"beyond {x[-1] / budget_tokens:.1f}x"
    if math.isnan(ratio):
        return f"below {x[0] / budget_tokens:.1f}x"
    return f"{ratio:.2f}x"


def epoch_cost(forward: float, teacher: float = 0.0) -> float:
    """Return the cost of training: forward, a backward twice as dear, and a teacher's forward.

    In the unit of its arguments. With trunk layer passes an epoch costs the paper's q0 210 units,
    280 while distilling, and its baseline, which loops half the time, 150.
    """
    return 3 * forward + teacher


def budget_cost(
    epochs: float, plain: float, distilling: float | None = None, plain_epochs: float = 0.0
) -> float:
    """Return the cost of `epochs`, the first `plain_epochs` at `plain`, the rest at `distilling`.

    plain, distilling: cost per epoch. Without `distilling` all are plain. With N trajectories
    that start to distil after c cycles of tau epochs, plain_epochs is N c tau.
    """
    if distilling is None:
        return epochs * plain
    before = min(epochs, plain_epochs)
    return before * plain + (epochs - before) * distilling


def interval(values: ArrayLike, spread: float = 0.0) -> tuple[float, float, float]:
    """Return the mean over seeds and its 95% interval (mean, low, high), by Student's t.

    `spread` is the standard deviation of the mean from another, independent source, such as the
    choice of test documents: the two half-widths are added as squares, which is an approximation.
    One value has the interval of `spread` alone, or none: low and high are nan. A value that is no
    number makes all three nan, since a seed without a crossing must not drop out unseen.

    Raises:
        ValueError: for no values, or masked ones.
    """
    data = _floats("values", values)
    if data.ndim != 1 or data.size == 0:
        raise ValueError(f"values must be a non-empty list of numbers, got shape {data.shape}")
    if not np.isfinite(data).all():
        return math.nan, math.nan, math.nan
    mean, half = float(data.mean()), 1.96 * spread
    if data.size > 1:
        half = math.hypot(stats.t.ppf(0.975, data.size - 1) * stats.sem(data), half)
    elif not spread:
        half = math.nan
    return mean, mean - half, mean + half


def ratio_interval(values: ArrayLike, spread: float = 0.0) -> tuple[float, float, float]:
    """Return the geometric mean of multipliers over seeds and its 95% interval (mean, low, high).

    "5 times fewer" and "a fifth of" then have one interval: `interval` of the logarithms, of which
    `spread` is the standard deviation too.

    Raises:
        ValueError: as `interval`.
    """
    data = _floats("values", values)
    mean, low, high = interval(np.log(data) if np.isfinite(data).all() else data, spread)
    return math.exp(mean), math.exp(low), math.exp(high)


def _crossing(x: np.ndarray, y: np.ndarray, target: float) -> float:
    """Return where the polyline (x [n], y [n]) first comes down to `target`; inf, nan as above."""
    if y[0] < target:
        return math.nan
    reached = np.flatnonzero(y <= target)
    if reached.size == 0:
        return math.inf
    after = int(reached[0])
    if y[after] == target:
        return float(x[after])
    before = after - 1
    share = (y[before] - target) / (y[before] - y[after])
    return float(x[before] + share * (x[after] - x[before]))


def _curve(x: ArrayLike, y: ArrayLike, x_name: str, y_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float arrays [n], or raise ValueError saying what is wrong with them."""
    xs, ys = _floats(x_name, x), _floats(y_name, y)
    if xs.ndim != 1 or xs.shape != ys.shape or xs.size == 0:
        raise ValueError(
            f"{x_name} and {y_name} must be equally long and not empty, "
            f"got shapes {xs.shape} and {ys.shape}"
        )
    for name, values in ((x_name, xs), (y_name, ys)):
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"{name} must be finite, got {values[bad]} at position {bad}")
    if (np.diff(xs) <= 0).any():
        raise ValueError(f"{x_name} must rise from point to point, got {xs.tolist()}")
    return xs, ys


def _floats(name: str, values: ArrayLike) -> np.ndarray:
    """Return `values` as floats; a masked one, which NumPy would unmask, is refused."""
    if masked := int(np.ma.getmask(values).sum()):
        raise ValueError(f"{name} must not be masked, got {masked} masked; leave them out before")
    return np.asarray(values, dtype=float)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)
