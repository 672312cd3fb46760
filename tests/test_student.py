"""A mixture teaches one model: who teaches, what it says, what is kept, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tiny import made, tiny_study, with_runtime

from q0lib import config, corpus, ensemble, lessons, paths, population, prior, student, train
from q0lib.model import forward_flops
from q0lib.trajectory import Trajectory

FP32 = "study.precision=fp32"


@pytest.fixture(scope="module")
def teachers(text, tmp_path_factory):
    """A trajectory of four cycles and four independent models, with weights."""
    folder = tmp_path_factory.mktemp("teachers")
    found = {}
    for method, epochs in (("q0", 8), ("ensemble", 8)):
        study = tiny_study(0, FP32, "q0.trajectories=1", "runtime.keep_weights=true")
        run = study.run(method, epochs)
        found[method] = train.train_population(run, text, directory=folder / method, progress=False)
    return found


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")


def first(teachers, k):
    """The first `k` models of the ensemble, weighed unlike."""
    taught = student.teaching(teachers["ensemble"])
    weights = tuple(2 * (k - i) / (k * (k + 1)) for i in range(k))
    return config.Teaching(taught.members[:k], weights, taught.folders[:k])


def student_run(taught, epochs=2, *overrides, **runtime):
    run = tiny_study(1, FP32, *overrides).run("student", epochs, taught)
    return with_runtime(run, **runtime) if runtime else run


def test_the_greedy_choice_on_fitness_text_teaches(teachers):
    ensemble = teachers["ensemble"]
    plausible = dataclasses.replace(ensemble, P=made(ensemble.run, 4).P)
    taught = student.teaching(plausible, k=2)
    chosen = prior.select(plausible.P["fitness"], 2)
    trajectories = [trajectory for _, trajectory, _ in taught.members]
    assert trajectories == chosen.members.tolist()
    assert {key for key, _, _ in taught.members} == {ensemble.run.key}
    np.testing.assert_allclose(taught.weights, chosen.weights[chosen.members], atol=2e-6)


def test_without_k_members_are_weighed_as_their_method_means(teachers):
    alike = student.teaching(teachers["ensemble"])
    assert alike.weights == (0.25,) * 4
    learned = student.teaching(teachers["q0"])
    weights = prior.fit_prior(teachers["q0"].P["fitness"]).weights
    by_cycle = {cycle: w for (_, _, cycle), w in zip(learned.members, learned.weights, strict=True)}
    for cycle, weight in enumerate(weights):
        assert by_cycle.get(cycle, 0.0) == pytest.approx(weight, abs=2e-6)


def test_members_of_several_populations_teach_under_one_prior(teachers):
    both = [teachers["q0"], teachers["ensemble"]]
    with pytest.warns(UserWarning, match="few for the weights"):
        taught = student.teaching(both)
    P = np.concatenate([each.P["fitness"] for each in both])
    with pytest.warns(UserWarning, match="few for the weights"):
        weights = prior.fit_prior(P).weights
    assert sum(weights > 1e-6) == len(taught.members)
    assert {key for key, _, _ in taught.members} <= {each.run.key for each in both}
    assert sum(taught.weights) == pytest.approx(1, abs=1e-5)


def test_the_teacher_says_what_its_members_mixture_says(teachers, text):
    taught = first(teachers, 3)
    mixture = student.teacher(taught, torch.device("cpu"), torch.float32)
    tokens = torch.from_numpy(corpus.held_out(text["fitness"], 32, 0, 3))[:, :-1]
    expected = torch.zeros(3 * 32, 300, dtype=torch.float64)
    for (_, trajectory, _), weight in zip(taught.members, taught.weights, strict=True):
        said = teachers["ensemble"].model(trajectory).logits(tokens).flatten(0, 1).double()
        expected += weight * said.softmax(1)
    assert len(taught.members) == 3
    said = mixture.lesson(tokens).log_probs(slice(None))
    torch.testing.assert_close(said.double().exp(), expected, atol=1e-6, rtol=1e-4)


def test_a_students_first_step_follows_the_losses_definition(teachers, text):
    """The gradient is that of (1 - a) CE + a T^2 KL(mixture || student), by autograd."""
    taught = first(teachers, 2)
    run = student_run(taught, 2, "student.dropout=0", "student.alpha=0.7", "student.temperature=2")
    one = Trajectory(run, 0, text)
    mixture = student.teacher(taught, one.device, one.dtype)
    one.taught_by_mixture(mixture, None)
    with torch.no_grad():
        one.model.head.weight.add_(torch.randn(one.model.head.weight.shape) * 0.02)
    block = torch.from_numpy(one.stream.rows(0, 4))
    one._backward(block, 0, 4 * 32, True)
    found = one.model.head.weight.grad.clone()
    one.model.zero_grad()
    logits = one.model.logits(block[:, :-1]).flatten(0, 1)
    theirs = mixture.lesson(block[:, :-1]).log_probs(slice(None)) / 2
    cross = torch.nn.functional.cross_entropy(logits, block[:, 1:].flatten())
    divergence = torch.nn.functional.kl_div(
        (logits / 2).log_softmax(1), theirs.log_softmax(1), log_target=True, reduction="batchmean"
    )
    (0.3 * cross + 0.7 * 4 * divergence).backward()
    torch.testing.assert_close(found, one.model.head.weight.grad, atol=2e-6, rtol=1e-3)


def test_a_student_comes_nearer_to_its_teacher_than_a_model_without_one(teachers, text, tmp_path):
    taught = student.teaching(teachers["q0"])
    losses = {}
    for alpha in (0.0, 1.0):
        run = student_run(taught, 4, f"student.alpha={alpha}", "student.batch_tokens=128")
        left = train.train_population(run, text, directory=tmp_path / str(alpha), progress=False)
        model, tokens = left.model(0), torch.from_numpy(corpus.held_out(text["test"], 32, 0, 8))
        mixture = student.teacher(taught, torch.device("cpu"), torch.float32)
        theirs = mixture.lesson(tokens[:, :-1]).log_probs(slice(None))
        ours = model.logits(tokens[:, :-1]).flatten(0, 1).log_softmax(1)
        losses[alpha] = (theirs.exp() * (theirs - ours)).sum(1).mean().item()
    assert losses[1.0] < losses[0.0]


def test_what_is_kept_is_what_is_said(teachers, text, own_cache):
    taught = first(teachers, 2)
    run = student_run(taught, 4, "student.packings=2")
    one = Trajectory(run, 0, text)
    mixture = student.teacher(taught, one.device, one.dtype)
    kept = lessons.Kept(mixture, one.stream, taught)
    rows = one.stream.rows_per_epoch
    for row in (0, rows - 2, 2 * rows + 1):  # within a packing, across two, in its second turn
        inputs = torch.from_numpy(one.stream.rows(row, 4))[:, :-1]
        said = mixture.lesson(inputs).log_probs(slice(None))
        read = kept.lesson(row, 4).log_probs(slice(None))
        assert read.dtype == torch.float32
        torch.testing.assert_close(read, said, atol=1e-2, rtol=1e-3)
    assert [kept.repeats(row) for row in (0, 2 * rows - 1, 2 * rows)] == [False, False, True]
    assert len(list(kept.folder.glob("p*.safetensors"))) == 2


def test_other_teachers_and_other_streams_have_lessons_of_their_own(teachers, text, own_cache):
    folders = set()
    for k, seed in ((1, 1), (2, 1), (2, 2)):
        taught = first(teachers, k)
        run = dataclasses.replace(student_run(taught), seed=seed)
        one = Trajectory(run, 0, text)
        mixture = student.teacher(taught, one.device, one.dtype)
        folders.add(lessons.Kept(mixture, one.stream, taught).folder)
    assert len(folders) == 3


def test_lessons_too_large_to_keep_are_refused(teachers, text, own_cache, monkeypatch):
    monkeypatch.setattr(lessons, "MOST_BYTES", 1000)
    taught = first(teachers, 2)
    with pytest.raises(ValueError, match=r"cache_lessons=false"):
        train.train_population(
            student_run(taught, cache_lessons=True), text, directory=paths.CACHE / "s",
            progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("cached", [False, True])
def test_a_stopped_student_goes_on_to_the_same_bits(
    teachers, text, tmp_path, own_cache, monkeypatch, cached
):
    taught = first(teachers, 2)
    run = student_run(taught, 4, "student.ema_fraction=0.5", cache_lessons=cached)
    whole = train.train_population(run, text, directory=tmp_path / "whole", progress=False)
    step, steps = Trajectory.train_step, []

    def counted(self):
        steps.append(1)
        if len(steps) == 11:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trajectory, "train_step", counted)
    often = with_runtime(run, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        train.train_population(often, text, directory=tmp_path / "parts", progress=False)
    parts = train.train_population(run, text, directory=tmp_path / "parts", progress=False)
    assert len(steps) < 2 * int(whole.members.steps.iloc[-1])
    np.testing.assert_array_equal(parts.P["test"], whole.P["test"])


def test_a_run_directory_of_a_student_says_who_taught(teachers, text, tmp_path):
    taught = first(teachers, 2)
    run = student_run(taught)
    train.train_population(run, text, directory=tmp_path / "s", progress=False)
    opened = population.Population.open(tmp_path / "s")
    assert opened.run.teaching == taught
    assert opened.run.key == run.key
    opened.model(0)  # a student is there for its weights: they are kept unasked


def test_who_teaches_decides_a_student_and_where_they_lie_does_not(teachers):
    taught = first(teachers, 2)
    moved = dataclasses.replace(taught, folders=("elsewhere", "elsewhere"))
    other = dataclasses.replace(taught, weights=taught.weights[::-1])
    key = student_run(taught).key
    assert student_run(moved).key == key
    assert student_run(other).key != key
    assert student_run(student.teaching(teachers["q0"])).key != key


def test_costs_count_the_passes_of_every_teacher(teachers, text, tmp_path, own_cache):
    taught = first(teachers, 3)
    own = forward_flops(tiny_study().model)
    for packings, cached, lessons_read in ((0, False, 1.0), (2, False, 1.0), (2, True, 0.5)):
        run = student_run(taught, 4, f"student.packings={packings}", cache_lessons=cached)
        left = train.train_population(
            run, text, directory=tmp_path / f"{packings}{cached}", progress=False
        )
        tokens = left.members.tokens.iloc[-1]
        expected = tokens * own * (3 + 3 * lessons_read)
        assert left.flops == pytest.approx(expected, rel=0.06)  # an epoch ends within a batch
        assert train.estimate(run)["flops"] == pytest.approx(left.flops, rel=0.06)


def test_a_student_starts_from_the_best_member_if_asked_to(teachers, text, tmp_path):
    q0 = teachers["q0"]
    taught = student.teaching(q0, from_best=True)
    best = int(np.argmin(ensemble_losses(q0, taught)))
    assert taught.members[taught.start][2] == best
    rates = [f"student.{name}_lr=0" for name in ("matrix", "embedding", "unembedding", "scalar")]
    run = student_run(taught, 2, *rates, "student.dropout=0")
    left = train.train_population(run, text, directory=tmp_path / "s", progress=False)
    np.testing.assert_allclose(left.P["test"][0], q0.P["test"][best], rtol=1e-5)
    wider = tiny_study(1, FP32, "model.width=64").run("student", 2, taught)
    with pytest.raises(ValueError, match="of its shape"):
        train.train_population(wider, text, directory=tmp_path / "w", progress=False)


def ensemble_losses(q0, taught):
    taking_part = {cycle for _, _, cycle in taught.members}
    return [
        ensemble.mixture_nll(np.eye(len(q0))[i], q0.P["fitness"]) if i in taking_part else np.inf
        for i in range(len(q0))
    ]


def test_a_student_may_have_another_size(teachers, text, tmp_path):
    taught = first(teachers, 2)
    run = tiny_study(1, FP32, "model.width=64", "model.layers=3").run("student", 1, taught)
    left = train.train_population(run, text, directory=tmp_path / "s", progress=False)
    assert left.model(0).config.width == 64


def test_a_trajectory_can_be_taught_by_a_mixture_in_each_cycle(teachers, text, tmp_path):
    """A second generation: q0's own schedule, but for its teacher."""
    taught = student.teaching(teachers["q0"])
    study = tiny_study(1, FP32, "q0.trajectories=1", "q0.teacher=mixture", "q0.distill_after=1")
    left = train.train_population(
        study.run("q0", 4, taught), text, directory=tmp_path / "s", progress=False
    )
    spent = left.members.flops.diff().to_numpy()[1:] / left.members.tokens.diff().to_numpy()[1:]
    own = forward_flops(tiny_study().model)
    assert left.members.flops[0] / left.members.tokens[0] == pytest.approx(3 * own)
    assert spent == pytest.approx((3 + len(taught.members)) * own)


def test_teachers_that_may_have_read_what_is_held_out_are_refused(teachers, text, tmp_path):
    taught = first(teachers, 2)
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("run.json", "tokenizer.json"):
        (folder / name).write_bytes((teachers["ensemble"].directory / name).read_bytes())
    moved = dataclasses.replace(taught, folders=(str(folder),) * 2)
    student.check(moved, text)
    about = json.loads((folder / "run.json").read_text())
    about["tokens"]["test"] = "of other text"
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="holds out other test text"):
        student.check(moved, text)
    about["tokens"]["test"] = text["test"].fingerprint
    about["run"]["seed"] = 7
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="the student's teacher is"):
        student.check(moved, text)


def test_teachers_with_another_tokenizer_are_refused(teachers, text, tmp_path):
    other = corpus.train_tokenizer(["other words"], 300)
    with pytest.raises(ValueError, match="another tokenizer"):
        student.check(
            student.teaching(teachers["q0"], k=1), dataclasses.replace(text, tokenizer=other)
        )


def test_a_method_and_its_teaching_go_together(teachers):
    taught = student.teaching(teachers["q0"], k=1)
    with pytest.raises(ValueError, match="needs teaching"):
        tiny_study().run("student", 2)
    with pytest.raises(ValueError, match="takes no teaching"):
        tiny_study().run("ensemble", 4, taught)
    with pytest.raises(ValueError, match=r"k must be in 1\.\.4"):
        student.teaching(teachers["q0"], k=5)
    with pytest.raises(ValueError, match="got none"):
        student.teaching([])
    with pytest.raises(ValueError, match="start must be"):
        dataclasses.replace(taught, start=1)
    with pytest.raises(ValueError, match="a weight and a folder"):
        config.Teaching((("k", 0, 0),), (), ("f",))


def test_weights_that_were_not_kept_are_missed_in_one_sentence(text, tmp_path):
    run = tiny_study(0, "q0.trajectories=1").run("q0", 2)
    left = train.train_population(run, text, directory=tmp_path / "q0", progress=False)
    with pytest.raises(FileNotFoundError, match=r"keep_weights=true"):
        student.teaching(left)


def test_packings_take_turns(text):
    stream = corpus.EpochStream(text["train"], 32, (0,), packings=2)
    fresh = corpus.EpochStream(text["train"], 32, (0,))
    n = stream.rows_per_epoch
    np.testing.assert_array_equal(stream.rows(0, 2 * n), fresh.rows(0, 2 * n))
    np.testing.assert_array_equal(stream.rows(2 * n, 2 * n), stream.rows(0, 2 * n))
    orders = {fresh.rows(epoch * n, n).tobytes() for epoch in range(8)}
    assert len(orders) > 2  # three documents have six orders


def test_what_the_mixture_writes_is_read_beside_the_text(teachers, text, own_cache, tmp_path):
    taught = dataclasses.replace(first(teachers, 2), generated_tokens=100)
    run = student_run(taught, 2)
    longer = student.lengthened(text, run, progress=False)
    n = len(text["train"].tokens)
    np.testing.assert_array_equal(longer["train"].tokens[:n], text["train"].tokens)
    assert len(longer["train"].tokens) == n + 100
    assert longer["train"].starts[-4:].tolist() == [n, n + 32, n + 64, n + 96]
    end = text.tokenizer.token_to_id(corpus.END_OF_TEXT)
    assert set(longer["train"].tokens[longer["train"].starts].tolist()) == {end}
    again = student.lengthened(text, run, progress=False)
    assert again["train"].fingerprint == longer["train"].fingerprint
    other = student.lengthened(text, dataclasses.replace(run, seed=5), progress=False)
    assert other["train"].fingerprint != longer["train"].fingerprint
    assert run.key != student_run(first(teachers, 2), 2).key
    left = train.train_population(run, text, directory=tmp_path / "s", progress=False)
    assert left.members.tokens[0] == pytest.approx(train.estimate(run)["tokens"], rel=0.1)
    assert population.Population.open(tmp_path / "s").run.teaching == taught


def test_tokens_are_written_by_the_mixtures_distribution(teachers, text, own_cache, monkeypatch):
    """The second token of each row follows p(. | <|endoftext|>) of the mixture."""
    taught = dataclasses.replace(first(teachers, 2), generated_tokens=32 * 2000)
    monkeypatch.setattr(student, "_AT_ONCE", 2000)
    run = student_run(taught, 2)
    rows = student.lengthened(text, run, progress=False)["train"].tokens[-32 * 2000 :]
    seconds = np.bincount(rows.reshape(-1, 32)[:, 1], minlength=300) / 2000
    mixture = student.teacher(taught, torch.device("cpu"), torch.float32)
    p = mixture.lesson(torch.zeros(1, 1, dtype=torch.int64)).log_probs(slice(None)).exp()[0]
    p = p[: text.vocab_size] / p[: text.vocab_size].sum()
    spread = (p * (1 - p) / 2000).sqrt().numpy()
    assert np.all(np.abs(seconds[: text.vocab_size] - p.numpy()) < 5 * spread + 2e-3)
