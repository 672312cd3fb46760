"""Fitness text chooses, validation and test only tell: no table may have learned from the rest.

A loss on a split to which nothing was fitted adds up over its tokens, and what was chosen without
a split does not move when that split does. Both are asked of every table at once.
"""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from tiny import made, tiny_study

from q0lib import corpus, ensemble, population, prior
from q0lib.study import plan, prior_variations
from q0lib.study.tables import (
    ablations,
    budgets,
    data_efficiency,
    epoch_efficiency,
    intervals,
    learned_prior,
    mixtures,
    tuning,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")


def cut(whole: population.Population, split: str, tokens: slice) -> population.Population:
    """The population as it had been evaluated on some tokens of a split alone."""
    P = whole.P | {split: whole.P[split][:, tokens]}
    documents = whole.documents | {split: whole.documents[split][tokens]}
    loss = -np.log(P[split].astype(float)).mean(1)
    members = whole.members.assign(**{f"{split}_loss": loss})
    return dataclasses.replace(whole, P=P, documents=documents, members=members)


def trained(label: str = plan.FULL, method: str = "q0", epochs: float = 16) -> plan.Trained:
    run = tiny_study(0, "q0.trajectories=2").run(method, epochs)
    return [(plan.Experiment("main", label, method, epochs), run)]


# For each table how it is made, and which of its columns are nats per token of which split.
ERRORS = ["test_se", "behind_se", "behind_all_se", "mean_behind_se", "seconds"]
MIXTURES = {"validation": ["validation"], "test": ["test", "behind_all"]}
WORTH = {
    "validation": ["learned_validation", "uniform_validation", "mixed_validation"],
    "test": ["learned", "uniform", "k8", "snapshot", "last", "mixed", "behind"],
}
TABLES = {
    "selections": (
        lambda whole: mixtures.selections(
            whole, [1, 2, 4, 8], mixtures.ALL_CHOICES, whole.fitted("adamw")
        ),
        MIXTURES
    ),
    "epoch_efficiency": (lambda whole: epoch_efficiency.rows(whole, [8], [2]), MIXTURES),
    "curve_on_test": (mixtures.snapshot_curve, {"test": ["member", "mixture"]}),
    "curve_on_validation": (
        lambda whole: mixtures.snapshot_curve(whole, "validation"),
        {"validation": ["member", "mixture"]},
    ),
    "small_budgets": (lambda _: budgets.small(trained()), WORTH),
    "splits": (lambda _: budgets.splits(trained()), MIXTURES),
    "tuning": (
        lambda _: tuning.table(trained()), {"validation": ["snapshot", "uniform", "learned"]}
    ),
    "ablations": (lambda _: ablations.tables(trained(), [8])["ablations"], WORTH),
    "prior": (
        lambda whole: flat(learned_prior.tables([whole.run], [2, 8], [300], k=2)),
        {"validation": ["prior_choices validation", "prior_fitness_size loss"],
         "test": ["prior_fits test", "prior_choices test", "prior_choices behind_all"]},
    ),
}  # fmt: skip


def flat(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Several tables side by side, without errors and seconds."""
    return pd.concat(
        [table.drop(columns=ERRORS, errors="ignore").add_prefix(f"{name} ")
         for name, table in tables.items()], axis=1,
    )  # fmt: skip


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("name", TABLES)
def test_losses_add_up_over_tokens_and_nothing_else_moves(name, split, monkeypatch):
    make, columns = TABLES[name]
    whole = made(trained()[0][1], 8)
    middle = whole.P[split].shape[1] // 2
    tables = []
    for tokens in (slice(None), slice(middle), slice(middle, None)):
        part = cut(whole, split, tokens)
        for module in (population, learned_prior):
            monkeypatch.setattr(module, "load", lambda run, part=part: part)
        tables.append(make(part).drop(columns=ERRORS, errors="ignore"))
    table, first, second = tables
    share = middle / whole.P[split].shape[1]
    for column in set(columns.get(split, ())) & set(table):
        expected = share * first.pop(column) + (1 - share) * second.pop(column)
        np.testing.assert_allclose(table.pop(column), expected, rtol=1e-6, atol=1e-9)
    pd.testing.assert_frame_equal(first, table)
    pd.testing.assert_frame_equal(second, table)


def test_weights_of_less_fitness_text_know_nothing_of_the_rest():
    whole = made(tiny_study().run("q0", 16), 8)
    other = cut(whole, "fitness", slice(200, None, -1))
    other.P["fitness"] = np.concatenate([whole.P["fitness"][:, :200], other.P["fitness"]], axis=1)
    tables = [learned_prior.by_fitness_size(each, [200], 2) for each in (whole, other)]
    first, again = (each[each.tokens == 200] for each in tables)
    pd.testing.assert_frame_equal(first, again)


@pytest.fixture
def specialists():
    """A member that knows a little of everything, and eight that each know one document of 24."""
    documents = np.repeat(np.arange(24), np.random.default_rng(0).integers(10, 40, 24))
    P = np.full((9, len(documents)), 1e-4)
    P[0] = 0.02
    for document in range(8):
        P[1 + document, documents == document] = 0.9
    return P, documents


def test_k_is_not_chosen_on_the_text_that_the_weights_were_fitted_to(specialists):
    P, documents = specialists
    run = tiny_study().run("q0", 18)
    whole = dataclasses.replace(made(run, 9), P={"fitness": P}, documents={"fitness": documents})
    fitted = prior.select_path(P, [1, 9], "truncate")
    losses = {k: ensemble.mixture_nll(each.weights, P) for k, each in fitted.items()}
    assert losses[9] < losses[1], "on the fitted text all of them look better"
    assert mixtures.chosen_k(whole, [1, 9]) == 1


@pytest.mark.parametrize("choice", ["truncate", "refit", "greedy"])
def test_a_held_out_document_tells_nothing_to_the_other_folds(specialists, choice):
    """Who knows one document alone is of use on it, and on no other."""
    P, documents = specialists
    everyone = ensemble.cross_validate(P, documents, [9], [choice])[0]
    assert everyone.nll > -np.log(0.02), "worse than the first member alone"
    expected = np.empty(len(documents))
    fold = np.random.default_rng(0).permutation(24) % 5
    for out in range(5):
        held = np.isin(documents, np.flatnonzero(fold == out))
        fitted = prior.select(P[:, ~held], 9, choice).weights
        expected[held] = -np.log(fitted @ P[:, held])
    assert everyone.nll == pytest.approx(expected.mean())


def test_a_penalty_is_chosen_on_documents_that_its_weights_have_not_seen(specialists):
    P, documents = specialists
    asked = []

    def fit(rows, parameter):
        asked.append(rows.shape[1])
        if parameter:
            return np.eye(9)[0]
        return prior.fit_prior(rows).weights

    assert prior_variations.by_folds(P, documents, fit, [0.0, 1.0]) == 1.0
    assert max(asked) < len(documents)


def test_a_text_drawn_anew_counts_a_long_document_for_its_tokens():
    sums = {intervals.TOKENS: np.array([1.0, 99.0]), ("q0", 0, 8.0): np.array([10.0, 99.0])}
    losses = intervals.resampled_losses(intervals.document_frame(sums))["q0", 0, 8.0]
    assert sorted(set(losses.round(6))) == pytest.approx([1.0, 109 / 100, 10.0])


def test_the_reference_model_is_elected_on_validation():
    table = pd.DataFrame(
        {"model": ["s", "l"] * 2, "tokens": [100] * 2 + [200] * 2, "seed": 0,
         "validation": [4.0, 4.1, 3.9, 3.8], "test": [4.2, 4.0, 3.7, 3.9]}
    )  # fmt: skip
    assert data_efficiency.reference_curve(table).model.tolist() == ["s", "l"]


def test_the_best_budget_is_that_of_validation():
    points = [(1, 4.5), (2, 4.4), (4, 4.0)]
    line = pd.DataFrame(
        [{"model": "s", "seed": 0, "tokens": 100 * m, "multiple": m, "test": t} for m, t in points]
    )
    curve = pd.DataFrame(
        {"method": "single", "seed": 0, "epochs": [8, 16], "validation": [4.1, 4.2],
         "loss": [4.3, 4.2]}
    )  # fmt: skip
    ours, theirs = (
        intervals.document_frame(
            {intervals.TOKENS: np.full(2, 5.0)}
            | {(name, 0, float(at)): np.full(2, 5.0 * loss) for at, loss in losses}
        )
        for name, losses in (("single", [(8, 4.3), (16, 4.2)]), ("s", points))
    )
    row = data_efficiency.table(curve, line, 100, [("single", 0)], ours, theirs).iloc[0]
    assert (row.epochs, row.loss) == (8, pytest.approx(4.3))


def test_a_token_belongs_to_the_document_that_it_stands_in():
    """Scored are tokens 1 to 8 of nine; token 3 begins a document, and so does token 5."""
    split = corpus.Split("test", np.arange(9, dtype=np.uint16), np.array([0, 3, 5]), "")
    assert split.document_ids(4).tolist() == [0, 0, 1, 1, 2, 2, 2, 2]


def test_the_tokenizer_has_read_training_text_alone(tmp_path, monkeypatch):
    read = []
    train = corpus.train_tokenizer

    def recorded(documents, vocab_size):
        read.extend(documents)
        return train(read, vocab_size)

    monkeypatch.setattr(corpus, "train_tokenizer", recorded)
    text = corpus.load(tiny_study().corpus, tmp_path)
    for name, split in text.splits.items():
        parts = np.split(split.tokens, split.starts[1:])[:-1]  # the last may be cut
        documents = {text.tokenizer.decode(part.tolist()) for part in parts}
        assert documents & set(read) == (documents if name == "train" else set())
