"""The ideas that were tried do what their names say, so that "of no use" is a finding."""

import numpy as np
import pytest
import torch
from tiny import tiny_study, with_runtime

from q0lib import corpus, ensemble, population, prior, train
from q0lib.study import prior_variations

STUDY = tiny_study(0, "study.precision=fp32", "corpus.fitness_tokens=6000")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus.load(STUDY.corpus, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    run = with_runtime(STUDY.run("q0", 6), keep_weights=True)
    folder = tmp_path_factory.mktemp("varied")
    return train.train_population(run, text, directory=folder, progress=False)


def targets_of(text, split, count):
    return torch.from_numpy(text[split].tokens[1 : count + 1].astype(np.int64))


def test_distributions_are_those_that_training_recorded(trained, text):
    log_p = prior_variations.log_distributions(trained, text, "fitness")
    assert log_p.shape == (3, trained.P["fitness"].shape[1], 300)
    torch.testing.assert_close(log_p.logsumexp(-1), torch.zeros(log_p.shape[:2]), atol=1e-4, rtol=0)
    targets = targets_of(text, "fitness", log_p.shape[1])
    plain = prior_variations.tempered(log_p, targets, 1.0)
    np.testing.assert_allclose(plain, trained.P["fitness"], rtol=1e-3)
    hot = prior_variations.tempered(log_p, targets, 1e6)
    np.testing.assert_allclose(hot, 1 / 300, rtol=1e-3)


def test_log_linear_pool_of_one_member_is_its_best_temperature(trained, text):
    log_p = prior_variations.log_distributions(trained, text, "fitness")[-1:]
    targets = targets_of(text, "fitness", log_p.shape[1])
    weights = prior_variations.geometric_weights(log_p, targets)
    best = float(prior_variations.geometric_log_p(log_p, targets, weights).mean())
    grid = [
        np.log(prior_variations.tempered(log_p, targets, t)).mean() for t in np.linspace(0.5, 2, 61)
    ]
    assert best >= max(grid) - 1e-5


def test_penalties_of_nothing_give_the_plain_prior(trained):
    P = trained.P["fitness"]
    plain = prior.fit_prior(P)
    for weights in (
        prior_variations.dirichlet_weights(P, 1.0),
        prior_variations.smooth_weights(P, 0.0),
    ):
        assert ensemble.mixture_nll(weights, P) == pytest.approx(plain.nll, abs=1e-3)
    flat = np.full(len(P), 1 / len(P))
    np.testing.assert_allclose(prior_variations.dirichlet_weights(P, 1e9), flat, atol=1e-4)
    np.testing.assert_allclose(prior_variations.smooth_weights(P, 1e6), flat, atol=1e-2)


@pytest.mark.filterwarnings("ignore:.*tokens")
def test_comparison_is_against_the_plain_prior(trained, text):
    table = prior_variations.compare(trained, text).set_index("variation")
    weights = prior.fit_prior(trained.P["fitness"]).weights
    expected = ensemble.mixture_nll(weights, trained.P["validation"])
    assert table.validation["prior"] == pytest.approx(expected, abs=1e-3)
    assert table.gain["prior"] == 0
    for name, row in table.iterrows():
        assert row.gain == pytest.approx(table.validation["prior"] - row.validation), name


def test_weights_that_were_not_kept_are_named(trained, text, tmp_path):
    bare = train.train_population(STUDY.run("q0", 2), text, directory=tmp_path, progress=False)
    with pytest.raises(FileNotFoundError, match="keep_weights=true"):
        prior_variations.log_distributions(bare, text, "fitness")
    assert isinstance(bare, population.Population)
