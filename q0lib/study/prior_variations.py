"""Ideas for a better prior, tried on real populations: what each is worth on validation text.

    python -m q0lib.study.prior_variations                      # preset quick, seeds 0 1 2
    python -m q0lib.study.prior_variations --preset cpu --seeds 0

Trains populations with their weights kept (data/runs/variations), fits every idea on fitness
text, picks its one parameter by folds over fitness documents, and writes
data/results/<preset>/prior_variations.csv. Nothing here reads test. What was kept is in `prior`;
this is the evidence for the rest.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from q0lib import command, corpus, ensemble, paths, population, presets, prior, train
from q0lib.study.tables import store

TEMPERATURES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
CONCENTRATIONS = (1.0, 1.5, 2.0, 4.0, 16.0, 64.0, 256.0)  # of a symmetric Dirichlet; 1 = none
ROUGHNESS = (0.0, 0.1, 1.0, 10.0, 100.0)  # price of unequal neighbours on a trajectory

Fit = Callable[[np.ndarray, float], np.ndarray]  # (P[M, T], parameter) -> weights [M]


def log_distributions(members: population.Population, text: corpus.Text, split: str) -> Tensor:
    """log p of every token of the vocabulary, fp32 [M, T, V], at each scored position."""
    rows = corpus.held_out_rows(text[split].tokens, context := members.run.model.context)
    tokens = torch.from_numpy(corpus.held_out(text[split], context, 0, rows))
    made = torch.empty(len(members), rows * context, members.run.model.vocab_size)
    for member in range(len(members)):
        with torch.no_grad():
            logits = members.model(member).logits(tokens[:, :-1])
        made[member] = logits.flatten(0, 1).log_softmax(-1)
    return made


def tempered(log_p: Tensor, targets: Tensor, temperature: float) -> np.ndarray:
    """Probabilities [M, T] of the targets when each distribution is taken at a temperature."""
    rows = []
    for member in log_p:  # one at a time: [T, V] is large enough
        scaled = member / temperature
        rows.append(scaled.gather(1, targets[:, None])[:, 0] - scaled.logsumexp(-1))
    return torch.stack(rows).exp().numpy()


def geometric_weights(log_p: Tensor, targets: Tensor) -> Tensor:
    """Weights [M] of the log-linear pool q ~ prod p_i^w_i that fit the targets best."""
    weights = torch.full((len(log_p),), 1 / len(log_p), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -geometric_log_p(log_p, targets, weights).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def geometric_log_p(log_p: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """log q [T] of the targets under the normalised log-linear pool."""
    pooled = torch.tensordot(weights, log_p, dims=1)
    return pooled.gather(1, targets[:, None])[:, 0] - pooled.logsumexp(-1)


def dirichlet_weights(P: np.ndarray, concentration: float) -> np.ndarray:
    """Most probable weights under a symmetric Dirichlet, by expectation maximisation."""
    weights = np.full(len(P), 1 / len(P))
    for _ in range(500):
        counts = weights * (P / (weights @ P)).sum(1) + concentration - 1
        weights = counts / counts.sum()
    return weights


def smooth_weights(P: np.ndarray, roughness: float) -> np.ndarray:
    """Weights that pay roughness * M * sum of squared differences of neighbouring members."""
    rows = torch.from_numpy(P)
    logits = torch.zeros(len(P), dtype=rows.dtype, requires_grad=True)
    optimizer = torch.optim.AdamW([logits], lr=0.1, weight_decay=0.0)
    for _ in range(400):
        optimizer.zero_grad()
        weights = logits.softmax(0)
        rough = roughness * len(P) * weights.diff().square().sum()
        (rough - (weights @ rows).log().mean()).backward()
        optimizer.step()
    return logits.detach().double().softmax(0).numpy()


def by_folds(
    P: np.ndarray, documents: np.ndarray, fit: Fit, grid: Sequence[float], folds: int = 5
) -> float:
    """The parameter of `grid` with the lowest loss on held-out fitness documents."""
    ids, index = np.unique(documents, return_inverse=True)
    folds = min(folds, len(ids))
    fold = (np.random.default_rng(0).permutation(len(ids)) % folds)[index]

    def loss(parameter: float) -> float:
        parts = []
        for out in range(folds):
            weights = fit(P[:, fold != out], parameter)
            parts.append(ensemble.mixture_log_probs(weights, P[:, fold == out]))
        return -float(np.concatenate(parts).mean())

    return min(grid, key=loss)


def compare(members: population.Population, text: corpus.Text) -> pd.DataFrame:
    """Every idea against the plain prior, on one population.

    Columns: variation, parameter (chosen on fitness folds), validation (nats per token), gain
    over the plain prior and its standard error over documents.
    """
    splits = ("fitness", "validation")
    log_p = {split: log_distributions(members, text, split) for split in splits}
    targets = {}
    for split in splits:
        count = log_p[split].shape[1]
        targets[split] = torch.from_numpy(text[split].tokens[1 : count + 1].astype(np.int64))
    rows = {
        temperature: {
            split: tempered(log_p[split], targets[split], temperature) for split in splits
        }
        for temperature in TEMPERATURES
    }
    P, V = rows[1.0]["fitness"], rows[1.0]["validation"]
    found: dict[str, tuple[float, np.ndarray]] = {}

    plain = prior.fit_prior(P).weights
    found["prior"] = np.nan, ensemble.mixture_log_probs(plain, V)

    losses = np.stack([-np.log(rows[t]["fitness"]).mean(1) for t in TEMPERATURES])
    own = losses.argmin(0)
    cooled = {
        split: np.stack([rows[TEMPERATURES[t]][split][m] for m, t in enumerate(own)])
        for split in splits
    }
    weights = prior.fit_prior(cooled["fitness"]).weights
    average = float(np.mean([TEMPERATURES[t] for t in own]))
    found["a temperature per snapshot"] = (
        average, ensemble.mixture_log_probs(weights, cooled["validation"])
    )  # fmt: skip

    every = {split: np.concatenate([rows[t][split] for t in TEMPERATURES]) for split in splits}
    weights = prior.fit_prior(every["fitness"]).weights
    spread = float(weights @ np.repeat(TEMPERATURES, len(P)))
    found["every snapshot at every temperature"] = (
        spread, ensemble.mixture_log_probs(weights, every["validation"])
    )  # fmt: skip

    pool = geometric_weights(log_p["fitness"], targets["fitness"])
    geometric = geometric_log_p(log_p["validation"], targets["validation"], pool)
    found["log-linear pool"] = float(pool.sum()), geometric.double().numpy()

    documents = members.documents["fitness"]
    ideas: dict[str, tuple[Fit, Sequence[float]]] = {
        "Dirichlet toward uniform": (dirichlet_weights, CONCENTRATIONS),
        "smooth along the trajectory": (smooth_weights, ROUGHNESS),
    }
    for name, (fit, grid) in ideas.items():
        best = by_folds(P, documents, fit, grid)
        found[name] = best, ensemble.mixture_log_probs(fit(P, best), V)

    table = []
    for name, (parameter, log_q) in found.items():
        gain, error = ensemble.paired_difference(
            log_q, found["prior"][1], members.documents["validation"]
        )
        table.append((name, parameter, -log_q.mean(), gain, error))
    return pd.DataFrame(table, columns=["variation", "parameter", "validation", "gain", "gain_se"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib.study.prior_variations", __doc__)
    parser.add_argument("--preset", default="quick", help="default: quick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    given = parser.parse_args(argv)
    return command.status(parser.prog, lambda: _report(given.preset, given.seeds))


def _report(preset: str, seeds: Sequence[int]) -> None:
    """Train, compare, write the table, and print its means."""
    tables = []
    for seed in tqdm(seeds, desc="populations"):
        study = presets.load(preset, seed=seed, overrides=["runtime.keep_weights=true"])
        text = corpus.load(study.corpus)
        for method in ("q0", "ensemble"):
            run = study.run(method)
            directory = paths.RUNS / "variations" / run.directory.name
            members = train.train_population(run, text, directory=directory)
            table = compare(members, text)
            table.insert(0, "seed", seed)
            table.insert(0, "method", method)
            table["commit"] = members.members["commit"].iloc[-1]
            tables.append(table)
    whole = pd.concat(tables, ignore_index=True)
    path = paths.RESULTS / preset / "prior_variations.csv"
    store.write(whole, path)
    shown = whole.groupby(["method", "variation"], sort=False)[["validation", "gain", "gain_se"]]
    print(shown.mean().round(4).to_string())
    print(f"mean over seeds {seeds}; written to {path}")


if __name__ == "__main__":
    sys.exit(main())
