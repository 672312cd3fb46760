"""Curves over an epoch budget, and how many times fewer epochs or FLOPs one needs than another.

Tables of `results.budget_table` in, small tables and sentences out. Intervals hold the training
seeds (Student's t) and the test documents (drawn anew, the same for every point).
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd

from q0lib import efficiency, ensemble, prior, results
from q0lib.population import Population

POINT = ["method", "seed", "epochs"]  # what names a point of a curve
DRAWS = 1000  # of test documents, for an interval


def epoch_curves(
    table: pd.DataFrame, ks: Sequence[int], protocol: Literal["clean", "paper"] = "clean"
) -> pd.DataFrame:
    """The test-loss curves of a table of `budget_rows`, one row a (seed, method, budget).

    q0 gives a curve at its best K ("q0"), one of the uniform mixture of all its snapshots
    ("q0_uniform"), and two for each fixed K that a budget holds, of the paper's cut ("q0_k8") and
    of the greedy choice ("q0_greedy_k8"); any other method is the uniform mixture of all its
    members. "clean" takes the K chosen on fitness documents and
    the number of trajectories that is best on validation over the seeds; "paper" takes both by
    the test loss that is reported, as the paper does with its validation loss.

    Columns: seed, method, epochs, flops, trajectories, choice, k, validation, loss.
    """
    judge = "validation" if protocol == "clean" else "test"
    curves = []
    for method, rows in table.groupby("method", sort=False):
        uniform = rows[rows.choice == "uniform"]
        if method != "q0":
            curves.append(uniform)
            continue
        learned = rows[rows.choice == "truncate"]
        results.check_sizes(ks, int(learned.k.max()))
        best = learned[learned.best_k.astype(bool)]
        if protocol == "paper":
            best = learned.sort_values("test").drop_duplicates(["seed", "epochs", "trajectories"])
        named = {"q0": best, "q0_uniform": uniform}
        named |= {f"q0_k{k}": learned[learned.k == k] for k in ks}
        greedy = rows[rows.choice == "greedy"]
        named |= {f"q0_greedy_k{k}": greedy[greedy.k == k] for k in ks}
        curves += [
            best_allocation(block, judge).assign(method=name)
            for name, block in named.items()
            if len(block)
        ]
    curve = pd.concat(curves).drop_duplicates(["seed", "method", "epochs"])
    return curve.rename(columns={"test": "loss"})[
        ["seed", "method", "epochs", "flops", "trajectories", "choice", "k", "validation", "loss"]
    ].reset_index(drop=True)


def best_allocation(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """The rows of the number of trajectories that is best at each budget, by the mean over seeds.

    A number that some of the seeds have not trained does not stand for election.
    """
    means = rows.groupby(["epochs", "trajectories"])[by].agg(["mean", "size"]).reset_index()
    seeds = means.groupby("epochs")["size"].transform("max")
    means = means[means["size"] == seeds].sort_values(["epochs", "mean"])
    return rows.merge(means.drop_duplicates("epochs")[["epochs", "trajectories"]])


def document_losses(populations: Sequence[Population], curves: pd.DataFrame) -> pd.DataFrame:
    """The test loss of every point of `curves`, document by document, for paired intervals.

    One row a point, and one whose method is "tokens" with the scored tokens of each document;
    columns method, seed, epochs, and d0, d1, ...: summed nats of a document.
    """
    _, index = np.unique(populations[0].documents["test"], return_inverse=True)
    sums = {("tokens", -1, 0.0): np.bincount(index).astype(float)}
    curves = curves.assign(
        base=curves.method.str.replace(r"_(uniform|(greedy_)?k\d+)$", "", regex=True)
    )
    for (base, seed, epochs, count), points in curves.groupby(
        ["base", "seed", "epochs", "trajectories"]
    ):
        ours = [each for each in populations if (each.run.name, each.run.seed) == (base, seed)]
        part = next(filter(None, (results.at_budget(each, epochs, count) for each in ours)))
        P = part.P["fitness"]
        fitted = None if set(points.choice) == {"uniform"} else prior.fit_prior(P, "adamw")
        for point in points.itertuples():
            chosen = prior.select(P, int(point.k), point.choice, fitted)
            nll = -ensemble.mixture_log_probs(chosen.weights, part.P["test"])
            sums[point.method, seed, epochs] = np.bincount(index, weights=nll)
    return document_frame(sums)


def document_frame(sums: dict[tuple, np.ndarray]) -> pd.DataFrame:
    """A table of losses by document: `sums` holds them by (method, seed, epochs)."""
    frame = pd.DataFrame(list(sums.values())).add_prefix("d")
    return pd.concat([pd.DataFrame(list(sums), columns=POINT), frame], axis=1)


def over_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean loss over seeds with its 95% interval (Student t), by method and budget."""
    rows = []
    for (method, epochs), block in curves.groupby(["method", "epochs"], sort=False):
        mean, low, high = efficiency.interval(block.loss.to_list())
        rows.append(
            {"method": method, "epochs": epochs, "flops": block.flops.mean(), "loss": mean,
             "low": low, "high": high, "seeds": len(block)}
        )  # fmt: skip
    return pd.DataFrame(rows).sort_values(["method", "epochs"], ignore_index=True)


def multipliers(
    curves: pd.DataFrame,
    references: Sequence[str] = ("ensemble", "distilled_ensemble"),
    documents: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """What each method saves against the last point of each reference, seed by seed.

    One row a (method, reference, axis) with axis epochs or flops: the mean multiplier over seeds
    with its 95% interval, which is nan when a seed has no crossing; `reached` counts the seeds
    that have one, and `cases` says in words what each seed did. The interval is Student's over
    training seeds; with `documents` (`document_losses` of these curves) it also holds what other
    test documents would have said, the two half-widths added as squares, and with one seed that
    alone. `clipped` is the share of resampled texts without a crossing, where the end of the
    curve stood in for it; `own_k` the reference's members at its last point.
    """
    rows = []
    others = [name for name in curves.method.unique() if name not in references]
    for reference in references:
        theirs = curves[curves.method == reference].sort_values("epochs")
        for method in others if len(theirs) else []:
            for axis in ("epochs", "flops"):
                pair = curves[curves.method.isin([method, reference])]
                pair = pair.drop_duplicates(["seed", "method", axis])  # a tie in FLOPs
                values, cases = [], []
                for _, block in pair.groupby("seed"):
                    unit = "epochs" if axis == "epochs" else "FLOPs"
                    found = efficiency.crossings(block, reference, axis, unit).iloc[0]
                    values.append(float(found.multiplier))
                    cases.append(str(found.label))
                mean, low, high = efficiency.interval(values)
                clipped = math.nan
                if documents is not None and np.isfinite(mean):
                    draws, clipped = _resampled_multipliers(
                        pair, method, reference, axis, documents
                    )
                    of_seeds = high - mean if len(values) > 1 else 0.0
                    half = math.hypot(of_seeds, 1.96 * draws.std())
                    low, high = mean - half, mean + half
                rows.append(
                    {"method": method, "reference": reference, "axis": axis, "multiplier": mean,
                     "low": low, "high": high, "seeds": len(values),
                     "reached": int(np.isfinite(values).sum()), "clipped": clipped,
                     "own_k": int(theirs.k.iloc[-1]),
                     "cases": "; ".join(cases)}
                )  # fmt: skip
    columns = ["method", "reference", "axis", "multiplier", "low", "high", "seeds", "reached"]
    return pd.DataFrame(rows, columns=[*columns, "clipped", "own_k", "cases"])


def multiplier_by_budget(
    curves: pd.DataFrame, method: str = "q0", reference: str = "ensemble"
) -> pd.DataFrame:
    """`multipliers` on epochs for every budget of the reference, not only its last.

    A reference that has stopped improving makes any multiplier against its last point larger the
    longer it is trained; this shows how much. Columns: epochs (of the reference), multiplier, low,
    high (Student's over seeds), reached (seeds that have a crossing; without it the mean is nan).
    """
    rows = []
    for epochs in sorted(curves[curves.method == reference].epochs.unique()):
        values = []
        for _, block in curves.groupby("seed"):
            ours = block[block.method == method].sort_values("epochs")
            theirs = block[(block.method == reference) & (block.epochs == epochs)]
            matched = efficiency.matched_epochs(ours.epochs, ours.loss, theirs.loss.item())
            values.append(efficiency.multiplier(epochs, matched))
        mean, low, high = efficiency.interval(values)
        rows.append({"epochs": epochs, "multiplier": mean, "low": low, "high": high,
                     "reached": int(np.isfinite(values).sum())})  # fmt: skip
    return pd.DataFrame(rows)


def _resampled_multipliers(
    curves: pd.DataFrame, method: str, reference: str, axis: str, documents: pd.DataFrame
) -> tuple[np.ndarray, float]:
    """Mean multipliers over seeds [draws], each on test documents drawn anew with replacement.

    Every point of every curve sees the same draw. Where a draw shows no crossing, its bound (the
    curve's last or first cost) stands in; the share of those comes second.
    """
    losses = resampled_losses(documents)
    means = documents.set_index(POINT).filter(regex=r"^d\d+$").sum(axis=1)
    means /= means.loc["tokens"].iloc[0]
    total, seeds, clipped = np.zeros(DRAWS), curves.seed.unique(), 0
    for seed in seeds:
        of_seed = curves[curves.seed == seed].sort_values(axis)
        ours, theirs = (of_seed[of_seed.method == name] for name in (method, reference))
        drawn = []
        for rows in (ours, theirs.tail(1)):
            points = [(row.method, seed, row.epochs) for row in rows.itertuples()]
            off = [point for point, loss in zip(points, rows.loss, strict=True)
                   if not abs(means.get(point, np.nan) - loss) < 1e-4]  # fmt: skip
            if off:
                raise ValueError(
                    f"the documents do not add up to the loss of {off[0][0]}, seed {seed}, "
                    f"{off[0][2]:g} epochs: they are of other curves"
                )
            drawn.append(np.stack([losses[point] for point in points]))
        x, cost = ours[axis].to_numpy(), float(theirs[axis].iloc[-1])
        for draw in range(DRAWS):
            matched = efficiency.matched_epochs(x, drawn[0][:, draw], drawn[1][0, draw])
            clipped += not math.isfinite(matched)
            matched = x[-1] if math.isinf(matched) else x[0] if math.isnan(matched) else matched
            total[draw] += cost / matched / len(seeds)
    return total, clipped / (DRAWS * len(seeds))


def resampled_losses(documents: pd.DataFrame) -> dict[tuple, np.ndarray]:
    """The losses [draws] of every point of `document_losses`, on documents drawn anew.

    The draws are the same for every point, and the same for every table of the same text.
    """
    sums = documents.set_index(POINT).filter(regex=r"^d\d+$")
    tokens = sums.loc["tokens"].to_numpy()[0]
    draws = np.random.default_rng(0).multinomial(
        len(tokens), np.full(len(tokens), 1 / len(tokens)), size=DRAWS
    )
    points = sums[sums.index.get_level_values("method") != "tokens"]
    losses = draws @ points.to_numpy().T / (draws @ tokens)[:, None]
    return {point: losses[:, i] for i, point in enumerate(points.index)}


def multiplier_table(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `multipliers` for reading: methods down, what they are measured against across.

    A cell is "6.9 [6.1, 7.7]", or how many seeds have a crossing where not all have one.
    """
    cells = []
    for row in table.itertuples():
        text = f"{row.reached} of {row.seeds} seeds cross"
        if np.isfinite(row.multiplier):
            span = f" [{row.low:.1f}, {row.high:.1f}]" if np.isfinite(row.low) else ""
            text = f"{row.multiplier:.1f}{span}"
        cells.append((row.method, f"{row.reference}, {row.axis}", text))
    frame = pd.DataFrame(cells, columns=["method", "against", "times fewer"])
    wide = frame.pivot(index="method", columns="against", values="times fewer")
    return wide.loc[frame.method.unique(), frame.against.unique()]


def short_label(table: pd.DataFrame, method: str = "q0", reference: str = "ensemble") -> str:
    """The multiplier on epochs for the margin of a figure: "2.2x [1.9, 2.5]"."""
    rows = table[(table.method == method) & (table.reference == reference)]
    row = rows[rows.axis == "epochs"].iloc[0]
    if np.isnan(row.multiplier):
        return f"{row.reached} of {row.seeds} seeds cross"
    span = f" [{row.low:.1f}, {row.high:.1f}]" if row.seeds > 1 else ""
    return f"{row.multiplier:.1f}x fewer epochs{span}"


def multiplier_sentence(table: pd.DataFrame) -> str:
    """The headline of a table of `multipliers`, for a terminal or the foot of a figure."""
    lines = []
    for row in table[table.method == "q0"].itertuples():
        value = f"{row.multiplier:.1f}x"
        if np.isnan(row.multiplier):
            value = f"no mean ({row.reached} of {row.seeds} seeds cross: {row.cases})"
        elif row.seeds > 1:
            value += f" [{row.low:.1f}, {row.high:.1f}], {row.seeds} seeds"
        lines.append(f"q0 matches the {row.reference} with fewer {row.axis}: {value}")
    return "\n".join(lines)
