"""The trials that fixed a preset: `tuning.csv`."""

import numpy as np
import pandas as pd

from q0lib import ensemble, population
from q0lib.study import plan
from q0lib.study.tables import mixtures


def table(found: plan.Trained) -> pd.DataFrame:
    """The trials that fixed a preset, with their validation losses: a row a trial and budget.

    A trial is read at every budget at which its method has a trial, so that each can be compared.
    Columns: method, seed, changed (fields that differ from the preset's, or are the preset's),
    epochs, members, snapshot (mean of the members), uniform, learned, run, commit.
    """
    rows = []
    for each, run in found:
        whole = population.load(run)
        for epochs in sorted({other.epochs for other, _ in found if other.method == each.method}):
            part = mixtures.at_budget(whole, epochs, run.trajectories)
            if part is None:
                continue
            P, M = part.P, len(part)
            fitted = part.fitted()
            rows.append(
                {"method": run.name, "seed": run.seed, "changed": each.label, "epochs": epochs,
                 "members": M, "snapshot": part.members.validation_loss.mean(),
                 "uniform": ensemble.mixture_nll(np.full(M, 1 / M), P["validation"]),
                 "learned": ensemble.mixture_nll(fitted.weights, P["validation"]),
                 **mixtures.origin(whole)}
            )  # fmt: skip
    return pd.DataFrame(rows)
