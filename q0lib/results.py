"""From populations to tables: what every method reaches at every budget and K.

One row a (method, seed, budget, K, choice); the choice is made on fitness text, the losses of
all three splits stand beside it. Tables are small CSV files that notebooks read in seconds.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import config, efficiency, ensemble, paths, prior
from q0lib.model import forward_flops
from q0lib.population import Population, load

SPLITS = ("fitness", "validation", "test")
PRIOR_TABLES = (
    "prior_fits",
    "prior_weights",
    "prior_choices",
    "prior_cross_validation",
    "prior_fitness_size",
)
ALL_CHOICES: tuple[prior.Choice, ...] = ("truncate", "refit", "greedy", "lowest", "uniform")
CHOICES: tuple[prior.Choice, ...] = ("truncate", "greedy", "lowest", "uniform")


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


def _origin(population: Population) -> dict[str, str]:
    """The columns by which a number is walked back: the run's directory, and the commit."""
    directory = population.directory
    commit = str(population.members["commit"].iloc[-1])
    return {"run": f"{directory.parent.name}/{directory.name}", "commit": commit}


def _losses(population: Population, weights: np.ndarray) -> dict[str, float]:
    row = {}
    for split in SPLITS:
        nll = -ensemble.mixture_log_probs(weights, population.P[split])
        row[split] = float(nll.mean())
    row["test_se"] = ensemble.standard_error(nll, population.documents["test"])
    row["flops"] = population.flops
    return row


def check_sizes(ks: Sequence[int], members: int) -> list[int]:
    """The sizes K, in order; ValueError for one that is not in 1..members."""
    for k in ks:
        if not 1 <= k <= members:
            raise ValueError(f"population sizes K must be in 1..{members}, got {k}")
    return sorted(set(ks))


def chosen_k(population: Population, ks: Sequence[int], choice: prior.Choice = "truncate") -> int:
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
    population: Population, budgets: Iterable[float], ks: Sequence[int] = ()
) -> pd.DataFrame:
    """The curve of one population: a block of `selections` for each budget it contains.

    An ensemble is read off at its first members, a trajectory at its first cycles; budgets that
    the population does not contain are left out. Each budget has the uniform mixture of all
    members, the paper's truncated prior at all members and at every K of `ks` that it holds, and
    the K chosen on fitness documents (column best_k true).

    Raises:
        ValueError: a K that is not among 1..M, or no budget that the population contains.
    """
    check_sizes(ks, len(population))
    run, frames = population.run, []
    for epochs in budgets:
        cycles = epochs / (run.trajectories * run.method.epochs_per_cycle)
        members = epochs / (run.cycles * run.method.epochs_per_cycle)
        if abs(cycles - round(cycles)) < 1e-9 and 1 <= round(cycles) <= run.cycles:
            part = population.prefix(run.trajectories, round(cycles))
        elif abs(members - round(members)) < 1e-9 and 1 <= round(members) <= run.trajectories:
            part = population.prefix(round(members), run.cycles)
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
    return table.assign(**_origin(population))


def fitness_curve(
    population: Population, sizes: Sequence[int], k: int, split: str = "validation"
) -> pd.DataFrame:
    """What more fitness text buys: losses after choosing on its first `sizes` tokens.

    Columns: tokens, choice, loss (nats per token on `split`). Choices: "prior" (exact weights on
    all members) and, each of k members, "truncate", "greedy", "lowest" and "uniform" (evenly
    spread, which needs no fitness text).
    """
    P, total = population.P["fitness"], population.P["fitness"].shape[1]
    rows = []
    for size in [*(size for size in sizes if size < total), total]:
        part = P[:, :size]
        fitted = prior.fit_prior(part, "adamw")
        weights = {"prior": prior.fit_prior(part).weights}
        for choice in CHOICES:
            weights[choice] = prior.select(part, k, choice, fitted).weights
        rows += [
            {"tokens": size, "choice": name, "loss": ensemble.mixture_nll(w, population.P[split])}
            for name, w in weights.items()
        ]
    return pd.DataFrame(rows)


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


def prior_tables(
    runs: Sequence[config.Run], ks: Sequence[int], sizes: Sequence[int], k: int
) -> dict[str, pd.DataFrame]:
    """Everything that the notebook on the prior shows, for the populations of `runs`.

    prior_fits: both fits with loss, certificate and seconds. prior_weights: the exact weight of
    every member. prior_choices: `selections` by every choice, with the paired distance of each K
    to the same choice's largest K, and what K costs at inference. prior_cross_validation: every
    choice and K on held-out fitness documents; `chosen` marks the smallest K within one standard
    error of the best. prior_fitness_size: `fitness_curve`.
    """
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in PRIOR_TABLES}
    for run in runs:
        part = load(run)
        P, possible = part.P["fitness"], check_sizes(ks, len(part))
        fitted = {name: _timed_fit(P, name) for name in ("exact", "adamw")}
        weights = fitted["exact"][0].weights
        held_out = ensemble.cross_validate(P, part.documents["fitness"], possible, ALL_CHOICES)
        chosen = ensemble.smallest_k_within_one_se(held_out)
        blocks = {
            "prior_fits": pd.DataFrame([
                {"fit": name, "nll": fit.nll, "gap": fit.gap, "steps": fit.steps, "seconds": took,
                 "test": ensemble.mixture_nll(fit.weights, part.P["test"])}
                for name, (fit, took) in fitted.items()
            ]),
            "prior_weights": part.members[["epochs", "fitness_loss"]].assign(weight=weights),
            "prior_choices": _with_costs(part, selections(part, possible, ALL_CHOICES)),
            "prior_cross_validation": pd.DataFrame(
                [{"choice": each.method, "k": each.k, "nll": each.nll, "se": each.se,
                  "behind": each.behind, "behind_se": each.behind_se, "chosen": each is chosen}
                 for each in held_out]
            ),
            "prior_fitness_size": fitness_curve(part, sizes, k),
        }  # fmt: skip
        for name, block in blocks.items():
            block.insert(0, "seed", run.seed)
            tables[name].append(block.assign(**_origin(part)))
    return {name: pd.concat(blocks, ignore_index=True) for name, blocks in tables.items()}


def _timed_fit(P: np.ndarray, method: prior.Fit) -> tuple[prior.Prior, float]:
    started = time.perf_counter()
    return prior.fit_prior(P, method), time.perf_counter() - started


def _with_costs(population: Population, table: pd.DataFrame) -> pd.DataFrame:
    """Add to `selections` the paired distance to each choice's largest K, and inference costs."""
    P, documents = population.P, population.documents["test"]
    fitted = prior.fit_prior(P["fitness"], "adamw")
    rows = []
    for choice, block in table.groupby("choice", sort=False):
        path = prior.select_path(P["fitness"], block.k.tolist(), choice, fitted)
        nll = {k: -ensemble.mixture_log_probs(each.weights, P["test"]) for k, each in path.items()}
        most = nll[max(nll)]
        rows += [ensemble.paired_difference(values, most, documents) for values in nll.values()]
    behind, errors = zip(*rows, strict=True)
    flops = table.k * forward_flops(population.run.model)
    return table.assign(
        behind_all=behind, behind_all_se=errors, forward_passes=table.k, flops_per_token=flops
    )


def epoch_curves(table: pd.DataFrame, ks: Sequence[int]) -> pd.DataFrame:
    """The test-loss curves of a table of `budget_rows`, one row a (seed, method, budget).

    q0 gives a curve at its best K ("q0"), one of the uniform mixture of all its snapshots
    ("q0_uniform"), and one for each fixed K that a budget holds ("q0_k8"); an ensemble is the
    uniform mixture of all its members.

    Columns: seed, method, epochs, flops, k, loss.
    """
    curves = []
    for method, rows in table.groupby("method", sort=False):
        learned = rows[rows.choice == "truncate"]
        if method == "q0":
            best = learned[learned.best_k.astype(bool)]
            curves.append(best.assign(method="q0"))
            curves.append(rows[rows.choice == "uniform"].assign(method="q0_uniform"))
            check_sizes(ks, int(learned.k.max()))
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
    columns = ["method", "reference", "axis", "multiplier", "low", "high", "seeds", "reached"]
    return pd.DataFrame(rows, columns=[*columns, "cases"])


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


def budgets_of(study: config.Study) -> list[float]:
    """Epoch budgets for a curve of a study: every member of the ensemble, and some below.

    Multiples of the ensemble's epochs a member up to the study's budget (at most eight), and a
    quarter, a half and one and a half of the first.
    """
    member = study.methods["ensemble"].epochs_per_cycle
    count = int(study.epochs / member)
    whole = [member * n for n in range(1, count + 1, -(-count // 8))]
    below = [member * share for share in (0.25, 0.5, 1.5) if member * share < study.epochs]
    return sorted({*whole, *below, member * count})


def write(table: pd.DataFrame, path: Path) -> None:
    """Save a table as CSV, six significant digits, whole or not at all."""
    paths.write_text(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def read(path: Path, **asked: Sequence[object]) -> pd.DataFrame:
    """Read a table back, or the rows of it whose columns hold the values asked for.

    Raises:
        FileNotFoundError: it is not there; says how it is made.
        ValueError: a value asked for is nowhere in its column.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there; run the notebook with recompute=True to train and write it"
        )
    table = pd.read_csv(path)
    for column, values in asked.items():
        held = set(table[column])
        if missing := [value for value in values if value not in held]:
            raise ValueError(
                f"{path.name} has no {column} {missing[0]!r}, it has {sorted(held)}; run the "
                "notebook with recompute=True to train what is missing"
            )
        table = table[table[column].isin(values)]
    return table.reset_index(drop=True)
