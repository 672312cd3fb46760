"""The run directory: written whole, read strictly, never believed half-way."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_study, with_runtime

from q0lib import config, corpus, ensemble, evaluate, files, population, prior, rows, train
from q0lib.model import GPT


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    run = with_runtime(tiny_study().run("q0", 6), keep_weights=True)
    folder = tmp_path_factory.mktemp("run")
    return run, train.train_population(run, text, directory=folder, progress=False), folder


def test_rows_and_records(trained, text):
    run, loaded, folder = trained
    assert len(loaded) == 3
    for split in corpus.HELD_OUT:
        tokens = corpus.held_out_rows(text[split].tokens, 32) * 32
        assert loaded.P[split].shape == (3, tokens)
        assert loaded.documents[split].shape == (tokens,)
        assert ((loaded.P[split] > 0) & (loaded.P[split] <= 1)).all()
        np.testing.assert_allclose(
            loaded.members[f"{split}_loss"], -np.log(loaded.P[split].astype(float)).mean(1),
            atol=1e-5,
        )  # fmt: skip
    assert loaded.members.cycle.tolist() == [0, 1, 2]
    assert loaded.members.epochs.round().tolist() == [2, 4, 6]
    about = json.loads((folder / "run.json").read_text())
    assert about["key"] == run.key
    assert about["decides"] == json.loads(json.dumps(run.decides))
    assert about["versions"]["torch"] == torch.__version__
    assert about["commit"]
    result = json.loads((folder / "result.json").read_text())
    assert result["tokens"] == loaded.members.tokens.max()
    assert result["flops"] == loaded.flops


def test_prefix_is_checked(trained):
    _, loaded, _ = trained
    assert len(loaded.prefix(1, 2)) == 2
    with pytest.raises(ValueError, match="within 1 trajectories x 3 cycles, got 2 x 1"):
        loaded.prefix(2, 1)


def test_an_incomplete_run_is_not_believed(tmp_path):
    run = tiny_study().run("q0", 6)
    with pytest.raises(FileNotFoundError, match=r"needs 1 trajectories x 3 cycles .* train it"):
        population.load(run, tmp_path)


def test_rows_of_other_tokens_do_not_mix(trained, tmp_path):
    import shutil

    run, _, folder = trained
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = population.member_path(copy, 0, 1)
    record = population.read_record(path)
    record["fingerprints"]["test"] = "0" * 16
    population.write_member(path, load_file(path), record)
    with pytest.raises(ValueError, match="was evaluated on other tokens"):
        population.load(run, copy)
    path.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="cannot be read"):
        population.load(run, copy)


def test_weights_load_strictly(trained, tmp_path):
    run, _, folder = trained
    path = population.weights_path(folder, 0, 0)
    GPT(run.model).load_state_dict(population.read_weights(path), strict=True)
    prefixed = {f"_orig_mod.{name}": value for name, value in load_file(path).items()}
    save_file(prefixed, tmp_path / "w.safetensors")
    with pytest.raises(FileNotFoundError, match="keep_weights=true to keep weights"):
        population.read_weights(tmp_path / "never.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        GPT(run.model).load_state_dict(population.read_weights(tmp_path / "w.safetensors"))


def test_a_failed_write_keeps_the_old_file_and_no_scraps(tmp_path):
    target = tmp_path / "sub" / "a.txt"
    files.write_text(target, "first")

    def failing() -> None:
        with files.replacing(target) as temporary:
            temporary.write_text("sec")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="no space left to write"):
        failing()
    assert target.read_text() == "first"
    assert [p.name for p in target.parent.iterdir()] == ["a.txt"]


def test_scoring_leaves_the_student_in_training_mode(text):
    model = config.Model(vocab_size=300, context=32, layers=2, width=32, heads=2)
    net = GPT(model).initialise(torch.Generator().manual_seed(0)).train()
    first = evaluate.held_out_log_probs(net, text["test"], torch.float32)
    second = evaluate.held_out_log_probs(net, text["test"], torch.float32, batch=1)
    assert net.training
    torch.testing.assert_close(first, second)


@pytest.fixture
def kept(text, tmp_path):
    """A population whose weights were kept, in a folder that is all that is known of it."""
    run = with_runtime(tiny_study().run("q0", 6), keep_weights=True)
    train.train_population(run, text, directory=tmp_path / "run", progress=False)
    return tmp_path / "run"


def test_a_run_directory_explains_itself(text, kept):
    """From its path alone: what was trained, on which tokens, every member as a model."""
    found = population.Population.open(kept)
    assert (found.run.trajectories, found.run.cycles, found.run.key) == (1, 3, kept_key(kept))
    assert found.run.method == tiny_study().run("q0", 6).method
    split = text["test"].tokens[:33].astype(np.int64)
    assert found.tokenizer.encode("A message.").ids == text.tokenizer.encode("A message.").ids
    log_p = found.model(1).logits(torch.from_numpy(split[None, :-1])).log_softmax(-1)
    said = log_p[0].gather(1, torch.from_numpy(split[1:, None]))[:, 0].exp()
    np.testing.assert_allclose(said.detach(), found.P["test"][1, :32], rtol=0.1)  # of bf16
    assert len(population.Population.open(kept, cycles=2)) == 2
    with pytest.raises(FileNotFoundError, match="needs 1 trajectories x 9 cycles"):
        population.Population.open(kept, cycles=9)
    with pytest.raises(FileNotFoundError, match=r"is no run directory: it has no run\.json"):
        population.Population.open(kept.parent)


def kept_key(folder):
    return json.loads((folder / "run.json").read_text())["key"]


@pytest.mark.filterwarnings("ignore:.*tokens are few")
def test_how_it_is_mixed_is_saved_beside_it(kept, text, tmp_path):
    found = population.Population.open(kept)
    with pytest.raises(FileNotFoundError):
        _ = found.mixture
    fit = prior.fit_prior(found.P["fitness"])
    mixture = found.keep_mixture()
    assert population.Population.open(kept).mixture == mixture
    assert mixture.fitness_loss == pytest.approx(fit.nll)
    weights = dict(zip(mixture.members, mixture.weights, strict=True))
    for member, weight in enumerate(fit.weights):
        assert weights.get((0, member), 0.0) == pytest.approx(weight)
    assert list(mixture.weights) == sorted(mixture.weights, reverse=True)
    two = found.keep_mixture(prior.select(found.P["fitness"], 2))
    assert (len(two.members), two.choice, sum(two.weights)) == (2, "greedy", pytest.approx(1))
    assert found.keep_mixture() == two, "what was chosen stays"
    run = tiny_study().run("ensemble", 4)
    alike = train.train_population(run, text, directory=tmp_path / "e", progress=False)
    assert alike.keep_mixture().weights == (0.5, 0.5)


def test_directories_of_an_earlier_time_are_completed(text, kept):
    about = json.loads((kept / "run.json").read_text())
    del about["run"]
    (kept / "run.json").write_text(json.dumps(about))
    for name in ("tokenizer.json", "documents.safetensors"):
        (kept / name).unlink()
    with pytest.raises(ValueError, match="of an earlier q0lib; train_population adds"):
        population.Population.open(kept)
    run = tiny_study().run("q0", 6)
    with pytest.raises(FileNotFoundError, match=r"documents\.safetensors is not there; train_pop"):
        population.load(run, kept)
    train.train_population(run, text, directory=kept, progress=False)
    assert len(population.Population.open(kept)) == 3


def test_damage_is_one_sentence_with_the_file_and_what_to_do(text, kept):
    run = with_runtime(tiny_study().run("q0", 6), keep_weights=True)
    flipped, cut = (lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]), (lambda b: b[:-8])
    for name, damage in (
        ("t00/c0001.safetensors", flipped), ("t00/c0001.safetensors", cut),
        ("t00/c0001.weights.safetensors", cut), ("result.json", lambda b: b""),
        ("documents.safetensors", flipped), ("run.json", cut),
    ):  # fmt: skip
        path = kept / name
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        with pytest.raises(ValueError, match=rf"{path.name} .*delete it and rerun"):
            train.train_population(run, text, directory=kept, progress=False)
        path.write_bytes(whole)
    weights = kept / "t00/c0002.weights.safetensors"
    weights.write_bytes(flipped(weights.read_bytes()))
    with pytest.raises(ValueError, match=r"weights\.safetensors is not what was written there"):
        population.Population.open(kept).model(2)


@pytest.mark.filterwarnings("ignore:.*tokens are few")
def test_rows_that_stay_on_disk_give_what_arrays_give(kept, monkeypatch):
    held = population.Population.open(kept)
    monkeypatch.setattr(rows, "HELD", 0)
    lazy = population.Population.open(kept)
    for split, P in held.P.items():
        read = lazy.P[split]
        assert isinstance(read, rows.Rows)
        assert (read.shape, len(read), read.dtype) == (P.shape, len(P), P.dtype)
        np.testing.assert_array_equal(np.asarray(read), P)
        np.testing.assert_array_equal(read[[2, 0], 5:90:3], P[[2, 0], 5:90:3])
        np.testing.assert_array_equal(read[-1], P[-1])
        np.testing.assert_array_equal(read[1, :7], P[1, :7])
        np.testing.assert_array_equal(read[:, np.arange(P.shape[1]) % 2 == 0], P[:, ::2])
        mask = np.array([True, False, True])
        np.testing.assert_array_equal(np.asarray(read[mask]), P[mask])
    for method in ("exact", "adamw"):
        one, two = held.fitted(method), lazy.fitted(method)
        np.testing.assert_allclose(one.weights, two.weights, atol=1e-9)
    for choice in ("truncate", "greedy", "lowest"):
        picks = [prior.select(each.P["fitness"], 2, choice) for each in (held, lazy)]
        assert picks[0].members.tolist() == picks[1].members.tolist()
    part = lazy.prefix(1, 2)
    assert ensemble.mixture_nll(np.array([0.5, 0.5]), part.P["test"]) == pytest.approx(
        -np.log(held.P["test"][:2].mean(0)).mean(), abs=1e-6
    )


def test_each_part_is_fitted_once(kept, monkeypatch):
    calls = []
    fit = prior.fit_prior
    monkeypatch.setattr(prior, "fit_prior", lambda *a: (calls.append(a[1]), fit(*a))[1])
    found = population.Population.open(kept)
    for _ in range(2):
        found.fitted()
        found.prefix(1, 2).fitted()
        found.prefix(1, 2).fitted("adamw")
    assert calls == ["exact", "exact", "adamw"]
    other = dataclasses.replace(found, P={"fitness": found.P["fitness"][::-1]})
    assert other.fitted().weights != pytest.approx(found.fitted().weights), "of other rows"


def test_the_extent_that_is_asked_for_is_opened(text, tmp_path):
    """One trajectory of four cycles and another of two."""
    for budget, count in ((8, 1), (8, 2)):
        run = tiny_study(0, f"q0.trajectories={count}").run("q0", budget)
        train.train_population(run, text, directory=tmp_path, progress=False)
    assert population.completed(tmp_path) == [4, 2]

    def extent(**asked):
        run = population.Population.open(tmp_path, **asked).run
        return run.trajectories, run.cycles

    assert extent() == (1, 4)
    assert extent(trajectories=2) == (2, 2)
    assert extent(cycles=2) == (2, 2)
    assert extent(cycles=3) == (1, 3)
    population.member_path(tmp_path, 0, 3).unlink()
    wide = tiny_study(0, "q0.trajectories=3").run("q0", 6)
    train.train_population(wide, text, directory=tmp_path, progress=False)
    assert population.completed(tmp_path) == [3, 2, 1], "what was lost is not declared"
