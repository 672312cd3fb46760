"""Seeds and documents: who is elected over seeds, means with intervals, texts drawn anew."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from q0lib import efficiency, ensemble
from q0lib.population import Population

POINT = ["method", "seed", "epochs"]  # what names a point of a curve
TOKENS = ("tokens", -1, 0.0)  # the row of a table by document that holds their sizes
DRAWS = 1000  # of test documents, for an interval


def elected(rows: pd.DataFrame, group: str, candidate: str, by: str) -> pd.DataFrame:
    """The rows of the candidate with the lowest mean of `by` over seeds, in each group.

    `rows` has one row a (group, candidate, seed). A candidate that lacks a seed which another of
    its group has does not stand for election.
    """
    means = rows.groupby([group, candidate])[by].agg(["mean", "size"]).reset_index()
    seeds = means.groupby(group)["size"].transform("max")
    means = means[means["size"] == seeds].sort_values([group, "mean"])
    return rows.merge(means.drop_duplicates(group)[[group, candidate]])


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


def crossing_spread(curves: Sequence[tuple[np.ndarray, ...]]) -> tuple[float, float]:
    """How much the place where curves meet their goals depends on the choice of test documents.

    curves: of each seed the costs [n], and on texts drawn anew the losses [n, draws] there and the
    goals [draws]; every curve sees the same draws. Returns the standard deviation over draws of the
    logarithm of the crossing, mean over seeds, and the share of draws that show no crossing, where
    the curve's first or last cost stood in for it.
    """
    logs, clipped = [], []
    for costs, losses, goals in curves:
        found = np.array([
            efficiency.matched_epochs(costs, drawn, goal)
            for drawn, goal in zip(losses.T, goals, strict=True)
        ])  # fmt: skip
        clipped.append(~np.isfinite(found))
        logs.append(np.log(np.clip(np.nan_to_num(found, nan=costs[0]), costs[0], costs[-1])))
    return float(np.mean(logs, axis=0).std()), float(np.mean(clipped))
