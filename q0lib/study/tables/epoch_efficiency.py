"""What every method reaches at every budget and K: `epoch_efficiency.csv`, and its curves.

One row a (method, seed, budget, K, choice); the choice is made on fitness text, the losses of all
three splits stand beside it.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd

from q0lib import config, prior
from q0lib.population import Population
from q0lib.study.tables import intervals, mixtures


def table(
    populations: Sequence[Population], budgets: Sequence[float], ks: Sequence[int] = ()
) -> pd.DataFrame:
    """`rows` of every population, and of its first 1, 2, ... trajectories if they have
    cycles; what two of them contain is there once.

    Raises:
        ValueError: a K that a population does not have, or no budget that any of them contains.
    """
    blocks = []
    for each in populations:
        sizes = ks if each.run.cycles > 1 else ()
        mixtures.check_sizes(sizes, len(each))
        counts = range(1, each.run.trajectories + 1) if each.run.cycles > 1 else [None]
        for count in counts:
            part = each if count is None else each.prefix(count, each.run.cycles)
            blocks.append(rows(part, budgets, sizes))
    if all(block.empty for block in blocks):
        held = ", ".join(f"{each.run.name} at {each.run.epochs:g} epochs" for each in populations)
        raise ValueError(f"no budget of {list(budgets)} is part of {held}")
    table = pd.concat(blocks, ignore_index=True)
    keys = ["method", "seed", "epochs", "trajectories", "choice", "k"]
    return table.drop_duplicates(keys, ignore_index=True)


def rows(population: Population, budgets: Sequence[float], ks: Sequence[int] = ()) -> pd.DataFrame:
    """The curve of one population: a block of `selections` for each budget it contains.

    An ensemble is read off at its first members, trajectories with cycles at their first cycles;
    budgets that the population does not contain are left out. Each budget has the uniform mixture
    of all members; the paper's fit (by AdamW), cut to every K of `ks`, to every power of two and to
    all members, of which the K chosen on fitness documents has best_k true; and the greedy choice
    at every K of `ks`, which starts from the paper's fit too.
    """
    run, frames = population.run, []
    for epochs in budgets:
        part = mixtures.at_budget(population, epochs, run.trajectories)
        if part is None:
            continue
        sizes = [*ks, *(2**i for i in range(len(part).bit_length())), len(part)]
        best = mixtures.chosen_k(part, sizes)
        papers = part.fitted("adamw")
        cut = mixtures.selections(part, sizes, ["truncate"], papers)
        cut["best_k"] = cut.k == best
        uniform = mixtures.selections(part, [len(part)], ["uniform"], papers).assign(best_k=False)
        greedy = mixtures.selections(part, ks if len(part) > 1 else [], ["greedy"], papers)
        greedy = greedy.assign(best_k=False)
        table = pd.concat([uniform, cut, greedy], ignore_index=True)
        table.insert(0, "trajectories", part.run.trajectories)
        table.insert(0, "epochs", epochs)
        frames.append(table)
    if not frames:
        return pd.DataFrame()
    table = pd.concat(frames, ignore_index=True)
    table.insert(0, "seed", run.seed)
    table.insert(0, "method", run.name)
    return table.assign(**mixtures.origin(population))


def curves(
    table: pd.DataFrame,
    methods: Mapping[str, config.Method],
    ks: Sequence[int],
    protocol: Literal["clean", "paper"] = "clean",
) -> pd.DataFrame:
    """The test-loss curves of a table of `rows`, one row a (seed, method, budget).

    Of `methods`, one whose mixture is learned gives a curve of the paper's cut at its best K
    ("q0"), one of the uniform mixture of all its snapshots ("q0_uniform"), and two for each fixed K
    that a budget holds, of the paper's cut ("q0_k8") and of the greedy choice ("q0_greedy_k8"); one
    whose mixture is uniform gives that of all its members. "clean" takes the K chosen on fitness
    documents and the number of trajectories that is best on validation over the seeds; "paper"
    takes both by the test loss that is reported, as the paper does with its validation loss.

    Columns: seed, method, base (whose population it is), epochs, flops, trajectories, choice, k,
    validation, loss.

    Raises:
        ValueError: a method that is none of `methods`, a K beyond every population, or one that
            the table does not have wherever it could.
    """
    judge = "validation" if protocol == "clean" else "test"
    curves = []
    for method, rows in table.groupby("method", sort=False):
        if method not in methods:
            raise ValueError(f"the table has a method {method!r}, known: {', '.join(methods)}")
        uniform = rows[rows.choice == "uniform"]
        if methods[method].mixture == "uniform":
            curves.append(uniform.assign(base=method))
            continue
        cut, greedy = (rows[rows.choice == choice] for choice in ("truncate", "greedy"))
        mixtures.check_sizes(ks, int(cut.k.max()))
        _check_cuts(cut, greedy, ks)
        best = cut[cut.best_k.astype(bool)]
        if protocol == "paper":
            best = cut.sort_values("test").drop_duplicates(["seed", "epochs", "trajectories"])
        named = {method: best, f"{method}_uniform": uniform}
        named |= {f"{method}_k{k}": cut[cut.k == k] for k in ks}
        named |= {f"{method}_greedy_k{k}": greedy[greedy.k == k] for k in ks}
        for name, block in named.items():
            if len(block):
                chosen = intervals.elected(block, "epochs", "trajectories", judge)
                curves.append(chosen.assign(method=name, base=method))
    curve = pd.concat(curves).drop_duplicates(["seed", "method", "epochs"])
    columns = ["seed", "method", "base", "epochs", "flops", "trajectories", "choice", "k",
               "validation", "loss"]  # fmt: skip
    return curve.rename(columns={"test": "loss"})[columns].reset_index(drop=True)


def _check_cuts(cut: pd.DataFrame, greedy: pd.DataFrame, ks: Sequence[int]) -> None:
    """Raise ValueError unless both choices have each K at every budget with so many snapshots."""
    point = ["seed", "epochs", "trajectories"]
    members = cut.groupby(point).k.max()
    for k in ks:
        for name, rows in {"cut": cut, "greedy choice": greedy}.items():
            lacks = members[members >= k].index.difference(
                pd.MultiIndex.from_frame(rows.loc[rows.k == k, point])
            )
            if len(lacks):
                raise ValueError(
                    f"the table has no {name} of K = {k} at {lacks[0][1]:g} epochs, seed "
                    f"{lacks[0][0]}; run 04_epoch_efficiency with recompute=True to write it"
                )


def document_losses(populations: Sequence[Population], curves: pd.DataFrame) -> pd.DataFrame:
    """The test loss of every point of `curves`, document by document, for paired intervals.

    One row a point, and one whose method is "tokens" with the scored tokens of each document;
    columns method, seed, epochs, and d0, d1, ...: summed nats of a document.
    """
    sums = {intervals.TOKENS: intervals.document_sizes(populations[0])}
    for (base, seed, epochs, count), points in curves.groupby(
        ["base", "seed", "epochs", "trajectories"]
    ):
        ours = [each for each in populations if (each.run.name, each.run.seed) == (base, seed)]
        part = next(filter(None, (mixtures.at_budget(each, epochs, count) for each in ours)))
        P = part.P["fitness"]
        papers = None if set(points.choice) == {"uniform"} else part.fitted("adamw")
        for point in points.itertuples():
            chosen = prior.select(P, int(point.k), point.choice, papers)
            sums[point.method, seed, epochs] = intervals.document_sums(part, chosen.weights)
    return intervals.document_frame(sums)
