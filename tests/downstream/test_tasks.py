"""Tasks made from held-out text, and what is kept of the answers."""

import json

import numpy as np
import pandas as pd
import pytest
from lm_eval.api.model import LM
from tiny import tiny_study, with_runtime

from q0lib import __main__ as dispatch
from q0lib import corpus, population, train
from q0lib.downstream import evaluation, tasks

DOCUMENTS = [
    " ".join(f"{word}{chr(97 + i % 26)}{'xyz'[i % 3]} of people number{i}" for i in range(80))
    for word in ("alpha", "beta", "gamma", "delta", "epsilon")
]


class Constant(LM):
    """Says the same of everything."""

    def loglikelihood(self, requests):
        return [(-1.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests):
        raise AssertionError

    generate_until = loglikelihood_rolling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    tasks.write(path, DOCUMENTS, 40, passage_chars=60, continuation_chars=30)
    return path


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_items_are_stretches_of_the_text_and_the_right_answer_is_right(folder):
    for item in read(folder, "which_passage"):
        right = item["passages"][item["gold"]] + item["continuation"]
        assert right in DOCUMENTS[item["document"]]
        assert len(set(item["passages"])) == 4
        others = [p for i, p in enumerate(item["passages"]) if i != item["gold"]]
        assert not any(other in DOCUMENTS[item["document"]] for other in others)
    for item in read(folder, "which_continuation"):
        right = item["passage"] + item["continuations"][item["gold"]]
        assert right in DOCUMENTS[item["document"]]
    for item in read(folder, "last_word"):
        assert item["passage"] + item["word"] in DOCUMENTS[item["document"]]
        assert item["word"].strip() in item["passage"].split()


def test_no_stretch_of_text_is_used_twice(folder):
    used = [item["passages"][item["gold"]] for item in read(folder, "which_passage")]
    assert len(used) == len(set(used)) == 40


def test_a_constant_scorer_gets_chance(folder):
    """Ties count as right where the first answer is; each place is right equally often."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        Constant(), tasks=list(tasks.NAMES), bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )["results"]  # fmt: skip
    assert found["which_passage"]["acc,none"] == 0.25
    assert found["which_continuation"]["acc,none"] == 0.25
    assert found["which_continuation"]["acc_mutual_info,none"] == 0.25
    assert found["last_word"]["acc,none"] == 0


def test_the_seed_decides_everything(folder, tmp_path):
    for seed, same in ((0, True), (1, False)):
        other = tmp_path / str(seed)
        tasks.write(other, DOCUMENTS, 40, passage_chars=60, continuation_chars=30, seed=seed)
        for name in tasks.NAMES:
            held = (folder / f"{name}.jsonl").read_text() == (other / f"{name}.jsonl").read_text()
            assert held == same


def test_text_without_spaces_has_passages_too(tmp_path):
    documents = [chr(0x4E00 + i) * 400 for i in range(4)]
    pairs = tasks._pairs(documents, 60, 30, np.random.default_rng(0))
    assert {len(passage) for _, passage, _ in pairs} == {72}


def test_too_little_text_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="too little text for an item of 'which_passage'"):
        tasks.write(tmp_path, DOCUMENTS[:3])


@pytest.fixture(scope="module")
def run(data_of_module):
    """The directory of a trained run with its weights."""
    wanted = with_runtime(tiny_study().run("q0", 4), keep_weights=True)
    return train.train_population(wanted, progress=False).directory


def test_held_out_documents_are_none_that_was_trained_on(run):
    described = population.Population.open(run).run.corpus
    held = corpus.held_out_documents(described)
    assert len(held) > 4
    trained_on = corpus.held_out_documents(described, "fitness")
    assert not set(held) & set(trained_on)
    text = corpus.load(described)
    train_text = text.tokenizer.decode(text["train"].tokens.tolist())
    assert not any(document in train_text for document in held)
    with pytest.raises(ValueError, match="split must be one of"):
        corpus.held_out_documents(described, "train")


def test_answers_are_kept_and_not_asked_again(run, folder, tmp_path, monkeypatch):
    model = evaluation.open_model(run, k=1, device="cpu")
    table = evaluation.evaluate(
        model, ["which_passage"], tmp_path, include=folder, progress=False
    ).set_index("metric")
    kept = evaluation.samples(tmp_path, "which_passage")
    assert len(kept) == 40
    assert table.value["acc"] == kept.acc.mean()
    assert table.chance["acc"] == 0.25
    best = [np.argmax(log_p) for log_p in kept.log_p]
    gold = [item["gold"] for item in read(folder, "which_passage")]
    assert kept.acc.tolist() == [float(a == b) for a, b in zip(best, gold, strict=True)]
    monkeypatch.setattr(evaluation, "_run", None)  # it would be called
    again = evaluation.evaluate(
        model, ["which_passage"], tmp_path, include=folder, progress=False
    ).set_index("metric")
    pd.testing.assert_frame_equal(table, again)


def test_answers_of_another_model_are_not_taken_for_its_own(run, folder, tmp_path):
    model = evaluation.open_model(run, member="0", device="cpu")
    evaluation.evaluate(model, ["last_word"], tmp_path, include=folder, progress=False)
    other = evaluation.open_model(run, member="1", device="cpu")
    with pytest.raises(ValueError, match="answers of another model: name another folder"):
        evaluation.evaluate(other, ["last_word"], tmp_path, include=folder, progress=False)
    with pytest.raises(ValueError, match="answers of another limit"):
        evaluation.evaluate(model, ["last_word"], tmp_path, include=folder, limit=2, progress=False)


def test_two_models_are_compared_item_by_item(run, folder, tmp_path):
    for member in "01":
        model = evaluation.open_model(run, member=member, device="cpu")
        evaluation.evaluate(
            model, ["which_passage"], tmp_path / member, include=folder, progress=False
        )
    row = evaluation.compare(tmp_path / "0", tmp_path / "1").iloc[0]
    a, b = (evaluation.samples(tmp_path / member, "which_passage") for member in "01")
    assert row.difference == pytest.approx(a.acc.mean() - b.acc.mean())
    sums = (a.acc - b.acc - row.difference).groupby(a.document).sum()
    assert row.se == pytest.approx(np.sqrt(5 / 4 * (sums**2).sum()) / 40)
    with pytest.raises(ValueError, match="no task in common"):
        evaluation.compare(tmp_path / "0", tmp_path)


def test_the_command_makes_tasks_and_prints_a_table(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(DOCUMENTS))
    arguments = ["evaluate", str(run), "--device", "cpu", "--out", str(tmp_path / "answers"),
                 "--precision", "bf16"]  # fmt: skip
    made = [*arguments, "--tasks", "which_passage", "--text", str(text), "--items", "4"]
    assert dispatch.main(made) == 0
    assert "which_passage    acc" in capsys.readouterr().out
    # Tasks of elsewhere may follow in the same folder, other items of the same name may not.
    about = json.loads((tmp_path / "answers" / "about.json").read_text())
    assert set(about["items"]) == set(tasks.NAMES)
    assert about["precision"] == "bf16"
    evaluation._claim(
        tmp_path / "answers", evaluation.open_model(run, device="cpu"), None,
        {"limit": None, "mixing": "token", "precision": "bf16"},
    )  # fmt: skip
    assert dispatch.main([*made[:-1], "8"]) == 2
    assert "answers of another text for " in capsys.readouterr().err
    for wrong, said in (
        (["--tasks", "which_pasage"], "did you mean"),
        (["--tasks", "last_word", "--limit", "0"], "limit must be >= 1"),
        (["--tasks", "last_word", "--member", "9"], "'best' or in 0.."),
    ):
        assert dispatch.main([*arguments, *wrong]) == 2
        assert said in capsys.readouterr().err
