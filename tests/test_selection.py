"""Choices that one way of searching cannot find: the greedy choice must look in all its ways."""

import itertools

import numpy as np
import pytest

from q0lib.prior import Prior, fit_prior, select

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens are few")


def given(*order: int) -> Prior:
    """A prior whose weights fall in this order of members."""
    weights = np.zeros(len(order))
    weights[list(order)] = np.arange(len(order), 0, -1)
    return Prior(weights / weights.sum(), 0.0, 0.0, 0, "given")


def loss(P: np.ndarray, members) -> float:
    return fit_prior(P[list(members)]).nll


def best_pair(P: np.ndarray) -> set[int]:
    return set(min(itertools.combinations(range(len(P)), 2), key=lambda pair: loss(P, pair)))


def halves(good: float) -> np.ndarray:
    """Two members that are fair on even and on odd tokens, two `good` on one half of the text."""
    token = np.arange(200)
    even, first = token % 2 == 0, token < 100
    rows = [np.where(even, 0.5, 0.2), np.where(even, 0.2, 0.5), np.where(first, good, 1e-6),
            np.where(first, 1e-6, good)]  # fmt: skip
    return np.array(rows)


def test_greedy_swaps_out_a_member_that_was_best_alone():
    """The best member alone is of no use beside the two that are best together."""
    token = np.arange(300)
    P = np.array([np.full(300, 0.4), np.where(token < 150, 0.9, 0.1),
                  np.where(token < 150, 0.1, 0.9)])  # fmt: skip
    assert best_pair(P) == {1, 2}
    assert loss(P, [0]) < min(loss(P, [1]), loss(P, [2]))
    assert set(select(P, 2, "greedy", given(0, 1, 2)).members) == {1, 2}


@pytest.mark.parametrize(
    ("good", "pair", "order"),
    [(0.9, {2, 3}, (2, 3, 0, 1)), (0.66, {0, 1}, (2, 3, 0, 1))],
    ids=["the largest weights", "one added after the other"],
)
def test_greedy_looks_from_both_ends(good, pair, order):
    """Either pair is better than any swap of one of its members, so where it begins decides."""
    P = halves(good)
    assert best_pair(P) == pair
    other = {0, 1, 2, 3} - pair
    swaps = [{a, b} for a in other for b in pair]
    assert loss(P, other) < min(loss(P, swap) for swap in swaps) - 1e-4
    greedy, refit = (select(P, 2, method, given(*order)) for method in ("greedy", "refit"))
    assert set(greedy.members) == pair
    assert loss(P, greedy.members) <= loss(P, refit.members) + 1e-9
