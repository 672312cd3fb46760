"""From populations to tables: what every method reaches at every budget and K.

One row a (method, seed, budget, K, choice); the choice is made on fitness text, the losses of
all three splits stand beside it. Tables are small CSV files that notebooks read in seconds.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import efficiency, ensemble, paths, prior
from q0lib.population import Population

SPLITS = ("fitness", "validation", "test")


def selections(
    population: Population, ks: Sequence[int], choices: Sequence[prior.Choice]
) -> pd.DataFrame:
    """Losses of the population's mixtures, by choice and K.

    Members and weights are chosen on the fitness split. K that the population does not have are
    left out. `test_se` is the standard error of the test loss over documents.

    Columns: choice, k, fitness, validation, test (nats per token), test_se, flops (training).
    """
    possible = sorted({k for k in ks if k <= len(population)})
    fitted = prior.fit_prior(population.P["fitness"], "adamw")
    rows = []
    for choice in choices:
        path = prior.select_path(population.P["fitness"], possible, choice, fitted)
        for k, selection in path.items():
            rows.append({"choice": choice, "k": k, **_losses(population, selection.weights)})
    return pd.DataFrame(rows)


def _losses(population: Population, weights: np.ndarray) -> dict[str, float]:
    row = {}
    for split in SPLITS:
        nll = -ensemble.mixture_log_probs(weights, population.P[split])
        row[split] = float(nll.mean())
    row["test_se"] = ensemble.standard_error(nll, population.documents["test"])
    row["flops"] = population.flops
    return row


def chosen_k(
    population: Population, ks: Sequence[int], choice: prior.Choice = "truncate"
) -> int:  # fmt: skip
    """The K of `ks` with the lowest cross-validated loss over fitness documents.

    On the text that fitted the weights more members always look better; held-out documents of the
    same split tell otherwise, and leave validation and test alone.
    """
    possible = sorted({k for k in ks if k <= len(population)})
    if len(possible) == 1:
        return possible[0]
    held_out = ensemble.cross_validate(
        population.P["fitness"], population.documents["fitness"], possible, (choice,)
    )
    return min(held_out, key=lambda record: record.nll).k


def budget_rows(
    population: Population, budgets: Iterable[float], ks: Sequence[int]
) -> pd.DataFrame:
    """The curve of one population: a block of `selections` for each budget it contains.

    An ensemble is read off at its first members, a trajectory at its first cycles. Each budget
    has the uniform mixture of all members, the paper's truncated prior at every K, and the K
    chosen on fitness documents (column best_k true).
    """
    run, frames = population.run, []
    for epochs in budgets:
        cycles = epochs / (run.trajectories * run.method.epochs_per_cycle)
        members = epochs / (run.cycles * run.method.epochs_per_cycle)
        if cycles == int(cycles) and 1 <= cycles <= run.cycles:
            part = population.prefix(run.trajectories, int(cycles))
        elif members == int(members) and 1 <= members <= run.trajectories:
            part = population.prefix(int(members), run.cycles)
        else:
            continue
        sizes = [*ks, len(part)]
        best = chosen_k(part, sizes)
        learned = selections(part, sizes, ["truncate"])
        learned["best_k"] = learned.k == best
        uniform = selections(part, [len(part)], ["uniform"]).assign(best_k=False)
        table = pd.concat([uniform, learned], ignore_index=True)
        table.insert(0, "epochs", epochs)
        frames.append(table)
    if not frames:
        raise ValueError(
            f"no budget of {list(budgets)} is part of {run.name} at {run.epochs:g} epochs"
        )
    table = pd.concat(frames, ignore_index=True)
    table.insert(0, "seed", run.seed)
    table.insert(0, "method", run.name)
    table["commit"] = population.members["commit"].iloc[-1]
    return table


def snapshot_curve(population: Population, split: str = "test") -> pd.DataFrame:
    """The loss of each snapshot of one trajectory, and of the learned mixture of all up to it.

    Columns: epochs, member, mixture (nats per token).
    """
    rows = []
    for cycles in range(1, population.run.cycles + 1):
        part = population.prefix(1, cycles)
        weights = prior.fit_prior(part.P["fitness"]).weights
        last = part.members.iloc[-1]
        rows.append(
            {
                "epochs": last.epochs,
                "member": last[f"{split}_loss"],
                "mixture": ensemble.mixture_nll(weights, part.P[split]),
            }
        )
    return pd.DataFrame(rows)


def epoch_curves(table: pd.DataFrame, ks: Sequence[int]) -> pd.DataFrame:
    """The test-loss curves of a table of `budget_rows`, one row a (seed, method, budget).

    q0 gives a curve at its best K ("q0") and one for each fixed K that a budget holds ("q0_k8");
    an ensemble is the uniform mixture of all its members.

    Columns: seed, method, epochs, flops, k, loss.
    """
    curves = []
    for method, rows in table.groupby("method", sort=False):
        learned = rows[rows.choice == "truncate"]
        if method == "q0":
            best = learned[learned.best_k.astype(bool)]
            curves.append(best.assign(method="q0"))
            curves += [learned[learned.k == k].assign(method=f"q0_k{k}") for k in ks]
        else:
            curves.append(rows[rows.choice == "uniform"])
    curve = pd.concat(curves).drop_duplicates(["seed", "method", "epochs"])
    return curve.rename(columns={"test": "loss"})[
        ["seed", "method", "epochs", "flops", "k", "loss"]
    ].reset_index(drop=True)


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
    curves: pd.DataFrame, references: Sequence[str] = ("ensemble", "distilled_ensemble")
) -> pd.DataFrame:
    """What each method saves against the last point of each reference, seed by seed.

    One row a (method, reference, axis) with axis epochs or flops: the mean multiplier over seeds
    with its 95% interval, which is nan when a seed has no crossing; `reached` counts the seeds
    that have one, and `cases` says in words what each seed did.
    """
    rows = []
    others = [name for name in curves.method.unique() if name not in references]
    for reference in references:
        for method in others if reference in set(curves.method) else []:
            for axis in ("epochs", "flops"):
                values, cases = [], []
                for _, block in curves[curves.method.isin([method, reference])].groupby("seed"):
                    unit = "epochs" if axis == "epochs" else "FLOPs"
                    found = efficiency.crossings(block, reference, axis, unit).iloc[0]
                    values.append(float(found.multiplier))
                    cases.append(str(found.label))
                mean, low, high = efficiency.interval(values)
                rows.append(
                    {"method": method, "reference": reference, "axis": axis, "multiplier": mean,
                     "low": low, "high": high, "seeds": len(values),
                     "reached": int(np.isfinite(values).sum()), "cases": "; ".join(cases)}
                )  # fmt: skip
    return pd.DataFrame(rows)


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


def write(table: pd.DataFrame, path: Path) -> None:
    """Save a table as CSV, six decimals, whole or not at all."""
    paths.write_text(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def read(path: Path) -> pd.DataFrame:
    """Read a table back.

    Raises:
        FileNotFoundError: it is not there; says how it is made.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there; run the notebook with recompute=True to train and write it"
        )
    return pd.read_csv(path)
