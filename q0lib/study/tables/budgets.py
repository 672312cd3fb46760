"""What a budget is spent on: `small_budgets.csv` and `splits.csv`."""

import numpy as np
import pandas as pd

from q0lib import ensemble, population
from q0lib.study import plan
from q0lib.study.tables import mixtures


def small(found: plan.Trained) -> pd.DataFrame:
    """Budgets of a few epochs, a row a (way to spend them, seed, budget), with `mixtures.worth`.

    `mixed` and `mixed_validation` are the mixture that the method of each way is meant for.
    """
    rows = []
    for each, run in found:
        row = mixtures.worth(whole := population.load(run))
        row.pop("nll")
        kind = run.method.mixture
        rows.append({"spent_on": each.label, "seed": run.seed, "epochs": each.epochs, **row,
                     "mixed": row[kind], "mixed_validation": row[f"{kind}_validation"],
                     **mixtures.origin(whole)})  # fmt: skip
    return pd.DataFrame(rows)


def splits(found: plan.Trained) -> pd.DataFrame:
    """Independent ensembles by the length of their members: uniform mixtures of 1, 2, ... members.

    Columns: split, seed, epochs (a member), members, total (epochs), validation, test.
    """
    rows = []
    for each, run in found:
        whole = population.load(run)
        for members in range(1, run.trajectories + 1):
            P = whole.prefix(members, 1).P
            weights = np.full(members, 1 / members)
            rows.append(
                {"split": each.label, "seed": run.seed, "epochs": run.method.epochs_per_cycle,
                 "members": members, "total": members * run.method.epochs_per_cycle,
                 "validation": ensemble.mixture_nll(weights, P["validation"]),
                 "test": ensemble.mixture_nll(weights, P["test"]), **mixtures.origin(whole)}
            )  # fmt: skip
    return pd.DataFrame(rows)
