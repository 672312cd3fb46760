"""What a mixture loses, with its error, and how many members to keep.

A mixture here is of *probabilities*, q[t] = sum_i w_i P[i, t], as in "q0" (learned prior), never
of logits. Losses are nats per token. Errors are by document: tokens of one document are not
independent, documents are taken to be. P[M, T] and its floor are those of `q0lib.prior`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from q0lib.prior import (
    Choice,
    blocks,
    check_probabilities,
    check_weights,
    fit_prior,
    read_block,
    select_path,
)


def mixture_log_probs(weights: np.ndarray, P: np.ndarray) -> np.ndarray:
    """log q [T] in nats, float64, of the mixture of P[M, T] by `weights` [M].

    Only the rows with a weight are read, a block of tokens at a time. Finite everywhere: see
    `q0lib.prior.FLOOR`.

    Raises:
        ValueError: P is not a matrix of probabilities, or the weights are not weights over M.
    """
    weights = check_weights(weights, len(P))
    members = np.flatnonzero(weights)
    P = check_probabilities(P, members)
    log_probs = np.empty(P.shape[1])
    for tokens in blocks(P, len(members)):
        log_probs[tokens] = np.log(weights[members] @ read_block(P, tokens, members))
    return log_probs


def mixture_nll(weights: np.ndarray, P: np.ndarray) -> float:
    """Loss of the mixture of P[M, T] by `weights` [M], nats per token; see `mixture_log_probs`."""
    return -float(mixture_log_probs(weights, P).mean())


def standard_error(per_token_nll: np.ndarray, documents: np.ndarray) -> float:
    """Standard error of the mean of `per_token_nll` [T], tokens clustered in `documents` [T].

    The linearised variance of a ratio of totals: D / (D - 1) times the sum over the D documents
    of (their loss - their tokens * mean)^2, over T^2.

    Raises:
        ValueError: shapes differ, or fewer than two documents.
    """
    values = np.asarray(per_token_nll, dtype=np.float64)
    D, index = _documents(documents, len(values), at_least=2)
    excess = np.bincount(index, weights=values - values.mean())
    return float(np.sqrt(D / (D - 1) * (excess**2).sum()) / len(values))


def paired_difference(
    nll_a: np.ndarray, nll_b: np.ndarray, documents: np.ndarray
) -> tuple[float, float]:
    """Mean of a - b over the same tokens [T], and its standard error by `documents` [T].

    Raises:
        ValueError: shapes differ, or fewer than two documents.
    """
    a, b = np.asarray(nll_a, dtype=np.float64), np.asarray(nll_b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired losses must be of the same tokens, got {a.shape} and {b.shape}")
    return float((a - b).mean()), standard_error(a - b, documents)


@dataclass(frozen=True)
class HeldOut:
    """A method with `k` members on text that it was not fitted to, in nats per token.

    `nll` and its error `se`; `behind` is how far that lies above the best of those compared, and
    `behind_se` the error of this difference, paired by token and clustered by document.
    """

    method: str
    k: int
    nll: float
    se: float
    behind: float
    behind_se: float


def cross_validate(
    P: np.ndarray,
    documents: np.ndarray,
    ks: Sequence[int],
    methods: Sequence[Choice] = ("truncate", "refit", "greedy", "lowest", "uniform"),
    folds: int = 5,
    seed: int = 0,
) -> list[HeldOut]:
    """Expected loss of every method and K on new documents, without touching any other split.

    The documents are dealt to `folds` by a permutation drawn with `seed`. Members and weights are
    chosen on the other folds, and lose on this one; every token is held out once. `documents` [T]
    says which document a token of P[M, T] is of. A copy of P without a fold is made at a time.
    One record per method and K, in the order asked for.

    Raises:
        ValueError: bad P, K, or method; folds < 2; fewer documents than folds.
    """
    P = check_probabilities(P)
    if folds < 2:
        raise ValueError(f"folds must be >= 2, got {folds}")
    D, index = _documents(documents, P.shape[1], at_least=folds)
    fold = (np.random.default_rng(seed).permutation(D) % folds)[index]
    losses = {(method, k): np.empty(P.shape[1]) for method in methods for k in ks}
    for out in range(folds):
        held, fitted = np.flatnonzero(fold == out), P[:, fold != out]
        prior = fit_prior(fitted, "adamw")
        for method in methods:
            for k, selection in select_path(fitted, ks, method, prior).items():
                losses[method, k][held] = -mixture_log_probs(selection.weights, P[:, held])
    best = min(losses.values(), key=np.mean)
    return [
        HeldOut(
            method,
            k,
            float(nll.mean()),
            standard_error(nll, documents),
            *paired_difference(nll, best, documents),
        )
        for (method, k), nll in losses.items()
    ]


def smallest_k_within_one_se(records: Sequence[HeldOut]) -> HeldOut:
    """The record with the fewest members that lies at most one paired error behind the best.

    Of several with that K, the lowest loss. To ask about one method, cross-validate it alone:
    `behind` is measured from the best of all that were compared.

    Raises:
        ValueError: no record reaches that, as when the best was left out.
    """
    near = [record for record in records if record.behind <= record.behind_se]
    if not near:
        raise ValueError("no record lies within one standard error of the best; was it left out?")
    return min(near, key=lambda record: (record.k, record.nll))


def _documents(documents: np.ndarray, T: int, at_least: int) -> tuple[int, np.ndarray]:
    """How many documents there are, and for every token the rank of its document [T]."""
    documents = np.asarray(documents)
    if documents.shape != (T,):
        raise ValueError(f"documents must be one id per token, [{T}], got {documents.shape}")
    ids, index = np.unique(documents, return_inverse=True)
    if len(ids) < at_least:
        raise ValueError(f"at least {at_least} documents are needed, got {len(ids)}")
    return len(ids), index
