"""A text of the reader's own: what is proposed for it, that it is kept, done, and told."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
from tiny import made, some_messages, tiny_study

from q0lib import corpus, ensemble, own_text, paths, presets, prior, train
from q0lib.model import forward_flops
from q0lib.own_text import plan, proposal, report, work
from q0lib.own_text.proposal import Machine, Speed, Wish

MACHINE = Machine("cpu", "a machine", 2, 16e9)
SPEED = Speed(8e10, 7e10, 2e11)
MANY = tuple(int(tokens) for tokens in np.geomspace(10_000, 150_000_000, 80))


def propose(tokens, hours, machine=MACHINE, held_out=10**7, **wish):
    room = dict.fromkeys(corpus.HELD_OUT, held_out)
    return proposal.propose(tokens, room, machine, SPEED, Wish(hours, **wish))


# --- the dial ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.NAMES)
def test_at_a_presets_tokens_the_proposal_is_the_preset(name):
    ours = presets.load(name)
    scaled = proposal.scaled(ours.corpus.train_tokens)
    assert scaled.model == ours.model
    assert scaled.methods == ours.methods
    for field in ("vocab_size", *(f"{split}_tokens" for split in corpus.SPLITS)):
        assert getattr(scaled.corpus, field) == getattr(ours.corpus, field)


def test_more_tokens_are_never_a_smaller_model_nor_a_higher_rate():
    studies = [proposal.scaled(tokens) for tokens in MANY]
    for less, more in itertools.pairwise(studies):
        for field in ("width", "layers", "context"):
            assert getattr(less.model, field) <= getattr(more.model, field)
        assert less.corpus.vocab_size <= more.corpus.vocab_size + 32, "rounded to 64"
        for name in ("q0", "single"):
            assert less.methods[name].matrix_lr >= more.methods[name].matrix_lr
            assert less.methods[name].weight_decay <= more.methods[name].weight_decay
            # A step is a number of whole sequences, so it may waver by half of one.
            waver = less.model.context
            assert less.methods[name].batch_tokens <= more.methods[name].batch_tokens + waver
    heads = {study.model.width // study.model.heads for study in studies}
    assert heads == {32, 64, 128}


def test_between_two_presets_sizes_lie_halfway_in_the_logarithm():
    cpu, gpu = presets.load("cpu"), presets.load("gpu")
    tokens = round((cpu.corpus.train_tokens * gpu.corpus.train_tokens) ** 0.5)
    half = proposal.scaled(tokens)
    assert half.methods["q0"].matrix_lr == pytest.approx((0.04 * 0.01) ** 0.5, rel=5e-3)
    assert half.methods["q0"].weight_decay == pytest.approx((0.7 * 1.3) ** 0.5, rel=5e-3)
    assert half.methods["q0"].perturb_start == pytest.approx(0.125, rel=1e-2), (
        "linear: cpu has none"
    )
    assert abs(half.model.width - (128 * 768) ** 0.5) <= 32
    assert half.model.windows == "L", "what is no number is the lower one's"


def test_a_given_vocabulary_is_padded_for_the_model_and_changes_nothing_else():
    own, given = proposal.scaled(300_000), proposal.scaled(300_000, 5000)
    assert (given.corpus.vocab_size, given.model.vocab_size) == (5000, 5056)
    assert dataclasses.replace(given.model, vocab_size=own.model.vocab_size) == own.model


# --- what fits ---------------------------------------------------------------------------------


def test_hours_buy_text_first_and_epochs_then():
    found = [propose(400_000, hours) for hours in (0.1, 0.5, 2, 8, 12, 24, 96, 400)]
    for hours, one in zip((0.1, 0.5, 2, 8, 12, 24, 96, 400), found, strict=True):
        assert one.seconds <= proposal.SHARE * 3600 * hours
        assert one.study.corpus.train_tokens == 400_000 or (
            (one.epochs, one.student_epochs) == proposal.RECIPES[0]
        )
    for less, more in itertools.pairwise(found):
        assert less.study.corpus.train_tokens <= more.study.corpus.train_tokens
        assert less.epochs <= more.epochs
    assert found[0].study.corpus.train_tokens < 60_000
    assert found[-1].epochs == 256
    assert found[-1].study.methods["q0"].trajectories == 2, "from 256 epochs on two are better"


def test_no_more_text_is_used_than_the_largest_preset_has():
    fast = Speed(1e20, 1e20, 1e20)
    room = dict.fromkeys(corpus.HELD_OUT, 10**8)
    machine = Machine("cpu", "a machine", 2, 1e13)
    one = proposal.propose(10**9, room, machine, fast, Wish(100))
    assert one.study.corpus.train_tokens == presets.load("paper").corpus.train_tokens


def test_a_batch_is_cut_where_memory_is_small_and_refused_where_nothing_fits():
    free = propose(2_000_000, 48)
    assert free.study.runtime.micro_batch == 0
    tight = dataclasses.replace(MACHINE, memory=0.6 * proposal.memory(free))
    cut = propose(2_000_000, 48, tight)
    rows = free.study.methods["q0"].batch_tokens // free.study.model.context
    assert 0 < cut.study.runtime.micro_batch < rows
    assert proposal.memory(cut) <= tight.memory
    with pytest.raises(ValueError, match=r"0\.00 GiB of memory are too few: the smallest study"):
        propose(2_000_000, 48, dataclasses.replace(MACHINE, memory=1e6))


def test_too_few_hours_are_refused_with_what_would_do():
    with pytest.raises(ValueError, match=r"hours must be at least 0\.\d+ for this text") as refused:
        propose(50_000, 1e-4)
    least = float(str(refused.value).split("at least ")[1].split()[0])
    assert propose(50_000, 1.05 * least).study.corpus.train_tokens >= proposal.LEAST


def test_a_population_has_no_more_members_than_its_fitness_text_has_hundreds_of_tokens():
    assert propose(50_000, 1000, held_out=4_900).epochs == 96
    assert propose(50_000, 1000, held_out=1_000).epochs == proposal.RECIPES[0][0]


def test_splits_and_context_are_such_as_the_text_has():
    one = propose(17_000, 1, held_out=700)
    assert one.study.corpus.test_tokens == one.study.corpus.fitness_tokens == 700
    assert one.study.model.context == 128
    assert propose(17_000, 1, held_out=300).study.model.context == 64


def test_below_the_smallest_preset_what_is_held_out_shrinks_with_the_text():
    quick, half = presets.load("quick").corpus, proposal.scaled(8_192).corpus
    assert half.test_tokens == quick.test_tokens / 2
    assert half.fitness_tokens == quick.fitness_tokens / 2
    assert proposal.scaled(8_192).model == presets.load("quick").model


def test_the_students_cost_is_its_own_passes_and_those_of_its_teachers():
    for tokens, kept in ((50_000, True), (400_000, False)):
        one = propose(tokens, 30, k=4)
        assert one.study.runtime.cache_lessons == kept
        assert one.study.methods["student"].packings == 4 * kept
        lessons = (4 if kept else one.student_epochs) * 4
        own = train.estimate(one.study.run("single", one.student_epochs))["flops"]
        expected = own + lessons * tokens * forward_flops(one.study.model)
        assert one.stages[-1].name == "student"
        assert one.stages[-1].flops == pytest.approx(expected)
        population = next(stage for stage in one.stages if stage.name == "population")
        assert population.flops == train.estimate(one.study.run("q0", one.epochs))["flops"]


def test_tuning_and_a_baseline_are_in_the_cost_and_can_be_left_out():
    plain, tuned = propose(50_000, 8), propose(50_000, 8, tune=True)
    assert [stage.name for stage in plain.stages] == ["population", "single model", "student"]
    assert tuned.stages[0].name == "tuning"
    assert tuned.stages[0].epochs == len(proposal.TRIALS) * tuned.trial_epochs > 0
    without = propose(50_000, 8, baseline=False)
    assert without.single_epochs == 0
    assert [stage.name for stage in without.stages] == ["population", "student"]
    assert propose(16_384, 8).single_epochs == 16
    assert plain.single_epochs == 32


def test_a_trial_of_the_proposal_itself_is_the_beginning_of_its_population():
    one = propose(50_000, 8, tune=True)
    assert proposal.trial(one.study, one.trial_epochs).key == one.study.run("q0", one.epochs).key
    other = proposal.trial(one.study, one.trial_epochs, 0.5, 2.0)
    q0 = one.study.methods["q0"]
    assert other.method.matrix_lr == pytest.approx(0.5 * q0.matrix_lr)
    assert other.method.weight_decay == pytest.approx(2 * q0.weight_decay)
    student = proposal.tuned(one.study, 0.5, 2.0).methods["student"]
    assert student.weight_decay == one.study.methods["student"].weight_decay


# --- the plan, kept ----------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Scales of the tiny study, and folders of this test's own."""
    low = tiny_study(0, "corpus.test_tokens=1600")
    high = tiny_study(
        0,
        "corpus.train_tokens=2400",
        "corpus.test_tokens=1600",
        "model.layers=3",
        "ensemble.epochs_per_cycle=4",
    )
    monkeypatch.setattr(proposal, "_ladder", lambda: (low, high))
    monkeypatch.setattr(proposal, "RECIPES", ((4, 2), (8, 6)))
    monkeypatch.setattr(proposal, "SHORTEST", 32)
    monkeypatch.setattr(proposal, "TOKENS_PER_MEMBER", 1)
    monkeypatch.setattr(plan, "measure", lambda study, machine, threads: (machine, SPEED))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    return tmp_path


def asked(**changes):
    given = {"source": str(some_messages()), "document_chars": 300, "k": 2, "device": "cpu"}
    return plan.Asked(**given | changes)


def test_the_same_request_goes_on_with_its_plan_though_the_speed_is_another(tiny, monkeypatch):
    first = plan.make(asked(), tiny / "out")
    plan.keep(first, tiny / "out")
    slow = Speed(1.0, 1.0, 1.0)
    monkeypatch.setattr(plan, "measure", lambda study, machine, threads: (machine, slow))
    assert plan.make(asked(), tiny / "out") == first
    with pytest.raises(ValueError, match=r"hours was 1\.0 and is now 2\.0.*--anew"):
        plan.make(asked(hours=2.0), tiny / "out")
    again = plan.make(asked(hours=1e9), tiny / "out", anew=True)
    assert again.speed == slow


def test_a_plan_is_of_the_text_and_says_how_much_of_it_is_used(tiny):
    made_of = plan.make(asked(), tiny / "out")
    text = corpus.load(made_of.proposal.study.corpus)
    assert {s: len(text[s].tokens) for s in ("train", "test")} == {
        "train": 2400, "test": made_of.proposal.study.corpus.test_tokens,
    }  # fmt: skip
    assert made_of.look.documents == sum(
        1 for _ in corpus.documents_of(made_of.proposal.study.corpus)
    )
    rows = plan.table(made_of, tiny / "out")
    share = 2400 / made_of.look.pools["train"]
    assert f"{100 * share:.2g}% of it" in rows.why["training tokens"]
    assert rows.value["training tokens"] == f"2,400 of {made_of.look.pools['train']:,}"


def test_a_text_that_is_too_small_is_refused_before_anything_is_written(tiny, capsys):
    path = tiny / "short.txt"
    path.write_text("\n".join(["A few words that are not enough for anything."] * 20))
    out = tiny / "out"
    assert own_text.main([str(path), "--out", str(out), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "short.txt has some 2" in said
    assert "needs 20,000 in 40" in said
    assert not out.exists()
    assert not (tiny / "cache").exists()
    assert own_text.main(["nowhere.txt", "--out", str(out)]) == 2
    assert own_text.main(["hub:owner/name", "--out", str(out)]) == 2
    assert own_text.main([str(path), "--hours", "0"]) == 2


def test_a_folder_of_something_else_is_refused_before_anything_is_done(tiny, capsys):
    out = tiny / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert own_text.main([str(some_messages()), "--out", str(out)]) == 2
    assert "out is there and is no exported model" in capsys.readouterr().err
    assert not (tiny / "cache").exists()


def test_a_machine_is_used_with_as_many_threads_as_are_fastest(monkeypatch):
    now = []

    def training(study, seconds):
        rate = 3.0 if now[-1] == 2 else 1.0
        return [("", 0, rate), ("", 0, rate), ("", 0, rate)]

    class threads:
        def __init__(self, count):
            now.append(count)

        __enter__ = __exit__ = lambda *_: None

    monkeypatch.setattr(plan.bench, "training", training)
    monkeypatch.setattr(plan.runtime, "threads", threads)
    machine, speed = plan.measure(presets.load("quick"), MACHINE)
    assert (machine.threads, speed.taught) == (2, 3.0)
    machine, speed = plan.measure(presets.load("quick"), MACHINE, threads=1)
    assert (machine.threads, speed.taught) == (1, 1.0)


# --- done, and told ----------------------------------------------------------------------------


def test_one_command_ends_in_a_model_and_a_report_and_again_trains_nothing(
    tiny, monkeypatch, capsys
):
    out = tiny / "out"
    given = [str(some_messages()), "--document-chars", "300", "-k", "2", "--out", str(out)]
    assert own_text.main([*given, "--dry-run"]) == 0
    assert "2,400 of" in capsys.readouterr().out
    assert not out.exists()
    stages = []
    real = train.train_population

    def until(run, *rest, **options):
        stages.append(run.name)
        if stages.count("single") == 1 and run.name == "single":
            raise train.Stopped
        return real(run, *rest, **options)

    monkeypatch.setattr(train, "train_population", until)
    assert own_text.main([*given, "--tune"]) == 130
    assert stages == ["q0"] * 5 + ["single"], "four trials, the population, the single model"
    assert own_text.main(given) == 2, "another request"
    assert own_text.main([*given, "--tune"]) == 0
    kept = plan.read(plan.place(out))
    trained = work.do(kept, progress=False)
    told = (out / "report.md").read_text()
    losses = work.losses(trained)
    assert losses.model.tolist()[0] == "single model"
    assert f"| student | 1 | {losses.test.iloc[-1]:.3f} ± {losses.se.iloc[-1]:.3f} |" in told
    assert report.summary(losses) in told
    assert "## Tuning" in told
    assert str(trained.student.directory) in told
    assert (out / "losses.png").stat().st_size > 5_000
    text = corpus.load(kept.proposal.study.corpus)
    beginning = " ".join(work.prompts(trained)[0].split())
    words = text.tokenizer.decode(text["test"].tokens.tolist())
    assert beginning in " ".join(words.split())
    foretold = work.costs(trained).set_index("stage")
    assert foretold.flops["population"] == trained.q0.flops
    wanted = {stage.name: stage.flops for stage in kept.proposal.stages}
    assert foretold.flops["single model"] == pytest.approx(wanted["single model"], rel=0.1)

    def never(*_, **__):
        raise AssertionError("all is there")

    monkeypatch.setattr(train, "train_trajectory", never)
    assert own_text.main([*given, "--tune"]) == 0


def some_trained(single=True):
    """A plan that nobody made, with populations whose losses can be computed by hand."""
    study = tiny_study()
    q0 = made(study.run("q0", 8), 4)
    # The same text: documents are the same whatever the seed.
    alone = made(study.run("single", 4), 1, seed=3)
    pupil = made(study.run("ensemble", 2), 1, seed=4)
    chosen = prior.select(q0.P["fitness"], 2)
    return work.Trained(None, q0, chosen, alone if single else None, pupil, pd.DataFrame())


def test_losses_are_those_of_the_test_text_with_errors_paired_by_token():
    trained = some_trained()
    table = work.losses(trained)
    assert table.model.tolist() == [
        "single model", "best snapshot", "snapshots", "snapshots", "student",
    ]  # fmt: skip
    assert table.k.tolist() == [1, 1, 2, 4, 1]
    P, q0 = trained.q0.P, trained.q0
    single, student = -np.log(trained.single.P["test"][0]), -np.log(trained.student.P["test"][0])
    assert table.test[0] == pytest.approx(single.mean(), abs=1e-6)
    assert table.difference[0] == 0
    lowest = int(np.argmin(-np.log(P["fitness"]).mean(1)))
    assert table.test[1] == pytest.approx(-np.log(P["test"][lowest]).mean(), abs=1e-6)
    weights = prior.select(P["fitness"], 2).weights
    assert table.test[2] == pytest.approx(-np.log(weights @ P["test"]).mean(), abs=1e-6)
    paired = ensemble.paired_difference(student, single, q0.documents["test"])
    assert (table.difference[4], table.difference_se[4]) == pytest.approx(paired, abs=1e-6)
    without = work.losses(some_trained(single=False))
    assert without.model[0] == "best snapshot"
    assert without.difference[0] == 0


def test_of_a_single_test_document_no_error_is_known_and_none_is_told():
    trained = some_trained()
    for one in (trained.q0, trained.single, trained.student):
        one.documents["test"] = np.zeros_like(one.documents["test"])
    losses = work.losses(trained)
    assert losses.se.isna().all()
    assert losses.difference_se.isna().all()
    assert np.isfinite(losses.difference).all()
    assert "nan" not in report.summary(losses)


def test_the_summary_says_which_is_lower_and_how_much_of_the_mixtures_gain_is_kept():
    rows = [
        ("single model", 1, 4.6, 0.03, 0.0, 0.0), ("best snapshot", 1, 4.5, 0.03, -0.1, 0.01),
        ("snapshots", 8, 4.3, 0.03, -0.3, 0.01), ("student", 1, 4.35, 0.03, -0.25, 0.02),
    ]  # fmt: skip
    columns = ["model", "k", "test", "se", "difference", "difference_se"]
    said = report.summary(pd.DataFrame(rows, columns=columns))
    assert "4.350 nats per token, 0.250 ± 0.020 below the single model (4.600)" in said
    assert "keeps 75% of what mixing gains" in said
    assert said.endswith("The lowest loss is that of 8 snapshots.")
    worse = [*rows[:3], ("student", 1, 4.7, 0.03, 0.1, 0.02)]
    said = report.summary(pd.DataFrame(worse, columns=columns))
    assert "0.100 ± 0.020 above the single model" in said
    assert "keeps" not in said


def test_where_hours_are_short_one_model_reads_more_text_once():
    plenty, short = propose(50_000, 8), propose(10_000_000, 0.2)
    assert plenty.single_tokens == 0
    assert proposal.single(plenty).epochs == plenty.single_epochs == 32
    used = short.study.corpus.train_tokens
    run = proposal.single(short)
    assert used < short.single_tokens == run.corpus.train_tokens <= 10_000_000
    assert run.epochs == 1
    assert run.method.weight_decay == 0.01
    assert run.corpus.test_tokens == short.study.corpus.test_tokens
    costs = {stage.name: stage.flops for stage in short.stages}
    assert costs["single model"] == pytest.approx(train.estimate(run)["flops"], rel=1e-6)
    assert propose(10_000_000, 0.2, baseline=False).single_tokens == 0
