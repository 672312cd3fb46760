"""Curves over an epoch budget, and how many times fewer epochs or FLOPs one needs than another.

Tables of `results.budget_table` in, small tables and sentences out. A multiplier is a geometric
mean over training seeds; its interval holds the seeds (Student's t) and the test documents (drawn
anew, the same draw for every point).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from q0lib import efficiency, ensemble, prior, results
from q0lib.population import Population

POINT = ["method", "seed", "epochs"]  # what names a point of a curve
TOKENS = ("tokens", -1, 0.0)  # the row of a table by document that holds their sizes
DRAWS = 1000  # of test documents, for an interval
OPEN = 0.025  # an interval is marked where more of the draws have no crossing


def epoch_curves(
    table: pd.DataFrame, ks: Sequence[int], protocol: Literal["clean", "paper"] = "clean"
) -> pd.DataFrame:
    """The test-loss curves of a table of `budget_rows`, one row a (seed, method, budget).

    q0 gives a curve at its best K ("q0"), one of the uniform mixture of all its snapshots
    ("q0_uniform"), and two for each fixed K that a budget holds, of the paper's cut ("q0_k8") and
    of the greedy choice ("q0_greedy_k8"); any other method is the uniform mixture of all its
    members. "clean" takes the K chosen on fitness documents and the number of trajectories that
    is best on validation over the seeds; "paper" takes both by the test loss that is reported, as
    the paper does with its validation loss.

    Columns: seed, method, base (whose population it is), epochs, flops, trajectories, choice, k,
    validation, loss.

    Raises:
        ValueError: a K beyond every population, or one that the table does not have wherever it
            could.
    """
    judge = "validation" if protocol == "clean" else "test"
    curves = []
    for method, rows in table.groupby("method", sort=False):
        uniform = rows[rows.choice == "uniform"]
        if method != "q0":
            curves.append(uniform.assign(base=method))
            continue
        learned = rows[rows.choice == "truncate"]
        results.check_sizes(ks, int(learned.k.max()))
        greedy = rows[rows.choice == "greedy"]
        _check_cuts(learned, greedy, ks)
        best = learned[learned.best_k.astype(bool)]
        if protocol == "paper":
            best = learned.sort_values("test").drop_duplicates(["seed", "epochs", "trajectories"])
        named = {"q0": best, "q0_uniform": uniform}
        named |= {f"q0_k{k}": learned[learned.k == k] for k in ks}
        named |= {f"q0_greedy_k{k}": greedy[greedy.k == k] for k in ks}
        curves += [
            elected(block, "epochs", "trajectories", judge).assign(method=name, base="q0")
            for name, block in named.items()
            if len(block)
        ]
    curve = pd.concat(curves).drop_duplicates(["seed", "method", "epochs"])
    columns = ["seed", "method", "base", "epochs", "flops", "trajectories", "choice", "k",
               "validation", "loss"]  # fmt: skip
    return curve.rename(columns={"test": "loss"})[columns].reset_index(drop=True)


def _check_cuts(learned: pd.DataFrame, greedy: pd.DataFrame, ks: Sequence[int]) -> None:
    """Raise ValueError unless both choices have each K at every budget with so many snapshots."""
    point = ["seed", "epochs", "trajectories"]
    members = learned.groupby(point).k.max()
    for k in ks:
        for name, rows in {"cut": learned, "greedy choice": greedy}.items():
            lacks = members[members >= k].index.difference(
                pd.MultiIndex.from_frame(rows.loc[rows.k == k, point])
            )
            if len(lacks):
                raise ValueError(
                    f"the table has no {name} of K = {k} at {lacks[0][1]:g} epochs, seed "
                    f"{lacks[0][0]}; run 04_epoch_efficiency with recompute=True to write it"
                )


def elected(rows: pd.DataFrame, group: str, candidate: str, by: str) -> pd.DataFrame:
    """The rows of the candidate with the lowest mean of `by` over seeds, in each group.

    `rows` has one row a (group, candidate, seed). A candidate that lacks a seed which another of
    its group has does not stand for election.
    """
    means = rows.groupby([group, candidate])[by].agg(["mean", "size"]).reset_index()
    seeds = means.groupby(group)["size"].transform("max")
    means = means[means["size"] == seeds].sort_values([group, "mean"])
    return rows.merge(means.drop_duplicates(group)[[group, candidate]])


def document_losses(populations: Sequence[Population], curves: pd.DataFrame) -> pd.DataFrame:
    """The test loss of every point of `curves`, document by document, for paired intervals.

    One row a point, and one whose method is "tokens" with the scored tokens of each document;
    columns method, seed, epochs, and d0, d1, ...: summed nats of a document.
    """
    sums = {TOKENS: document_sizes(populations[0])}
    for (base, seed, epochs, count), points in curves.groupby(
        ["base", "seed", "epochs", "trajectories"]
    ):
        ours = [each for each in populations if (each.run.name, each.run.seed) == (base, seed)]
        part = next(filter(None, (results.at_budget(each, epochs, count) for each in ours)))
        P = part.P["fitness"]
        fitted = None if set(points.choice) == {"uniform"} else prior.fit_prior(P, "adamw")
        for point in points.itertuples():
            chosen = prior.select(P, int(point.k), point.choice, fitted)
            sums[point.method, seed, epochs] = document_sums(part, chosen.weights)
    return document_frame(sums)


def document_sizes(population: Population) -> np.ndarray:
    """The scored tokens of each test document."""
    _, index = np.unique(population.documents["test"], return_inverse=True)
    return np.bincount(index).astype(float)


def document_sums(population: Population, weights: np.ndarray) -> np.ndarray:
    """What the mixture of all members with `weights` [M] loses on each test document: summed nats,
    in the order of `document_sizes`."""
    _, index = np.unique(population.documents["test"], return_inverse=True)
    nll = -ensemble.mixture_log_probs(weights, population.P["test"])
    return np.bincount(index, weights=nll)


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

    One row a (method, reference, axis) with axis epochs or flops: the geometric mean of the
    multiplier over seeds with its 95% interval, nan when a seed has no crossing; `reached` counts
    the seeds that have one, and `cases` says in words what each seed did. The interval is
    `efficiency.ratio_interval`: Student's over training seeds and, with `documents`
    (`document_losses` of these curves), what other test documents would have said. `clipped` is
    the share of resampled texts without a crossing, where the end of the curve stood in for it;
    `own_k` the reference's members at its last point.

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
                    logs, clipped = _resampled_multipliers(pair, method, reference, axis, documents)
                    spread = float(logs.std())
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


def multiplier_by_budget(
    curves: pd.DataFrame, method: str = "q0", reference: str = "ensemble"
) -> pd.DataFrame:
    """`multipliers` on epochs for every budget of the reference, not only its last.

    A reference that has stopped improving makes any multiplier against its last point larger the
    longer it is trained; this shows how much. Columns: epochs (of the reference), multiplier, low,
    high (Student's over seeds), reached (seeds that have a crossing; without it the mean is nan).

    Raises:
        ValueError: as `multipliers`.
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


def _resampled_multipliers(
    curves: pd.DataFrame, method: str, reference: str, axis: str, documents: pd.DataFrame
) -> tuple[np.ndarray, float]:
    """Logarithms of multipliers, means over seeds [draws], on test documents drawn anew.

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
            total[draw] += math.log(cost / matched) / len(seeds)
    return total, clipped / (DRAWS * len(seeds))


def resampled_losses(documents: pd.DataFrame) -> dict[tuple, np.ndarray]:
    """The losses [draws] of every point of `document_losses`, on documents drawn anew.

    The draws are the same for every point, and the same for every table of the same text.

    Raises:
        ValueError: a point that is there twice.
    """
    sums = documents.set_index(POINT).filter(regex=r"^d\d+$")
    if (twice := sums.index[sums.index.duplicated()]).size:
        raise ValueError(f"losses by document hold {twice[0]} twice: of two protocols?")
    tokens = sums.loc[TOKENS].to_numpy()
    draws = np.random.default_rng(0).multinomial(
        len(tokens), np.full(len(tokens), 1 / len(tokens)), size=DRAWS
    )
    points = sums[sums.index.get_level_values("method") != "tokens"]
    losses = draws @ points.to_numpy().T / (draws @ tokens)[:, None]
    return {point: losses[:, i] for i, point in enumerate(points.index)}


def multiplier_table(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `multipliers` for reading: methods down, what they are measured against across.

    A cell is "6.9x [6.1, 7.7]", with a star where the interval is too narrow because more than
    2.5% of the resampled texts have no crossing, or how many seeds cross where not all do.
    """
    cells = [(row.method, f"{row.reference}, {row.axis}", _said(row)) for row in table.itertuples()]
    frame = pd.DataFrame(cells, columns=["method", "against", "times fewer"])
    wide = frame.pivot(index="method", columns="against", values="times fewer")
    return wide.loc[frame.method.unique(), frame.against.unique()]


def marked_crossing(
    means: pd.DataFrame, table: pd.DataFrame, method: str = "q0", reference: str = "ensemble"
) -> pd.DataFrame:
    """The crossing that a figure of `means` (`over_seeds`) marks: `efficiency.crossings`, with the
    range and the label of the multiplier in a table of `multipliers`.

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


def multiplier_sentence(table: pd.DataFrame) -> str:
    """The headline of a table of `multipliers`, for a terminal or the foot of a figure."""
    lines = []
    for row in table[table.method == "q0"].itertuples():
        axis = {"flops": "FLOPs"}.get(row.axis, row.axis)
        seeds = f"{row.seeds} seeds" if row.seeds > 1 else "one seed"
        more = row.cases if np.isnan(row.multiplier) else seeds
        lines.append(f"q0 matches the {row.reference} with fewer {axis}: {_said(row)} ({more})")
    return "\n".join(lines)


def _said(row: Any, what: str = "") -> str:
    """A row of `multipliers` in a few characters."""
    if np.isnan(row.multiplier):
        return f"{row.reached} of {row.seeds} seeds cross"
    span = f" [{row.low:.1f}, {row.high:.1f}]" if np.isfinite(row.low) else ""
    return f"{row.multiplier:.1f}x{what}{span}{'*' if row.clipped > OPEN else ''}"
