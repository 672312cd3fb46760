"""From populations to tables: what every method reaches at every budget and K.

One row a (method, seed, budget, K, choice); the choice is made on fitness text, the losses of
all three splits stand beside it. Tables are small CSV files that notebooks read in seconds.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import config, ensemble, paths, prior
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
WRITTEN_BY = {
    **dict.fromkeys(("ablations", "snapshots"), "01_cycles"),
    **dict.fromkeys(("epoch_efficiency", "test_documents"), "04_epoch_efficiency"),
    **dict.fromkeys(("reference", "reference_documents", "data_efficiency"), "05_data_efficiency"),
    **dict.fromkeys(("small_budgets", "splits"), "06_allocation"),
    **dict.fromkeys(("runs", "tuning", "summary"), "measured_study"),
    "epoch_multipliers": "04_epoch_efficiency",
    **dict.fromkeys(PRIOR_TABLES, "03_learned_prior"),
}
ALL_CHOICES: tuple[prior.Choice, ...] = ("truncate", "refit", "greedy", "lowest", "uniform")
CHOICES: tuple[prior.Choice, ...] = ("truncate", "greedy", "lowest", "uniform")


def selections(
    population: Population,
    ks: Sequence[int],
    choices: Sequence[prior.Choice],
    fitted: prior.Prior | None = None,
) -> pd.DataFrame:
    """Losses of the population's mixtures, by choice and K.

    Members and weights are chosen on the fitness split, by the AdamW fit unless another is
    `fitted`. K that the population does not have are left out. `test_se` is the standard error
    of the test loss over documents.

    Columns: choice, k, fitness, validation, test (nats per token), test_se, flops (training).
    """
    possible = sorted({k for k in ks if k <= len(population)})
    fitted = fitted or prior.fit_prior(population.P["fitness"], "adamw")
    rows = []
    for choice in choices:
        path = prior.select_path(population.P["fitness"], possible, choice, fitted)
        for k, selection in path.items():
            rows.append({"choice": choice, "k": k, **_losses(population, selection.weights)})
    return pd.DataFrame(rows)


def origin(population: Population) -> dict[str, str]:
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
    same split tell otherwise, and leave validation and test alone. What a member costs at
    inference does not count here; `prior_tables` marks the smallest K that is as good.
    """
    possible = sorted({k for k in ks if k <= len(population)})
    if len(possible) == 1:
        return possible[0]
    held_out = ensemble.cross_validate(
        population.P["fitness"], population.documents["fitness"], possible, (choice,)
    )
    return min(held_out, key=lambda record: record.nll).k


def budget_table(
    populations: Sequence[Population], budgets: Sequence[float], ks: Sequence[int] = ()
) -> pd.DataFrame:
    """`budget_rows` of every population, and of its first 1, 2, ... trajectories if they have
    cycles; what two of them contain is there once.

    Raises:
        ValueError: a K that a population does not have, or no budget that any of them contains.
    """
    blocks = []
    for each in populations:
        sizes = ks if each.run.cycles > 1 else ()
        check_sizes(sizes, len(each))
        counts = range(1, each.run.trajectories + 1) if each.run.cycles > 1 else [None]
        for count in counts:
            part = each if count is None else each.prefix(count, each.run.cycles)
            blocks.append(budget_rows(part, budgets, sizes))
    if all(block.empty for block in blocks):
        held = ", ".join(f"{each.run.name} at {each.run.epochs:g} epochs" for each in populations)
        raise ValueError(f"no budget of {list(budgets)} is part of {held}")
    table = pd.concat(blocks, ignore_index=True)
    keys = ["method", "seed", "epochs", "trajectories", "choice", "k"]
    return table.drop_duplicates(keys, ignore_index=True)


def budget_rows(
    population: Population, budgets: Sequence[float], ks: Sequence[int] = ()
) -> pd.DataFrame:
    """The curve of one population: a block of `selections` for each budget it contains.

    An ensemble is read off at its first members, trajectories with cycles at their first cycles;
    budgets that the population does not contain are left out. Each budget has the uniform mixture
    of all members; the paper's prior (fitted by AdamW, as there), cut to every K of `ks`, to
    every power of two and to all members, of which the K chosen on fitness documents has best_k
    true; and the greedy choice at every K of `ks`.
    """
    run, frames = population.run, []
    for epochs in budgets:
        part = at_budget(population, epochs, run.trajectories)
        if part is None:
            continue
        sizes = [*ks, *(2**i for i in range(len(part).bit_length())), len(part)]
        best = chosen_k(part, sizes)
        fitted = prior.fit_prior(part.P["fitness"], "adamw")
        learned = selections(part, sizes, ["truncate"], fitted)
        learned["best_k"] = learned.k == best
        uniform = selections(part, [len(part)], ["uniform"], fitted).assign(best_k=False)
        greedy = selections(part, ks if len(part) > 1 else [], ["greedy"], fitted)
        greedy = greedy.assign(best_k=False)
        table = pd.concat([uniform, learned, greedy], ignore_index=True)
        table.insert(0, "trajectories", part.run.trajectories)
        table.insert(0, "epochs", epochs)
        frames.append(table)
    if not frames:
        return pd.DataFrame()
    table = pd.concat(frames, ignore_index=True)
    table.insert(0, "seed", run.seed)
    table.insert(0, "method", run.name)
    return table.assign(**origin(population))


def at_budget(population: Population, epochs: float, trajectories: int) -> Population | None:
    """What the population was after `epochs` in all; None if it never was.

    Its first `trajectories`, as far as they had come; an ensemble's first members.
    """
    run, tau = population.run, population.run.method.epochs_per_cycle
    if run.cycles == 1:
        trajectories = max(1, round(epochs / tau))
    cycles = max(1, round(epochs / (trajectories * tau)))
    fits = trajectories <= run.trajectories and cycles <= run.cycles
    if not fits or abs(trajectories * cycles * tau - epochs) > 1e-9:
        return None
    if run.method.tail and cycles < run.cycles:
        return None  # the snapshots of a tail do not stand where cycles would end
    return population.prefix(trajectories, cycles)


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

    Columns: epochs, flops (spent on it so far), member, mixture (nats per token).
    """
    rows = []
    for cycles in range(1, population.run.cycles + 1):
        part = population.prefix(1, cycles)
        weights = prior.fit_prior(part.P["fitness"]).weights
        last = part.members.iloc[-1]
        rows.append(
            {
                "epochs": last.epochs,
                "flops": last.flops,
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
            tables[name].append(block.assign(**origin(part)))
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
        notebook = WRITTEN_BY.get(path.stem, "the notebook")
        raise FileNotFoundError(
            f"{path} is not there; run {notebook} with recompute=True to train and write it"
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
