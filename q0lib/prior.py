"""Weights over a population's members, with a certificate, and the choice of K of them.

Everything here reads P[M, T], the probability that member i gives to the true token t, and
minimises the loss of the mixture of probabilities, `-mean_t log sum_i w_i P[i, t]`, in nats per
token, over weights w >= 0 that sum to 1. That problem is convex. With q = w @ P no weights at all
can lower the loss by more than `max_i log mean_t(P[i, t] / q[t])`: the *gap*, which every fit here
reports. Source: "q0", learned prior (softmax weights by AdamW, the K largest renormalised); the
exact fit and the other ways to choose are this study's.

P may be float32 or float64, an array, a memory map, or anything else that reads P[members, tokens]
and has a shape and dtype (such as `rows.Rows`): it is read a block of tokens at a time.
A probability below `FLOOR` counts as `FLOOR`, so a token that no member covers costs 69.1 nats.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls

FLOOR = 1e-30
BLOCK = 2**18  # probabilities held at once as float64 (2 MiB)
TOKENS_PER_MEMBER = 100  # fewer than these and the fit warns
SHORTLIST = 4  # members that a greedy step, or a swap, tries in earnest
HELPS = 1e-6  # nats; a swap that gains less is not made
WORKING = 64  # members in the exact fit's first working set; a round can at most triple it
RIDGE = 1e-9  # relative; makes the curvature of near-identical members invertible

Fit = Literal["exact", "adamw"]
Choice = Literal["truncate", "refit", "greedy", "lowest", "uniform"]


@dataclass(frozen=True)
class Prior:
    """Fitted weights.

    `weights` [M] sum to 1; `nll` is the mixture's loss on the fitted tokens and `gap` bounds how
    far it lies above the best possible, both in nats per token; `steps` were taken by `method`.
    """

    weights: np.ndarray
    nll: float
    gap: float
    steps: int
    method: str


@dataclass(frozen=True)
class Selection:
    """K members in order of falling weight (ties: the lower index first), and `weights` [M].

    The weights are zero off the members, and may be zero on some: what the fit had no use for.
    """

    members: np.ndarray
    weights: np.ndarray
    k: int
    method: str


def fit_prior(
    P: np.ndarray, method: Fit = "exact", tolerance: float = 1e-6, seed: int = 0
) -> Prior:
    """Fit weights to P[M, T] by maximum likelihood.

    "exact" stops when the gap is at most `tolerance` nats; of identical members the first carries
    the weight of all. "adamw" is the paper's fit: softmax weights from 1e-4 N(0, 1) drawn with
    `seed`, 300 full-batch steps at lr 0.5, no weight decay, gradients clipped at norm 1. It works
    in the precision of P and needs all of P in memory.

    Raises:
        ValueError: P is not a matrix of probabilities (the member is named), unknown method.
    Warns:
        UserWarning: T < 100 M. Freely fitted weights lose about M / 2T nats on new text, so more
            than 0.005 there, which is what the choice of members is about.
        RuntimeWarning: the exact fit ended above its tolerance (the gap says where).
    """
    P = check_probabilities(P)
    _warn_if_scarce(P)
    if method not in get_args(Fit):
        raise ValueError(f"method must be one of {get_args(Fit)}, got {method!r}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be > 0 nats, got {tolerance}")
    return _fit_adamw(P, seed) if method == "adamw" else _fit_exact(P, tolerance)


def certificate(weights: np.ndarray, P: np.ndarray) -> float:
    """Nats per token that no weights on P[M, T] can gain over `weights` [M]: the gap.

    Raises:
        ValueError: P is not a matrix of probabilities, or the weights are not weights over M.
    """
    P = check_probabilities(P)
    return _gap(_moments(P, check_weights(weights, len(P)))[1])


def select(
    P: np.ndarray, k: int, method: Choice = "greedy", prior: Prior | None = None
) -> Selection:
    """Choose `k` members; see `select_path`."""
    return select_path(P, [k], method, prior)[k]


def select_path(
    P: np.ndarray, ks: Sequence[int], method: Choice = "greedy", prior: Prior | None = None
) -> dict[int, Selection]:
    """Choose K of the members of P[M, T], and their weights, for every K in `ks`.

    - "truncate" (the paper): the K largest weights of `prior`, renormalised.
    - "refit": the same members, weights fitted anew.
    - "greedy": members added one by one, each the one that helps most after a refit; these K and
      those of "refit" are then swapped, one member for another, while that lowers the loss, and
      the better set stays: on P it never loses to "refit". A K's answer is the same whatever the
      other ks.
    - "lowest": the K lowest losses, equal weights.
    - "uniform": K members evenly spread over 0..M-1, the last among them, equal weights.

    `prior` serves the first three and is by default the paper's, `fit_prior(P, "adamw")`. Ties go
    to the lower index everywhere.

    Raises:
        ValueError: bad P, a K outside 1..M, an unknown method, a prior over other members.
    """
    P = check_probabilities(P)
    M = len(P)
    if method not in get_args(Choice):
        raise ValueError(f"method must be one of {get_args(Choice)}, got {method!r}")
    for k in ks:
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= M:
            raise ValueError(f"k must be in 1..{M}, the number of members, got {k}")
    if method == "uniform":
        return {k: _equal(M, np.arange(1, k + 1) * M // k - 1, method) for k in ks}
    if method == "lowest":
        order = np.argsort(_member_losses(P), kind="stable")
        return {k: _equal(M, order[:k], method) for k in ks}
    prior = fit_prior(P, "adamw") if prior is None else prior
    weights = check_weights(prior.weights, M)
    order = np.argsort(-weights, kind="stable")
    if method == "truncate":
        return {k: _selection(M, order[:k], weights[order[:k]], method) for k in ks}
    found = _greedy(P, order, ks) if method == "greedy" else {k: _solve(P, order[:k]) for k in ks}
    return {k: _selection(M, found[k].members, found[k].weights, method) for k in ks}


def check_probabilities(P: np.ndarray, members: np.ndarray | None = None) -> np.ndarray:
    """Return P as something that reads like an array [M, T] of probabilities, or say in a
    ValueError which member (of `members`, or of all) is not."""
    if isinstance(P, np.ma.MaskedArray):
        raise ValueError("P must be without a mask: leave out the members or tokens that it hides")
    if isinstance(P, torch.Tensor) or not all(
        hasattr(P, name) for name in ("shape", "ndim", "dtype", "__getitem__")
    ):
        P = np.asarray(P)
    if P.ndim != 2 or 0 in P.shape:
        raise ValueError(f"P must be [members, tokens], at least one of each, got shape {P.shape}")
    if P.dtype not in (np.float32, np.float64):
        raise ValueError(f"P must be float32 or float64, got {P.dtype}")
    asked = np.arange(len(P)) if members is None else members
    low, high = np.full(len(asked), np.inf), np.full(len(asked), -np.inf)
    for tokens in blocks(P, len(asked)):
        block = P[slice(None) if members is None else members, tokens]
        low = np.minimum(low, block.min(axis=1))
        high = np.maximum(high, block.max(axis=1))
    bad = asked[~((low >= 0) & (high <= 1))]
    if len(bad):
        member = bad[0]
        row = np.asarray(P[member])
        token = np.flatnonzero(~((row >= 0) & (row <= 1)))[0]
        raise ValueError(
            f"P[{member}, {token}] is {row[token]}, allowed is 0..1"
            f" (members with such values: {', '.join(map(str, bad[:10]))}"
            f"{', ...' if len(bad) > 10 else ''})"
        )
    return P


def check_weights(weights: np.ndarray, M: int) -> np.ndarray:
    """Return `weights` as float64 [M], non-negative with sum 1, or say why not in a ValueError."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (M,):
        raise ValueError(f"weights must be one per member, [{M}], got shape {weights.shape}")
    bad = np.flatnonzero(~(weights >= 0))
    if len(bad):
        raise ValueError(f"weights[{bad[0]}] is {weights[bad[0]]}, allowed is >= 0")
    if not abs(weights.sum() - 1) <= 1e-6:
        raise ValueError(f"weights must sum to 1, got {weights.sum()}")
    return weights


def blocks(P: np.ndarray, members: int) -> Iterator[slice]:
    """Cut the tokens of P[M, T] into slices that hold about `BLOCK` probabilities of so many
    members each, or as many as P says is good to read at once."""
    width = max(256, getattr(P, "block", BLOCK) // members)
    return (slice(start, start + width) for start in range(0, P.shape[1], width))


def read_block(P: np.ndarray, tokens: slice, members: np.ndarray | slice) -> np.ndarray:
    """A copy of P[members, tokens], float64, nothing below `FLOOR`."""
    block = P[members, tokens].astype(np.float64)
    return np.maximum(block, FLOOR, out=block)


def _moments(
    P: np.ndarray,
    weights: np.ndarray,
    members: np.ndarray | slice = slice(None),
    curvature: bool = False,
) -> tuple[float, np.ndarray, np.ndarray]:
    """One pass over the members' rows, m of them, mixed by `weights` [m] into q [T].

    Returns the loss, the slopes mean_t P_i / q [m] (1 on the support at the optimum, nowhere
    above) and, if asked, the curvature mean_t P_i P_j / q^2 [m, m].
    """
    m, T = len(weights), P.shape[1]
    nll, slopes, hessian = 0.0, np.zeros(m), np.zeros((m, m))
    for tokens in blocks(P, m):
        block = read_block(P, tokens, members)
        q = weights @ block
        nll -= np.log(q).sum()
        if curvature:
            block /= q
            slopes += block.sum(axis=1)
            hessian += block @ block.T
        else:
            slopes += block @ (1 / q)
    return nll / T, slopes / T, hessian / T


def _gap(slopes: np.ndarray) -> float:
    return max(0.0, float(np.log(slopes.max())))


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


@dataclass(frozen=True)
class _Mixture:
    """Members [m] with their fitted weights [m], the loss they reach and the steps it took."""

    members: np.ndarray
    weights: np.ndarray
    nll: float
    steps: int = 0


def _solve(
    P: np.ndarray, members: np.ndarray, start: np.ndarray | None = None, tolerance: float = 1e-7
) -> _Mixture:
    """Fit weights to `members` [m], to a gap of `tolerance` among themselves.

    Newton's method on loss + sum(w), whose minimum over w >= 0 has sum 1 by itself: every step
    solves the quadratic model with its bounds as a least-squares problem with non-negative
    unknowns, then halves the step until the loss falls enough. Mixing in a little of the uniform
    weights and two steps of expectation maximisation bring each start inside its reach.
    """
    m = len(members)
    weights = np.full(m, 1 / m)
    if start is not None:
        weights = 0.99 * start + 0.01 * weights
    for _ in range(2):
        weights = _normalised(weights * _moments(P, weights, members)[1])
    nll, slopes, hessian = _moments(P, weights, members, curvature=True)
    steps = 0
    while _gap(slopes) > tolerance and steps < 200:
        ridge = RIDGE * (1 + hessian.diagonal())
        factor = cholesky(hessian + np.diag(ridge), check_finite=False)
        target = solve_triangular(factor, 2 * slopes - 1 + ridge * weights, trans="T")
        move = nnls(factor, target, maxiter=50 * m)[0] - weights
        fall = (slopes - 1) @ move
        for scale in 0.5 ** np.arange(40):
            trial = weights + scale * move
            moments = _moments(P, trial, members, curvature=True)
            total = trial.sum()
            if moments[0] + total - 1 <= nll - 1e-4 * scale * fall:
                break
        else:
            break  # at the end of what float64 can resolve
        weights = trial / total
        nll, slopes, hessian = moments[0] + np.log(total), moments[1] * total, moments[2] * total**2
        steps += 1
    return _Mixture(members, weights, nll, steps)


def _fit_exact(P: np.ndarray, tolerance: float) -> Prior:
    """Solve over a working set of members; let in those whose slope exceeds 1 until none does.

    A few steps of expectation maximisation over everyone choose the first working set. A round
    reads all of P once and otherwise only the working set's rows.
    """
    originals = _originals(P)
    weights, slopes = np.zeros(len(P)), np.ones(len(P))
    weights[originals] = 1
    for _ in range(5):
        weights = _normalised(weights * slopes)
        slopes = _moments(P, weights)[1]
    working = originals[np.argsort(-weights[originals], kind="stable")[:WORKING]]
    steps, gap = 0, _gap(slopes)
    for _ in range(100):
        # Until the working set is right its weights need not be: a tenth of the gap will do.
        found = _solve(P, working, _normalised(weights[working]), max(gap / 10, tolerance / 4))
        steps += found.steps
        weights = _spread(len(P), working, found.weights)
        nll, slopes, _ = _moments(P, weights)
        outside = np.setdiff1d(originals, working)
        entering = outside[np.argsort(-slopes[outside], kind="stable")[: 2 * len(working)]]
        entering = entering[slopes[entering] > 1]
        exact = gap <= 2.5 * tolerance  # the working set was solved to its end
        gap = _gap(slopes)
        if gap <= tolerance or (exact and not len(entering)):
            break
        working = np.union1d(np.flatnonzero(weights), entering)
    if gap > tolerance:
        message = f"the exact fit ended with a gap of {gap:.1e} nats, above {tolerance:.1e}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return Prior(weights, nll, gap, steps, "exact")


def _originals(P: np.ndarray) -> np.ndarray:
    """The members that are not copies of an earlier one."""
    heads: dict[bytes, list[int]] = {}
    for i, head in enumerate(np.asarray(P[:, :1024])):
        alike = heads.setdefault(head.tobytes(), [])
        if not any(np.array_equal(P[i], P[j]) for j in alike):
            alike.append(i)
    return np.sort(np.concatenate([np.array(alike) for alike in heads.values()]))


def _fit_adamw(P: np.ndarray, seed: int) -> Prior:
    """The paper's fit, in NumPy: of M-vectors and two products with P a step, PyTorch's own
    overhead would be nine tenths. `tests/test_prior.py` holds it to torch.optim.AdamW."""
    rows = np.ascontiguousarray(P)
    M, T = rows.shape
    start = torch.randn(M, generator=torch.Generator().manual_seed(seed))  # the reference's draw
    logits = 1e-4 * start.numpy().astype(np.float64)
    mean, square = np.zeros(M), np.zeros(M)
    fast, slow, rate, epsilon = 0.9, 0.999, 0.5, 1e-8  # AdamW's betas, lr and eps; no decay
    for step in range(1, 301):
        weights = _softmax(logits)
        mixture = weights.astype(rows.dtype) @ rows
        # The clamp's gradient is 0 below the floor, as torch's is.
        slopes = -(rows @ np.where(mixture >= FLOOR, 1 / np.maximum(mixture, FLOOR), 0)) / T
        gradient = weights * (slopes - weights @ slopes)
        gradient *= min(1.0, 1.0 / (np.linalg.norm(gradient) + 1e-6))
        mean = fast * mean + (1 - fast) * gradient
        square = slow * square + (1 - slow) * gradient**2
        scale = np.sqrt(square / (1 - slow**step)) + epsilon
        logits -= rate / (1 - fast**step) * mean / scale
    weights = _softmax(logits)
    nll, slopes, _ = _moments(P, weights)
    return Prior(weights, nll, _gap(slopes), 300, "adamw")


def _softmax(logits: np.ndarray) -> np.ndarray:
    return _normalised(np.exp(logits - logits.max()))


def _greedy(P: np.ndarray, order: np.ndarray, ks: Sequence[int]) -> dict[int, _Mixture]:
    """Best of two starts for each K: forward selection, and the first K of `order` [M]."""
    losses = _member_losses(P)
    first = int(np.argmin(losses))
    forward = _Mixture(np.array([first]), np.ones(1), losses[first])
    found = {}
    for k in range(1, max(ks, default=0) + 1):
        if k > 1:
            forward = _with_one_more(P, forward)
        if k in ks:
            starts = (forward, _solve(P, order[:k]))
            found[k] = min((_swapped(P, start) for start in starts), key=lambda end: end.nll)
    return found


def _with_one_more(P: np.ndarray, chosen: _Mixture, barred: int = -1) -> _Mixture:
    """Add the member that helps most: a second-order estimate lists a few, refits decide.

    The estimate is exact for the quadratic model in which the members' own weights adjust to the
    newcomer: (slope - 1)^2 / 2 over its curvature, less what they already explain of it.
    """
    M, T = P.shape
    own = chosen.members
    slopes, squares, crosses = np.zeros(M), np.zeros(M), np.zeros((M, len(own)))
    for tokens in blocks(P, M):
        ratios = read_block(P, tokens, slice(None))
        ratios /= chosen.weights @ ratios[own]
        slopes += ratios.sum(axis=1) / T
        squares += np.einsum("it,it->i", ratios, ratios) / T
        crosses += ratios @ ratios[own].T / T
    inner = crosses[own] + np.diag(RIDGE * (1 + squares[own]))
    explained = np.einsum("ik,ki->i", crosses, np.linalg.solve(inner, crosses.T))
    left = np.maximum(squares - explained, 0) + RIDGE * (1 + squares)
    gains = np.maximum(slopes - 1, 0) ** 2 / left
    order = np.argsort(-gains, kind="stable")
    order = order[~np.isin(order, [*own, barred])]
    if _gap(slopes) <= HELPS:  # the mixture is already the best of all, whoever joins
        return _Mixture(np.append(own, order[0]), np.append(chosen.weights, 0.0), chosen.nll)
    trials = []
    for newcomer in order[:SHORTLIST]:
        trials.append(_solve(P, np.append(own, newcomer), np.append(chosen.weights, 0.0)))
    return min(trials, key=lambda trial: trial.nll)


def _swapped(P: np.ndarray, chosen: _Mixture) -> _Mixture:
    """Exchange one of the members that are missed least for a better one, while one is found."""
    k = len(chosen.members)
    while 1 < k < len(P):
        _, _, curvature = _moments(P, chosen.weights, chosen.members, curvature=True)
        inverse = np.linalg.inv(curvature + np.diag(RIDGE * (1 + curvature.diagonal())))
        missed = chosen.weights**2 / inverse.diagonal()
        for leaver in np.argsort(missed, kind="stable")[:SHORTLIST]:
            rest = _solve(P, np.delete(chosen.members, leaver))
            trial = _with_one_more(P, rest, chosen.members[leaver])
            if trial.nll < chosen.nll - HELPS:
                chosen = trial
                break
        else:
            break
    return chosen


def _member_losses(P: np.ndarray) -> np.ndarray:
    """Loss of each member alone, [M], nats per token."""
    losses = np.zeros(len(P))
    for tokens in blocks(P, len(P)):
        losses -= np.log(read_block(P, tokens, slice(None))).sum(axis=1)
    return losses / P.shape[1]


def _spread(M: int, members: np.ndarray, weights: np.ndarray) -> np.ndarray:
    everyone = np.zeros(M)
    everyone[members] = weights
    return everyone


def _selection(M: int, members: np.ndarray, weights: np.ndarray, method: str) -> Selection:
    falling = members[np.lexsort((members, -weights))]
    return Selection(falling, _spread(M, members, _normalised(weights)), len(members), method)


def _equal(M: int, members: np.ndarray, method: str) -> Selection:
    return _selection(M, members, np.ones(len(members)), method)


def _warn_if_scarce(P: np.ndarray) -> None:
    M, T = P.shape
    if T < TOKENS_PER_MEMBER * M:
        warnings.warn(
            f"{T} tokens are few for the weights of {M} members: below {TOKENS_PER_MEMBER} tokens"
            " a member, weights fitted freely may not carry over to new text",
            stacklevel=3,
        )
