"""Weights are checked against closed forms, a slow second implementation, and their properties."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import brentq, minimize

from q0lib.prior import FLOOR, Prior, certificate, fit_prior, select, select_path

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens are few")

matrices = st.tuples(st.integers(1, 6), st.integers(1, 30)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.floats(0, 1))
)


def population(M: int, T: int, seed: int = 0, drift: float = 0.3) -> np.ndarray:
    """P[M, T] as snapshots of one trajectory leave it: correlated, slowly better."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 2.5, T) + np.cumsum(rng.normal(0.03, drift, (M, T)), axis=0)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def loss(weights: np.ndarray, P: np.ndarray) -> float:
    return -float(np.log(weights @ np.maximum(P.astype(np.float64), FLOOR)).mean())


def em(P: np.ndarray, steps: int = 20_000) -> np.ndarray:
    weights = np.full(len(P), 1 / len(P))
    for _ in range(steps):
        weights = weights * (P / (weights @ P)).mean(axis=1)
    return weights


def test_two_members_match_the_root_of_their_derivative():
    P = population(2, 400, drift=1.0).astype(np.float64)
    a, b = P
    root = brentq(lambda w: ((a - b) / (w * a + (1 - w) * b)).mean(), 0, 1, xtol=1e-14)
    fit = fit_prior(P, tolerance=1e-10)
    assert 0.1 < root < 0.9
    assert fit.weights == pytest.approx([root, 1 - root], abs=1e-6)


def test_exact_fit_matches_long_em_and_a_general_optimiser():
    P = population(8, 300, drift=1.0).astype(np.float64)
    fit = fit_prior(P)
    assert fit.nll == pytest.approx(loss(em(P), P), abs=1e-6)
    general = minimize(
        loss,
        np.full(8, 1 / 8),
        args=(P,),
        bounds=[(0, 1)] * 8,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-12},
    )
    assert fit.nll == pytest.approx(general.fun, abs=1e-6)


def test_disjoint_members_weigh_what_they_cover():
    P = np.zeros((3, 10))
    P[0, :5], P[1, 5:8], P[2, 8:] = 0.5, 0.9, 0.1
    assert fit_prior(P, tolerance=1e-9).weights == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)


def test_more_members_than_the_first_working_set():
    P = population(150, 2_000, drift=0.5)
    fit = fit_prior(P)
    assert fit.gap <= 1e-6
    assert fit.gap == pytest.approx(certificate(fit.weights, P), abs=1e-12)
    assert fit.nll == pytest.approx(loss(fit.weights, P), abs=1e-12)
    assert fit.weights.sum() == pytest.approx(1, abs=1e-12)


def test_a_token_that_only_a_late_member_covers():
    P = population(100, 500)
    P[:, 7] = 0
    P[60] = 1e-6
    assert fit_prior(P).gap <= 1e-6


def test_the_papers_fit_is_near_the_optimum_and_repeats():
    P = population(12, 1_500)
    paper, exact = fit_prior(P, method="adamw", seed=3), fit_prior(P)
    assert (paper.steps, paper.method) == (300, "adamw")
    assert exact.nll - 1e-6 <= paper.nll <= exact.nll + min(paper.gap, 2e-3)
    assert np.array_equal(paper.weights, fit_prior(P, method="adamw", seed=3).weights)
    assert not np.array_equal(paper.weights, fit_prior(P, method="adamw", seed=4).weights)


@pytest.mark.parametrize(("M", "T", "seed"), [(1, 50, 0), (7, 300, 1), (40, 3_000, 2)])
def test_the_papers_fit_is_that_of_torchs_adamw(M, T, seed):
    P = population(M, T, seed=seed, drift=1.0)
    P[:, 3] = 0.0  # a token that nobody covers has no gradient
    start = torch.randn(M, generator=torch.Generator().manual_seed(seed))
    logits = (1e-4 * start).requires_grad_()
    optimizer = torch.optim.AdamW([logits], lr=0.5, weight_decay=0.0)
    for _ in range(300):
        optimizer.zero_grad()
        mixture = torch.softmax(logits, dim=0) @ torch.from_numpy(P)
        (-torch.log(mixture.clamp(min=FLOOR)).mean()).backward()
        torch.nn.utils.clip_grad_norm_([logits], 1.0)
        optimizer.step()
    theirs = torch.softmax(logits.detach().double(), dim=0).numpy()
    ours = fit_prior(P, "adamw", seed=seed)
    assert loss(ours.weights, P) == pytest.approx(loss(theirs, P), abs=1e-6)
    assert ours.weights == pytest.approx(theirs, abs=1e-3)


@settings(deadline=None, max_examples=60)
@given(matrices)
def test_any_matrix_of_probabilities_is_fitted_to_the_tolerance(P):
    fit = fit_prior(P)
    assert fit.gap <= 1e-6
    assert (fit.weights >= 0).all()
    assert fit.weights.sum() == pytest.approx(1, abs=1e-9)
    assert fit.nll <= min(loss(row, P) for row in np.eye(len(P))) + 1e-6


@settings(deadline=None, max_examples=60)
@given(matrices, st.integers(0, 10**6))
def test_certificate_bounds_what_any_weights_can_gain(P, seed):
    rng = np.random.default_rng(seed)
    weights, others = rng.dirichlet(np.ones(len(P)), size=2)
    gained = loss(weights, P) - min(loss(others, P), fit_prior(P).nll)
    assert gained <= certificate(weights, P) + 1e-9


@settings(deadline=None, max_examples=40)
@given(matrices, st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(P, random):
    order = random.sample(range(len(P)), len(P))
    fit, shuffled = fit_prior(P), fit_prior(P[order])
    assert shuffled.nll == pytest.approx(fit.nll, abs=2e-6)
    assert certificate(shuffled.weights, P[order]) <= 1e-6


def test_permuted_members_take_their_weights_along():
    P, order = population(6, 400, drift=1.0), np.array([3, 0, 5, 1, 4, 2])
    fit, shuffled = fit_prior(P, tolerance=1e-10), fit_prior(P[order], tolerance=1e-10)
    assert shuffled.weights == pytest.approx(fit.weights[order], abs=1e-6)


def test_of_identical_members_the_first_carries_the_weight():
    P = population(5, 300, drift=1.0)
    alone, doubled = (
        fit_prior(P, tolerance=1e-10),
        fit_prior(P[[0, 1, 1, 2, 3, 4, 0]], "exact", 1e-10),
    )
    assert doubled.weights[[2, 6]] == pytest.approx([0, 0], abs=0)
    assert doubled.weights[[0, 1, 3, 4, 5]] == pytest.approx(alone.weights, abs=1e-6)


def test_nearly_identical_members():
    rng = np.random.default_rng(0)
    P = np.clip(rng.random(2_000) + 1e-7 * rng.normal(size=(50, 2_000)), 0, 1).astype(np.float32)
    assert fit_prior(P).gap <= 1e-6


@pytest.mark.parametrize("method", ["exact", "adamw"])
def test_one_member_and_one_token(method):
    fit = fit_prior(np.array([[0.25]]), method)
    assert fit.weights == pytest.approx([1])
    assert fit.nll == pytest.approx(np.log(4))
    assert fit.gap == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", ["exact", "adamw"])
def test_a_token_that_nobody_covers_costs_the_floor(method):
    fit = fit_prior(np.array([[0.5, 0.0], [0.5, 0.0]]), method)
    assert fit.nll == pytest.approx((np.log(2) - np.log(FLOOR)) / 2)
    assert fit.gap == pytest.approx(0, abs=1e-12)


def test_a_zero_where_others_cover_is_finite():
    P = np.full((2, 100), 0.5)
    P[0] = 0.9
    P[0, 0] = 0
    fit = fit_prior(P)
    assert fit.gap <= 1e-6
    assert 0 < fit.weights[1] < 0.05


def test_memory_maps_are_read_in_blocks(tmp_path):
    P = population(5, 70_000)
    np.save(tmp_path / "P.npy", P)
    mapped = np.load(tmp_path / "P.npy", mmap_mode="r")
    for method in ("exact", "adamw"):
        assert np.array_equal(fit_prior(mapped, method).weights, fit_prior(P, method).weights)
        assert np.isfinite(fit_prior(P[::-1, :500], method).nll)


def test_an_unreachable_tolerance_is_reported_not_claimed():
    P = population(20, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fit_prior(P, tolerance=1e-300)
    assert fit.gap <= 1e-9
    assert fit.gap == certificate(fit.weights, P)


def test_truncation_is_the_papers():
    weights = np.array([0.1, 0.3, 0.3, 0.05, 0.25])
    prior = Prior(weights, 0.0, 0.0, 0, "given")
    P = population(5, 50)
    chosen = select(P, 3, "truncate", prior)
    assert chosen.members.tolist() == [1, 2, 4]
    assert chosen.weights == pytest.approx(np.array([0, 0.3, 0.3, 0, 0.25]) / 0.85)
    assert select(P, 3).members.tolist() == (
        select(P, 3, prior=fit_prior(P, "adamw")).members.tolist()
    )


def test_refit_is_the_optimum_over_the_same_members():
    P = population(10, 800)
    truncated, refitted = select(P, 4, "truncate"), select(P, 4, "refit")
    members = np.sort(truncated.members)
    assert np.array_equal(np.sort(refitted.members), members)
    assert refitted.weights[members] == pytest.approx(fit_prior(P[members]).weights, abs=1e-4)
    assert loss(refitted.weights, P) <= loss(truncated.weights, P) + 1e-7


def test_greedy_finds_the_best_of_all_subsets_here_and_never_loses_to_refit():
    P = population(9, 600, seed=2, drift=0.8)
    prior = fit_prior(P, "adamw")
    greedy, refit = (select_path(P, range(1, 10), m, prior) for m in ("greedy", "refit"))
    for k in (1, 2, 3):
        subsets = itertools.combinations(range(9), k)
        best = min(fit_prior(P[list(subset)]).nll for subset in subsets)
        assert loss(greedy[k].weights, P) == pytest.approx(best, abs=3e-6)
    for k in range(1, 10):
        assert loss(greedy[k].weights, P) <= loss(refit[k].weights, P) + 1e-9
    assert loss(greedy[9].weights, P) == pytest.approx(fit_prior(P).nll, abs=2e-6)


@pytest.mark.parametrize("method", ["truncate", "refit", "greedy", "lowest", "uniform"])
def test_every_selection_is_well_formed_and_independent_of_the_other_ks(method):
    P = population(7, 300)[[0, 1, 2, 2, 3, 4, 5, 6, 6]]
    path = select_path(P, [1, 4, 9], method)
    for k, chosen in path.items():
        assert (chosen.k, chosen.method, len(set(chosen.members.tolist()))) == (k, method, k)
        assert chosen.weights.shape == (9,)
        assert chosen.weights.sum() == pytest.approx(1)
        assert np.delete(chosen.weights, chosen.members) == pytest.approx(0, abs=0)
        falling = [(-chosen.weights[i], i) for i in chosen.members]
        assert falling == sorted(falling)
        assert np.array_equal(select(P, k, method).members, chosen.members)
    assert select_path(P, [], method) == {}


def test_greedy_leaves_copies_for_last():
    P = population(4, 300, drift=1.0)[[0, 0, 1, 1, 2, 3]]
    chosen = select(P, 4, "greedy")
    assert len(np.unique(P[chosen.members], axis=0)) == 4


def test_lowest_and_uniform():
    P = np.array([[0.5], [0.9], [0.7], [0.7], [0.1]])
    assert select(P, 3, "lowest").members.tolist() == [1, 2, 3]
    assert select(P, 2, "lowest").members.tolist() == [1, 2]
    assert select(P, 1, "uniform").members.tolist() == [4]
    assert select(P, 2, "uniform").members.tolist() == [1, 4]
    assert select(P, 2, "uniform").weights == pytest.approx([0, 0.5, 0, 0, 0.5])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1, 1.5])
def test_a_bad_value_names_its_member(bad):
    P = population(5, 40)
    P[3, 17] = bad
    for call in (fit_prior, lambda P: select(P, 2), lambda P: certificate(np.full(5, 0.2), P)):
        with pytest.raises(ValueError, match=rf"P\[3, 17\] is {bad}.*allowed is 0..1.*: 3\)"):
            call(P)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda P: fit_prior(P[0]), r"\[members, tokens\].*\(40,\)"),
        (lambda P: fit_prior(P[:, :0]), r"at least one of each.*\(5, 0\)"),
        (lambda P: fit_prior((P > 0.5).astype(int)), "float32 or float64, got int64"),
        (lambda P: fit_prior(P, "newton"), "'exact', 'adamw'.*'newton'"),
        (lambda P: fit_prior(P, tolerance=0), "tolerance must be > 0 nats, got 0"),
        (lambda P: select(P, 0), r"1\.\.5.*got 0"),
        (lambda P: select(P, True), r"1\.\.5.*got True"),
        (lambda P: fit_prior(np.ma.masked_less(P, 0.5)), "P must be without a mask"),
        (lambda P: select_path(P, [2, 6], "lowest"), r"1\.\.5.*got 6"),
        (lambda P: select(P, 2, "best"), "'truncate'.*'best'"),
        (lambda P: select(P, 2, prior=fit_prior(P[:3])), r"\[5\], got shape \(3,\)"),
        (lambda P: certificate(np.full(5, 0.3), P), r"sum to 1, got 1\.5"),
        (lambda P: certificate(np.array([2, -1, 0, 0, 0]), P), r"weights\[1\] is -1"),
        (lambda P: certificate(np.full(5, np.nan), P), r"weights\[0\] is nan"),
    ],
)
def test_bad_arguments_are_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call(population(5, 40))


@pytest.mark.filterwarnings("default:.*tokens are few")
def test_few_tokens_for_the_members_warn():
    with pytest.warns(UserWarning, match="199 tokens are few for the weights of 2 members"):
        fit_prior(population(2, 199))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_prior(population(2, 200))
