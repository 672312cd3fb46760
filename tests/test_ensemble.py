"""Losses of mixtures are checked by hand, errors against simulation, choices end to end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, softmax

from q0lib.ensemble import (
    HeldOut,
    cross_validate,
    mixture_log_probs,
    mixture_nll,
    paired_difference,
    smallest_k_within_one_se,
    standard_error,
)
from q0lib.prior import FLOOR

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens are few")


def test_probabilities_are_mixed_not_logits():
    logits = np.array([[10.0, 0.0], [0.0, 1.0]])
    P = softmax(logits, axis=1)[:, 1:]
    assert mixture_nll(np.array([0.5, 0.5]), P) == pytest.approx(1.01, abs=0.005)
    assert -log_softmax(logits.mean(axis=0))[1] == pytest.approx(4.51, abs=0.005)


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 20)).flatmap(
        lambda shape: arrays(np.float64, shape, elements=st.floats(0, 1))
    ),
    st.integers(0, 10**6),
)
def test_a_mixture_is_never_above_the_mean_of_its_members(P, seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(P)))
    members = -np.log(np.maximum(P, FLOOR)).mean(axis=1)
    assert mixture_nll(weights, P) <= weights @ members + 1e-9
    assert np.isfinite(mixture_log_probs(weights, P)).all()


def test_long_rows_are_mixed_like_short_ones():
    rng = np.random.default_rng(0)
    P, weights = rng.random((3, 200_000)).astype(np.float32), np.array([0.2, 0.0, 0.8])
    expected = np.log(weights @ P.astype(np.float64))
    assert mixture_log_probs(weights, P) == pytest.approx(expected, abs=1e-14)
    assert mixture_nll(weights, P) == pytest.approx(-expected.mean())


def test_zeros_are_finite_where_covered_and_floored_elsewhere():
    P = np.array([[0.0, 0.0], [0.5, 0.0]])
    even = np.array([0.5, 0.5])
    assert mixture_log_probs(even, P) == pytest.approx([np.log(0.25), np.log(FLOOR)])
    assert mixture_log_probs(np.array([1.0, 0.0]), P) == pytest.approx([np.log(FLOOR)] * 2)


def test_bad_input_is_named():
    P = np.full((3, 4), 0.5)
    with pytest.raises(ValueError, match=r"\[3\], got shape \(2,\)"):
        mixture_nll(np.array([0.5, 0.5]), P)
    P[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"P\[1, 2\] is nan"):
        mixture_nll(np.full(3, 1 / 3), P)


def test_one_token_a_document_gives_the_textbook_error():
    values = np.random.default_rng(0).normal(size=500)
    expected = values.std(ddof=1) / np.sqrt(500)
    assert standard_error(values, np.arange(500)) == pytest.approx(expected)


def test_the_error_counts_documents_not_tokens():
    values, documents = np.array([1.0, 2.0, 4.0]), np.array([7, 3, 5])
    once = standard_error(values, documents)
    assert standard_error(np.repeat(values, 9), np.repeat(documents, 9)) == pytest.approx(once)


def test_the_error_is_the_spread_over_samples_of_documents():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        lengths = rng.integers(1, 30, 80)
        documents = np.repeat(np.arange(80), lengths)
        values = rng.normal(3, 1, 80)[documents] + rng.normal(0, 1, len(documents))
        means.append(values.mean())
        errors.append(standard_error(values, documents))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)


def test_pairing_removes_what_two_methods_share():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(50), 20)
    a = rng.normal(3, 1, 50)[documents]
    difference, error = paired_difference(a + 0.01, a, documents)
    assert (difference, error) == pytest.approx((0.01, 0), abs=1e-12)
    assert standard_error(a, documents) > 0.1


def test_errors_refuse_what_they_cannot_use():
    with pytest.raises(ValueError, match="at least 2 documents are needed, got 1"):
        standard_error(np.ones(3), np.zeros(3))
    with pytest.raises(ValueError, match=r"\[3\], got \(2,\)"):
        standard_error(np.ones(3), np.zeros(2))
    with pytest.raises(ValueError, match=r"same tokens, got \(3,\) and \(1,\)"):
        paired_difference(np.ones(3), np.ones(1), np.arange(3))


@pytest.fixture
def halves():
    """Two members, each right on one half of every document, and four that know nothing."""
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(40), 50)
    P = rng.uniform(0.01, 0.1, (6, 2_000))
    even = np.arange(2_000) % 2 == 0
    P[2, even], P[4, ~even] = rng.uniform(0.6, 0.9, (2, 1_000))
    return P, documents


def test_cross_validation_finds_the_two_members_that_are_needed(halves):
    P, documents = halves
    records = cross_validate(P, documents, [1, 2, 4], ["truncate", "greedy", "uniform"])
    assert [(r.method, r.k) for r in records[:4]] == [
        ("truncate", 1), ("truncate", 2), ("truncate", 4), ("greedy", 1),
    ]  # fmt: skip
    chosen = smallest_k_within_one_se(records)
    assert chosen.k == 2
    assert chosen.method in ("truncate", "greedy")
    expected = -np.log((P[2] + P[4]) / 2).mean()
    assert chosen.nll == pytest.approx(expected, abs=1e-3)
    assert min(r.behind for r in records) == 0
    uniform = next(r for r in records if (r.method, r.k) == ("uniform", 2))
    assert uniform.nll == pytest.approx(mixture_nll(np.array([0, 0, 0.5, 0, 0, 0.5]), P))
    assert uniform.behind > uniform.behind_se > 0


def test_cross_validation_repeats_and_never_splits_a_document(halves):
    P, documents = halves
    first, again = (cross_validate(P, documents, [2], ["refit"], seed=1) for _ in range(2))
    assert first == again
    with pytest.raises(ValueError, match="at least 5 documents are needed, got 4"):
        cross_validate(P[:, :200], documents[:200], [1])
    with pytest.raises(ValueError, match="folds must be >= 2, got 1"):
        cross_validate(P, documents, [1], folds=1)
    whole = documents // 20  # two documents: each is predicted from the other alone
    two = cross_validate(P, whole, [2], ["refit"], folds=2)[0]
    assert two.nll == pytest.approx(first[0].nll, abs=1e-3)


def test_the_smallest_k_within_an_error():
    def record(method: str, k: int, behind: float, error: float) -> HeldOut:
        return HeldOut(method, k, 5 + behind, 0.1, behind, error)

    records = [
        record("greedy", 2, 0.03, 0.01),
        record("refit", 4, 0.009, 0.01),
        record("greedy", 4, 0.008, 0.01),
        record("greedy", 8, 0.0, 0.0),
    ]
    assert smallest_k_within_one_se(records) == records[2]
    with pytest.raises(ValueError, match="was it left out"):
        smallest_k_within_one_se(records[:1])
