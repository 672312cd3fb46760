"""More test text, read after training: the same numbers where it is the same text."""

import dataclasses

import numpy as np
import pytest
from tiny import tiny_study, with_runtime

from q0lib import corpus, ensemble, population, train
from q0lib.study import longer_test


@pytest.fixture(scope="module")
def whole(data_of_module):
    """A trained population with its weights."""
    run = with_runtime(tiny_study().run("q0", 6), keep_weights=True)
    return train.train_population(run, progress=False)


def test_the_front_of_a_longer_text_is_the_text_of_before(whole):
    tokens, context = whole.run.corpus.test_tokens, whole.run.model.context
    longer = longer_test.read(whole, tokens + 4 * context, progress=False)
    before = whole.P["test"].shape[1]
    assert longer.P["test"].shape == (3, before + 4 * context)
    np.testing.assert_allclose(longer.P["test"][:, :before], whole.P["test"], rtol=1e-5)
    np.testing.assert_array_equal(longer.documents["test"][:before], whole.documents["test"])
    assert longer.P["fitness"] is whole.P["fitness"]
    assert longer.members.validation_loss.equals(whole.members.validation_loss)
    own = [ensemble.mixture_nll(np.ones(1), longer.P["test"][[i]]) for i in range(3)]
    assert longer.members.test_loss.tolist() == own


def test_it_is_read_once_and_of_one_text(whole, monkeypatch):
    tokens = whole.run.corpus.test_tokens
    first = longer_test.read(whole, tokens, progress=False)
    np.testing.assert_allclose(first.members.test_loss, whole.members.test_loss, atol=1e-6)
    monkeypatch.setattr(population.Population, "model", None)  # it would be called
    again = longer_test.read(whole, tokens, progress=False)
    np.testing.assert_array_equal(first.P["test"], again.P["test"])
    other = corpus.load(whole.run.corpus)
    shifted = {**other.splits, "test": other["validation"]}
    monkeypatch.setattr(longer_test.corpus, "load", lambda _: shifted)
    with pytest.raises(ValueError, match="is of another test text: delete"):
        longer_test.read(whole, tokens, progress=False)


def test_of_a_streamed_corpus_there_is_no_longer_test_text(whole):
    corpus = dataclasses.replace(
        whole.run.corpus, source="hub:owner/name", tokenizer="gpt2", vocab_size=50_257
    )
    run = dataclasses.replace(whole.run, corpus=corpus)
    with pytest.raises(ValueError, match="would hold what was trained on"):
        longer_test.read(dataclasses.replace(whole, run=run), 4096, progress=False)


def test_weights_must_have_been_kept(whole):
    whole.weights_path(2).unlink()
    with pytest.raises(FileNotFoundError, match="keep_weights=true"):
        longer_test.read(whole, whole.run.corpus.test_tokens - 32, progress=False)
