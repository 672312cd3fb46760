"""What the mixtures of a population lose: by choice and K, at a budget, along a trajectory."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from q0lib import corpus, ensemble, population, prior
from q0lib.population import Population

ALL_CHOICES: tuple[prior.Choice, ...] = ("truncate", "refit", "greedy", "lowest", "uniform")
CHOICES: tuple[prior.Choice, ...] = ("truncate", "greedy", "lowest", "uniform")


def selections(
    population: Population,
    ks: Sequence[int],
    choices: Sequence[prior.Choice],
    papers: prior.Prior,
) -> pd.DataFrame:
    """Losses of the population's mixtures, by choice and K.

    Members and weights are chosen on the fitness split; a choice that starts from fitted weights
    starts from `papers`, the paper's fit (AdamW) there. K that the population does not have are
    left out. `test_se` is the standard error of the test loss over documents.

    Columns: choice, k, fitness, validation, test (nats per token), test_se, flops (training).

    Raises:
        ValueError: a K that is no whole number >= 1.
    """
    possible = sizes_within(ks, len(population))
    rows = []
    for choice in choices:
        path = prior.select_path(population.P["fitness"], possible, choice, papers)
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
    for split in corpus.HELD_OUT:
        nll = -ensemble.mixture_log_probs(weights, population.P[split])
        row[split] = float(nll.mean())
    row["test_se"] = ensemble.standard_error(nll, population.documents["test"])
    row["flops"] = population.flops
    return row


def check_sizes(ks: Sequence[int], members: int) -> list[int]:
    """The sizes K, in order; ValueError for one that is no whole number in 1..members."""
    for k in ks:
        whole = isinstance(k, int | np.integer) and not isinstance(k, bool)
        if not (whole and 1 <= k <= members):
            raise ValueError(f"population sizes K must be in 1..{members}, got {k}")
    return sorted(set(ks))


def sizes_within(ks: Sequence[int], members: int) -> list[int]:
    """Those of the sizes K that `members` have, in order; ValueError for what is no size."""
    return [k for k in check_sizes(ks, max([members, *ks])) if k <= members]


def chosen_k(population: Population, ks: Sequence[int], choice: prior.Choice = "truncate") -> int:
    """The K of `ks` with the lowest cross-validated loss over fitness documents, by default of the
    paper's cut.

    On the text that fitted the weights more members always look better; held-out documents of the
    same split tell otherwise, and leave validation and test alone. What a member costs at
    inference does not count here; `learned_prior.tables` marks the smallest K that is as good.
    """
    possible = sizes_within(ks, len(population))
    if len(possible) == 1:
        return possible[0]
    held_out = ensemble.cross_validate(
        population.P["fitness"], population.documents["fitness"], possible, (choice,)
    )
    return min(held_out, key=lambda record: record.nll).k


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


def snapshot_curve(population: Population, split: str = "test") -> pd.DataFrame:
    """The loss of each snapshot of one trajectory, and of the learned mixture (exact weights) of
    all up to it.

    Columns: epochs, flops (spent on it so far), member, mixture (nats per token).
    """
    rows = []
    for cycles in range(1, population.run.cycles + 1):
        part = population.prefix(1, cycles)
        weights = part.fitted().weights
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


def worth(part: population.Population) -> dict:
    """What a population is worth on test: its learned mixture (exact weights), the uniform one,
    the paper's cut to 8 (k8), its snapshots' mean, the last of them, and what it cost; the first
    two on validation too. `nll` holds the learned mixture's loss of every token."""
    P, M = part.P, len(part)
    weights = {"learned": part.fitted().weights, "uniform": np.full(M, 1 / M)}
    nll = -ensemble.mixture_log_probs(weights["learned"], P["test"])
    row = {"members": M, "flops": part.flops, "snapshot": float(part.members.test_loss.mean()),
           "last": float(part.members.test_loss.iloc[-1]), "nll": nll}  # fmt: skip
    for name, each in weights.items():
        row[name] = ensemble.mixture_nll(each, P["test"])
        row[f"{name}_validation"] = ensemble.mixture_nll(each, P["validation"])
    if M >= 8:
        chosen = prior.select(P["fitness"], 8, "truncate", part.fitted("adamw"))
        row["k8"] = ensemble.mixture_nll(chosen.weights, P["test"])
    return row
