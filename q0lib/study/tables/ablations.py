"""What each variant of the recipe is worth beside the full one: `ablations.csv`, `snapshots.csv`.

Members and weights are chosen on fitness text. Losses are nats per token.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from q0lib import efficiency, ensemble, population
from q0lib.study import plan
from q0lib.study.tables import mixtures, multipliers


def tables(found: plan.Trained, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
    """What each variant of the recipe is worth, and how it got there.

    ablations: a row a (variant, seed, budget) with `mixtures.worth`; `behind` is how far the
    learned mixture lies above the full recipe's of the same seed on test (nan where that does not
    go so far), `behind_se` its error paired over documents, and `mean_behind_se` the same error of
    the mean over the `paired` seeds. snapshots: `mixtures.snapshot_curve` of each variant and seed.
    A budget that a run ends before has no row.

    Raises:
        ValueError: a budget that is no whole number of some variant's cycles.
    """
    populations = [(each, population.load(run)) for each, run in found]
    nll, rows = {}, []
    for each, whole in populations:
        for epochs in budgets:
            if epochs > whole.run.epochs:
                continue
            part = mixtures.at_budget(whole, epochs, 1)
            if part is None:
                raise ValueError(f"{each.label} has no snapshot after {epochs:g} epochs")
            row = mixtures.worth(part)
            nll[each.label, whole.run.seed, epochs] = row.pop("nll")
            rows.append({"variant": each.label, "seed": whole.run.seed, "epochs": epochs, **row,
                         **mixtures.origin(whole)})  # fmt: skip
    documents = populations[0][1].documents["test"]
    for row in rows:
        variant, epochs = row["variant"], row["epochs"]
        pairs = {
            seed: (each, nll[plan.FULL, seed, epochs])
            for (label, seed, at), each in nll.items()
            if (label, at) == (variant, epochs) and (plan.FULL, seed, epochs) in nll
        }
        row |= {"paired": len(pairs), "behind": np.nan, "behind_se": np.nan}
        row["mean_behind_se"] = np.nan
        if row["seed"] in pairs:
            ours, full = pairs[row["seed"]]
            row["behind"], row["behind_se"] = ensemble.paired_difference(ours, full, documents)
            ours, full = np.mean(list(pairs.values()), axis=0)
            row["mean_behind_se"] = ensemble.paired_difference(ours, full, documents)[1]
    curves = [
        mixtures.snapshot_curve(whole).assign(variant=each.label, seed=whole.run.seed)
        for each, whole in populations
    ]
    return {"ablations": pd.DataFrame(rows), "snapshots": pd.concat(curves, ignore_index=True)}


def against_full(ablations: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """`variants` against the full recipe, over seeds: the rows of a figure, best last.

    Columns: variant, epochs, seeds, snapshot, learned (means), behind with its 95% interval (low,
    high: the documents' error and, with two seeds or more, Student's over them, added as
    squares), by_seed (a list).

    Raises:
        ValueError: a variant that is not there, or that has nothing to compare it with.
    """
    rows = []
    known = ablations[ablations.variant.isin(variants) & ablations.behind.notna()]
    if missing := set(variants) - set(known.variant):
        raise ValueError(f"no pair of {sorted(missing)[0]!r} and the full recipe at one budget")
    for (variant, epochs), block in known.groupby(["variant", "epochs"], sort=False):
        whole = len(block) == block.paired.iloc[0]
        # Of some of the seeds alone, the mean's error over documents is at most their mean error.
        error = float((block.mean_behind_se if whole else block.behind_se).mean())
        mean, low, high = efficiency.interval(block.behind, error)
        rows.append({"variant": variant, "epochs": epochs, "seeds": len(block),
                     "snapshot": block.snapshot.mean(), "learned": block.learned.mean(),
                     "behind": mean, "low": low, "high": high,
                     "by_seed": block.behind.tolist()})  # fmt: skip
    order = ["epochs", "behind"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, False], ignore_index=True)


def leads(
    snapshots: pd.DataFrame, curves: pd.DataFrame, reference: str = "ensemble"
) -> pd.DataFrame:
    """How many times fewer epochs and FLOPs than the largest ensemble each variant needs.

    `multipliers.against` of every variant in a table of snapshots, its learned mixture of all
    snapshots so far, against the reference of `curves` (as `epoch_efficiency.table` has them), for
    the seeds that a variant has. The interval covers the training seeds alone.

    Raises:
        ValueError: a seed of the snapshots without a reference.
    """
    point = ["seed", "epochs", "flops", "loss"]
    base = curves[(curves.method == reference) & (curves.choice == "uniform")]
    base = base.rename(columns={"test": "loss"})[["method", *point, "k"]]
    blocks = []
    for variant, rows in snapshots.groupby("variant", sort=False):
        ours = rows.rename(columns={"mixture": "loss"}).assign(method=variant)[["method", *point]]
        pair = pd.concat([ours, base[base.seed.isin(rows.seed)]])
        blocks.append(multipliers.against(pair, [reference]))
    return pd.concat(blocks, ignore_index=True)
