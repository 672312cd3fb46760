"""Everything that the notebook on the prior shows: the tables `prior_*.csv`."""

import time
from collections.abc import Sequence

import pandas as pd

from q0lib import config, ensemble, prior
from q0lib.model import forward_flops
from q0lib.population import Population, load
from q0lib.study.tables import mixtures

TABLES = (
    "prior_fits",
    "prior_weights",
    "prior_choices",
    "prior_cross_validation",
    "prior_fitness_size",
)


def by_fitness_size(
    population: Population, sizes: Sequence[int], k: int, split: str = "validation"
) -> pd.DataFrame:
    """What more fitness text buys: losses after choosing on its first `sizes` tokens.

    Columns: tokens, choice, loss (nats per token on `split`). Choices: "prior" (exact weights on
    all members) and, each of k members, "truncate" (the paper's fit, cut), "greedy", "lowest" and
    "uniform" (evenly spread, which needs no fitness text).

    Raises:
        ValueError: a k that the population does not have.
    """
    mixtures.check_sizes([k], len(population))
    P, total = population.P["fitness"], population.P["fitness"].shape[1]
    rows = []
    for size in [*(size for size in sizes if size < total), total]:
        part = P[:, :size]
        whole = size == total
        papers, exact = (
            population.fitted(fit) if whole else prior.fit_prior(part, fit)
            for fit in ("adamw", "exact")
        )
        weights = {"prior": exact.weights}
        for choice in mixtures.CHOICES:
            weights[choice] = prior.select(part, k, choice, papers).weights
        rows += [
            {"tokens": size, "choice": name, "loss": ensemble.mixture_nll(w, population.P[split])}
            for name, w in weights.items()
        ]
    return pd.DataFrame(rows)


def tables(
    runs: Sequence[config.Run], ks: Sequence[int], sizes: Sequence[int], k: int
) -> dict[str, pd.DataFrame]:
    """Everything that the notebook on the prior shows, for the populations of `runs`.

    prior_fits: the exact fit and the paper's (adamw), with loss, certificate and seconds.
    prior_weights: the exact weight of every member. prior_choices: `mixtures.selections` by every
    choice, with the paired distance of each K to the same choice's largest K, and what K costs at
    inference. prior_cross_validation: every choice and K on held-out fitness documents; `chosen`
    marks the smallest K within one standard error of the best. prior_fitness_size:
    `by_fitness_size`.

    Raises:
        ValueError: a K or k that a population does not have.
    """
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in TABLES}
    for run in runs:
        part = load(run)
        P, possible = part.P["fitness"], mixtures.check_sizes(ks, len(part))
        fitted = {name: _timed_fit(part, name) for name in ("exact", "adamw")}
        weights, papers = fitted["exact"][0].weights, fitted["adamw"][0]
        held_out = ensemble.cross_validate(
            P, part.documents["fitness"], possible, mixtures.ALL_CHOICES
        )
        chosen = ensemble.smallest_k_within_one_se(held_out)
        blocks = {
            "prior_fits": pd.DataFrame([
                {"fit": name, "nll": fit.nll, "gap": fit.gap, "steps": fit.steps, "seconds": took,
                 "test": ensemble.mixture_nll(fit.weights, part.P["test"])}
                for name, (fit, took) in fitted.items()
            ]),
            "prior_weights": part.members[["epochs", "fitness_loss"]].assign(weight=weights),
            "prior_choices": _with_costs(
                part, mixtures.selections(part, possible, mixtures.ALL_CHOICES, papers), papers
            ),
            "prior_cross_validation": pd.DataFrame(
                [{"choice": each.method, "k": each.k, "nll": each.nll, "se": each.se,
                  "behind": each.behind, "behind_se": each.behind_se, "chosen": each is chosen}
                 for each in held_out]
            ),
            "prior_fitness_size": by_fitness_size(part, sizes, k),
        }  # fmt: skip
        for name, block in blocks.items():
            block.insert(0, "seed", run.seed)
            tables[name].append(block.assign(**mixtures.origin(part)))
    return {name: pd.concat(blocks, ignore_index=True) for name, blocks in tables.items()}


def _timed_fit(population: Population, method: prior.Fit) -> tuple[prior.Prior, float]:
    started = time.perf_counter()
    return population.fitted(method), time.perf_counter() - started


def _with_costs(population: Population, table: pd.DataFrame, papers: prior.Prior) -> pd.DataFrame:
    """Add to `selections` the paired distance to each choice's largest K, and inference costs."""
    P, documents = population.P, population.documents["test"]
    rows = []
    for choice, block in table.groupby("choice", sort=False):
        path = prior.select_path(P["fitness"], block.k.tolist(), choice, papers)
        nll = {k: -ensemble.mixture_log_probs(each.weights, P["test"]) for k, each in path.items()}
        most = nll[max(nll)]
        rows += [ensemble.paired_difference(values, most, documents) for values in nll.values()]
    behind, errors = zip(*rows, strict=True)
    flops = table.k * forward_flops(population.run.model)
    return table.assign(
        behind_all=behind, behind_all_se=errors, forward_passes=table.k, flops_per_token=flops
    )
