"""Training: the same bits however it is interrupted, and every member what it claims to be."""

import itertools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import load_file
from tiny import some_messages, tiny_study, with_runtime
from tqdm import tqdm

from q0lib import (
    corpus,
    distill,
    evaluate,
    optim,
    population,
    provenance,
    runtime,
    train,
    trajectory,
)
from q0lib.model import GPT

HELD_OUT = corpus.HELD_OUT


def trained(run, text, directory, stop_at=None):
    """Train, stopping after so many steps of this call; returns whether it ran to the end."""
    calls = itertools.count(1)
    population.open_directory(run, directory, text)
    for index in range(run.trajectories):
        stop = lambda: next(calls) == stop_at  # noqa: E731
        train.train_trajectory(run, index, text, directory, stop, tqdm(disable=True))
    population.write_result(run, directory)
    return population.load(run, directory)


def same(one: population.Population, two: population.Population) -> bool:
    clocks = ["train_seconds", "wall_seconds", "runtime"]
    return all(np.array_equal(one.P[split], two.P[split]) for split in HELD_OUT) and (
        one.members.drop(columns=clocks).equals(two.members.drop(columns=clocks))
    )


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    run = tiny_study().run("q0", 6)
    folder = tmp_path_factory.mktemp("whole")
    return run, trained(run, text, folder), folder


# A cycle is 9 steps, an epoch 4.5: mid-epoch, mid-cycle, the last step of a cycle, the first
# after a boundary, and with a teacher in place.
@pytest.mark.parametrize("stop_at", [2, 5, 9, 10, 19, 20])
def test_resume_is_bit_exact_wherever_it_stopped(uninterrupted, text, tmp_path, stop_at):
    run, whole, folder = uninterrupted
    assert [cycle.steps for cycle in trajectory.planned_cycles(run, text)] == [9, 9, 9]
    with pytest.raises(train.Stopped):
        trained(run, text, tmp_path, stop_at)
    assert same(trained(run, text, tmp_path), whole)
    states = [torch.load(at / "t00" / "checkpoint.pt", weights_only=True)["model"]
              for at in (folder, tmp_path)]  # fmt: skip
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_estimate_foretells_what_training_spends(uninterrupted):
    run, whole, _ = uninterrupted
    need = train.estimate(run)
    assert need["parameters"] == sum(p.numel() for p in GPT(run.model).parameters())
    assert need["taught"] == pytest.approx(2 / 3), "two of three cycles have a teacher"
    assert need["tokens"] == pytest.approx(whole.members.tokens.max(), rel=0.1)
    per_token = whole.flops / whole.members.tokens.max()
    assert need["flops"] / need["tokens"] == pytest.approx(per_token, rel=1e-6)
    assert need["memory"] < 100e6, "a tiny model needs no gigabyte"


def test_a_longer_run_begins_with_the_shorter_one(uninterrupted, text, tmp_path):
    run, whole, _ = uninterrupted
    short = tiny_study().run("q0", 2)
    first = trained(short, text, tmp_path)
    assert same(whole.prefix(1, 1), first)
    assert same(trained(run, text, tmp_path), whole)
    assert population.completed(tmp_path) == [3]
    again = train.train_population(short, text, directory=tmp_path, progress=False)
    assert same(again, first)
    assert population.completed(tmp_path) == [3], "the longer result stays"


def test_a_lost_member_is_trained_again(uninterrupted, text, tmp_path):
    run, whole, _ = uninterrupted
    again = {"directory": tmp_path, "progress": False}
    train.train_population(run, text, **again)
    population.member_path(tmp_path, 0, 1).unlink()
    assert not population.is_complete(run, tmp_path)
    assert same(train.train_population(run, text, **again), whole)
    kept = train.train_population(with_runtime(run, keep_weights=True), text, **again)
    assert same(kept, whole)
    assert kept.weights_path(2).exists(), "weights asked for later are trained again"


def test_training_members_again_keeps_what_had_come_further(text, tmp_path, monkeypatch):
    """Weights asked for at a short budget take nothing from a longer run."""
    long, longer = tiny_study().run("q0", 4), tiny_study().run("q0", 6)
    short = with_runtime(tiny_study().run("q0", 2), keep_weights=True)
    trained(long, text, tmp_path)
    assert trained(short, text, tmp_path).weights_path(0).exists()
    steps = []
    step = trajectory.Trajectory.train_step
    monkeypatch.setattr(
        trajectory.Trajectory, "train_step", lambda self: (steps.append(self.cycle), step(self))[1]
    )
    trained(longer, text, tmp_path)
    assert set(steps) == {2}, "it goes on from the end of the long run"
    assert [path.name for path in tmp_path.glob("t00/checkpoint*")] == ["checkpoint.pt"]


def test_long_and_wide_runs_share_a_directory(text, tmp_path):
    long = tiny_study().run("q0", 6)
    wide = tiny_study(0, "q0.trajectories=2").run("q0", 4)
    assert long.key == wide.key
    first = trained(long, text, tmp_path)
    trained(wide, text, tmp_path)
    assert population.completed(tmp_path) == [3, 1]
    assert same(population.load(long, tmp_path), first)
    assert len(population.load(wide, tmp_path)) == 2
    square = tiny_study(0, "q0.trajectories=2").run("q0", 12)
    assert not population.is_complete(square, tmp_path)


@pytest.mark.parametrize("method", ["ensemble", "distilled_ensemble"])
def test_baselines_resume_bit_exact_too(text, tmp_path, method):
    run = tiny_study(0, "methods.ema_fraction=0.5", "methods.dropout=0.1").run(method, 4)
    whole = trained(run, text, tmp_path / "whole")
    for stop_at in (3, 6, 12):
        with pytest.raises(train.Stopped):
            trained(run, text, tmp_path / str(stop_at), stop_at)
        assert same(trained(run, text, tmp_path / str(stop_at)), whole)


def test_members_differ_and_the_first_two_of_three_are_the_two(text, tmp_path):
    study = tiny_study(0, "q0.trajectories=2")
    two = trained(study.run("q0", 4), text, tmp_path / "two")
    three = trained(tiny_study(0, "q0.trajectories=3").run("q0", 6), text, tmp_path / "three")
    assert two.run.key == three.run.key
    assert same(three.prefix(2, 1), two)
    rows = three.P["test"]
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(rows, 2))


def test_seed_decides(uninterrupted, text, tmp_path):
    other = trained(tiny_study(1).run("q0", 2), text, tmp_path)
    assert not np.array_equal(other.P["test"][0], uninterrupted[1].P["test"][0])


def test_snapshot_is_taken_at_the_floor_before_the_perturbation(text, tmp_path, monkeypatch):
    seen = []
    scale = optim.scale
    monkeypatch.setattr(optim, "scale", lambda o, lr, wd: (seen.append((lr, wd)), scale(o, lr, wd)))
    run = with_runtime(tiny_study().run("q0", 4), keep_weights=True)
    trained(run, text, tmp_path)
    assert seen[8] == seen[17] == pytest.approx((0.08, 1.0)), "a cycle ends at its floor"
    assert seen[9] == seen[0]
    assert len({lr for lr, _ in seen[:9]}) == 9, "the rate moves with every step"
    kept = load_file(population.weights_path(tmp_path, 0, 1))
    live = torch.load(tmp_path / "t00" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(kept[name], live[name]) for name in live)
    assert sorted(kept) == sorted(name for name, _ in GPT(run.model).named_parameters())


def test_recorded_loss_is_pure_cross_entropy_of_the_kept_weights(text, tmp_path):
    run = with_runtime(tiny_study(0, "study.precision=fp32").run("q0", 4), keep_weights=True)
    found = trained(run, text, tmp_path)
    net = GPT(run.model).eval()
    net.load_state_dict(load_file(population.weights_path(tmp_path, 0, 1)), strict=True)
    rows = corpus.held_out_rows(text["test"].tokens, 32)
    tokens = torch.from_numpy(corpus.held_out(text["test"], 32, 0, rows))
    with torch.no_grad():
        logits = 15 * torch.tanh(net.head(net(tokens[:, :-1])) / 15)
    nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert found.members.test_loss[1] == pytest.approx(float(nll.mean()), abs=1e-5)
    np.testing.assert_allclose(-np.log(found.P["test"][1]), nll.numpy(), atol=1e-4)


def test_distillation_starts_when_it_should_and_is_counted(uninterrupted, text):
    _, whole, _ = uninterrupted
    flops = whole.members.flops.diff().fillna(whole.members.flops)
    assert flops[1] / flops[0] == pytest.approx(4 / 3), "one teacher pass beside three of training"
    assert flops[2] == pytest.approx(flops[1])
    assert whole.members.tokens.tolist() == [9 * 256, 18 * 256, 27 * 256]
    assert whole.flops == whole.members.flops.max()


def test_ensemble_members_are_independent_and_distilled_ones_are_not(text, tmp_path):
    study = tiny_study()
    plain = trained(study.run("ensemble", 4), text, tmp_path / "plain")
    taught = trained(study.run("distilled_ensemble", 4), text, tmp_path / "taught")
    assert np.array_equal(plain.P["test"][0], taught.P["test"][0]), "the first has no teacher"
    assert not np.array_equal(plain.P["test"][1], taught.P["test"][1])
    assert taught.members.flops[1] > plain.members.flops[1]
    assert not list((tmp_path / "plain").glob("*/checkpoint.pt")), "no longer run goes on from it"


def test_a_tail_ends_as_one_ordinary_run_does_and_leaves_snapshots_on_its_way(text, tmp_path):
    ordinary = ["tail.cycles=1", "tail.tail=0"]
    one = trained(tiny_study(0, *ordinary).run("tail", 3), text, tmp_path / "one")
    four = trained(tiny_study().run("tail", 3), text, tmp_path / "four")
    assert np.array_equal(four.P["test"][-1], one.P["test"][0])
    with pytest.raises(train.Stopped):
        trained(tiny_study().run("tail", 3), text, tmp_path / "again", stop_at=12)
    assert same(trained(tiny_study().run("tail", 3), text, tmp_path / "again"), four)
    ends = four.members.epochs.to_numpy()
    assert ends == pytest.approx([2.44, 2.63, 2.81, 3], abs=0.12), "a step is 0.22 epochs"
    assert (np.diff(ends) > 0).all()


def test_every_snapshot_of_a_tail_has_its_own_average(text, tmp_path):
    run = tiny_study(0, "tail.ema_fraction=0.5", "tail.cycles=2", "tail.tail=1").run("tail", 4)
    one = trajectory.Trajectory(run, 0, text)
    averaged = []
    while one.cycle < run.cycles:
        one.train_step()
        if one.at_end_of_cycle:
            averaged.append(one.average)
            one.next_cycle()
            assert one.average is None
    assert all(averaged)


def test_average_covers_the_last_part_of_the_cycle(text, tmp_path):
    run = tiny_study(0, "ensemble.ema_fraction=0.34", "ensemble.ema_decay=0.5").run("ensemble", 2)
    run = with_runtime(run, keep_weights=True)
    one = trajectory.Trajectory(run, 0, text)
    weights = []
    for _ in range(9):
        one.train_step()
        weights.append(one.model.head.weight.detach().clone())
    expected = 0.25 * weights[5] + 0.25 * weights[6] + 0.5 * weights[7]
    expected = 0.5 * expected + 0.5 * weights[8]
    assert one.average is not None
    torch.testing.assert_close(one.average["head.weight"], expected)


def test_micro_batches_change_nothing_but_rounding(text, tmp_path):
    run = tiny_study(0, "study.precision=fp32", "methods.dropout=0").run("q0", 4)
    whole = trained(run, text, tmp_path / "whole")
    parts = trained(with_runtime(run, micro_batch=3), text, tmp_path / "parts")
    np.testing.assert_allclose(whole.members.test_loss, parts.members.test_loss, atol=2e-3)


def test_directory_of_another_config_is_refused_by_name(uninterrupted, text):
    _, _, folder = uninterrupted
    population.open_directory(tiny_study().run("q0", 6), folder, text)
    changed = tiny_study(0, "q0.lr_floor=0.1").run("q0", 8)
    with pytest.raises(ValueError, match=r"method\.lr_floor is 0\.08 there and 0\.1 here"):
        train.train_population(changed, text, directory=folder, progress=False)


def test_a_changed_text_is_refused_and_nothing_is_touched(text, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(some_messages().read_text(encoding="utf-8"), encoding="utf-8")
    run = tiny_study(0, f"corpus.source={path}").run("q0", 2)
    folder = tmp_path / "run"
    mine = corpus.load(run.corpus, tmp_path / "cache")
    train.train_population(run, mine, directory=folder, progress=False)
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join(reversed(lines)), encoding="utf-8")
    other = corpus.load(run.corpus, tmp_path / "cache")
    for epochs in (2, 4):
        longer = tiny_study(0, f"corpus.source={path}").run("q0", epochs)
        with pytest.raises(ValueError, match=r"another text \(its source has changed\): fitness"):
            train.train_population(longer, other, directory=folder, progress=False)
    assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before


def test_a_failed_save_leaves_the_last_good_state(uninterrupted, text, tmp_path, monkeypatch):
    run, whole, _ = uninterrupted
    with pytest.raises(train.Stopped):
        trained(run, text, tmp_path, 5)
    save = torch.save

    def full_disk(state, path):
        path.write_bytes(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left to write"):
        trained(run, text, tmp_path, 3)
    monkeypatch.setattr(torch, "save", save)
    assert same(trained(run, text, tmp_path), whole)
    assert not [p for p in (tmp_path / "t00").iterdir() if p.name.startswith(".checkpoint")]


def test_a_damaged_checkpoint_is_named(text, tmp_path):
    run = tiny_study().run("q0", 4)
    with pytest.raises(train.Stopped):
        trained(run, text, tmp_path, 3)
    path = tmp_path / "t00" / "checkpoint.pt"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content, words in (
        (b"nonsense", "cannot be read"), (whole[:-100], "cannot be read"),
        (flipped, "is not what was written there"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"checkpoint\.pt {words}.*delete it and rerun"):
            trained(run, text, tmp_path)


@pytest.mark.parametrize("broken", ["loss", "gradient", "snapshot"])
def test_numbers_that_are_not_finite_are_an_error_and_leave_no_member(
    text, tmp_path, monkeypatch, broken
):
    run = tiny_study().run("q0", 2)
    if broken == "loss":
        initialise = GPT.initialise

        def spoiled(self, generator):
            with torch.no_grad():
                initialise(self, generator).embedding.weight.fill_(float("nan"))
            return self

        monkeypatch.setattr(GPT, "initialise", spoiled)
    elif broken == "gradient":
        backward = trajectory.Trajectory._backward

        def spoiled(self, *args):
            loss = backward(self, *args)
            if self.step == 8:  # the last step of the cycle
                self.model.head.weight.grad[0, 0] = float("inf")
            return loss

        monkeypatch.setattr(trajectory.Trajectory, "_backward", spoiled)
    else:
        monkeypatch.setattr(
            evaluate, "held_out_log_probs", lambda *args: torch.tensor([0.0, float("nan")])
        )
    with pytest.raises(FloatingPointError, match=r"not finite|training loss is"):
        trained(run, text, tmp_path)
    assert not population.member_path(tmp_path, 0, 0).exists()


def test_perturbation_has_its_size_on_every_tensor_and_repeats(text, tmp_path):
    run = tiny_study(0, "q0.perturb_start=0.3", "model.width=64").run("q0", 4)
    shaken = []
    for _ in range(2):
        one = trajectory.Trajectory(run, 0, text)
        before = {name: value.detach().clone() for name, value in one.model.named_parameters()}
        one.cycle = 1
        one.perturb()
        shaken.append({name: value - before[name] for name, value in one.model.named_parameters()})
    for name, change in shaken[0].items():
        assert torch.equal(change, shaken[1][name])
        expected = 0.3 * before[name].std(correction=0)
        if before[name].numel() > 2000:
            assert float(change.detach().std()) == pytest.approx(float(expected), rel=0.08), name
        elif expected == 0:
            assert not change.any()


def test_training_loss_with_teacher_and_multi_token_is_the_papers(text, tmp_path):
    overrides = ("model.multi_token=true", "study.precision=fp32", "methods.dropout=0",
                 "q0.distill_after=0", "q0.multi_token_weight=0.3")  # fmt: skip
    run = tiny_study(0, *overrides).run("q0", 2)
    one = trajectory.Trajectory(run, 0, text)
    other = trajectory.Trajectory(tiny_study(1, *overrides).run("q0", 2), 0, text)
    for each in (one, other):
        with torch.no_grad():
            for parameter in each.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(3)))
    one.newest = distill.Teacher([other.model])
    block = torch.from_numpy(one.stream.rows(0, 4))
    one._backward(block, 0, 4 * 32, True)
    got = {name: p.grad.clone() for name, p in one.model.named_parameters() if p.grad is not None}
    one.model.zero_grad()

    def logits(model, hidden):
        return 15 * torch.tanh(model.head(hidden) / 15)

    inputs, following = block[:, :-1], block[:, 1:]
    hidden = one.model(inputs)
    student = logits(one.model, hidden).flatten(0, 1)
    ce = F.cross_entropy(student, following.flatten())
    ahead = logits(one.model, one.model.forward_next(hidden, following))[:, :-1]
    extra = F.cross_entropy(ahead.flatten(0, 1), following[:, 1:].flatten(), reduction="sum")
    with torch.no_grad():
        taught = (logits(other.model, other.model(inputs)).flatten(0, 1) / 1.2).log_softmax(-1)
    kl = F.kl_div((student / 1.2).log_softmax(-1), taught, log_target=True, reduction="batchmean")
    loss = 0.55 * (ce + 0.3 * extra / 128) + 0.45 * 1.2**2 * kl
    loss.backward()
    for name, parameter in one.model.named_parameters():
        if name in got:
            torch.testing.assert_close(got[name], parameter.grad, rtol=2e-3, atol=2e-6)


def test_layers_loop_from_the_fraction_asked_for(text, tmp_path):
    run = tiny_study(0, "model.loop_end=1", "model.loop_passes=3", "ensemble.loop_from=0.5").run(
        "ensemble", 2
    )
    one = trajectory.Trajectory(run, 0, text)
    spent = []
    for _ in range(9):
        one.train_step()
        spent.append(one.spent["flops"])
    per_step = np.diff([0.0, *spent])
    assert len(set(per_step[:5])) == 1, "steps 0 .. 4 are the first half of nine"
    assert len(set(per_step[5:])) == 1
    assert per_step[5] > 1.2 * per_step[4]


def test_unknown_device_is_refused_before_anything_is_written(text, tmp_path):
    run = with_runtime(tiny_study().run("q0", 2), device="gpu")
    with pytest.raises(ValueError, match=r"runtime\.device must be auto, cpu, .* got 'gpu'"):
        train.train_population(run, text, directory=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_going_on_under_other_settings_warns(text, tmp_path):
    run = tiny_study().run("q0", 4)
    with pytest.raises(train.Stopped):
        trained(run, text, tmp_path, 3)
    with pytest.warns(UserWarning, match="micro_batch 2.*was begun under.*micro_batch 0"):
        trained(with_runtime(run, micro_batch=2), text, tmp_path)


def test_threads_and_signal_handlers_are_given_back(text, tmp_path):
    before = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    run = with_runtime(tiny_study().run("q0", 2), threads=2)
    train.train_population(run, text, directory=tmp_path, progress=False)
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGTERM)) == before


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import tiny
tiny.some_messages = lambda: sys.argv[2]
from pathlib import Path
from q0lib import corpus, train
study = tiny.tiny_study()
text = corpus.load(study.corpus, Path(sys.argv[3]) / "cache")
train.train_population(study.run("q0", 400), text, directory=Path(sys.argv[3]) / "run")
"""


def test_sigterm_saves_and_leaves_and_the_next_call_goes_on(text, tmp_path):
    here = os.path.dirname(__file__)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, here, str(some_messages()), str(tmp_path)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started = time.monotonic()
    while not population.member_path(tmp_path / "run", 0, 1).exists():
        assert child.poll() is None
        assert time.monotonic() - started < 60
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "training was stopped and saved" in errors
    assert not (tmp_path / "run" / "result.json").exists()
    state = torch.load(tmp_path / "run" / "t00" / "checkpoint.pt", weights_only=True)
    reached = state["cycle"] + 1
    run = tiny_study().run("q0", 2 * reached)
    resumed = train.train_population(run, text, directory=tmp_path / "run", progress=False)
    whole = train.train_population(run, text, directory=tmp_path / "w", progress=False)
    assert same(resumed, whole)


def test_a_teacher_kept_from_the_start(text, tmp_path):
    """Refreshing every second cycle: cycles 1 and 2 share the first snapshot as their teacher."""
    run = tiny_study(0, "q0.teacher_every=2").run("q0", 8)
    one = trajectory.Trajectory(run, 0, text)
    teachers = []
    while one.cycle < 4:
        one.train_step()
        if one.at_end_of_cycle:
            teachers.append(one.teacher)
            one.next_cycle()
    assert teachers[0] is None
    assert teachers[1] is teachers[2]
    assert teachers[3] is not teachers[2]


@pytest.mark.filterwarnings("ignore:.*mixes members")
def test_members_of_other_code_are_refused_unless_asked_for(text, tmp_path, monkeypatch):
    """As when schedule.py is edited, or another commit checked out, under a run."""
    trained(tiny_study().run("q0", 2), text, tmp_path)
    other = {**provenance.code(), "schedule": "00000000"}
    monkeypatch.setattr(provenance, "code", lambda: other)
    again = {"directory": tmp_path, "progress": False}
    same_extent = train.train_population(tiny_study().run("q0", 2), text, **again)
    assert len(same_extent) == 1, "what is complete is read by any code"
    longer = tiny_study().run("q0", 4)
    with pytest.raises(ValueError, match=r"trained, by other code in q0lib/schedule\.py: go back"):
        train.train_population(longer, text, **again)
    with pytest.warns(UserWarning, match="members of both will be mixed"):
        mixed = train.train_population(with_runtime(longer, other_code=True), text, **again)
    assert len(mixed) == 2
    with pytest.warns(UserWarning, match="mixes members that different code has trained"):
        population.load(longer, tmp_path)


def test_what_code_says_of_itself_does_not_count_and_what_it_does_counts():
    source = '"""Doc."""\n\n# why\ndef rate(step):\n    """One line."""\n    return 0.5 * step\n'
    explained = source.replace("One line", "Another").replace("# why", "# because")
    assert provenance._code_hash(explained) == provenance._code_hash(source)
    assert provenance._code_hash(source.replace("0.5", "0.25")) != provenance._code_hash(source)


def test_processes_share_the_trajectories_of_a_run(text, tmp_path, monkeypatch):
    """While another process holds trajectory 0 the others are trained; then it is waited for."""
    run = tiny_study().run("ensemble", 6)
    order = []
    train_one = train.train_trajectory

    def noted(run, index, *others):
        order.append(index)
        train_one(run, index, *others)

    monkeypatch.setattr(train, "train_trajectory", noted)
    held = population.trajectory_path(tmp_path, 0)
    held.mkdir()
    theirs = FileLock(held / ".lock")
    theirs.acquire()

    def release_when_it_is_all_that_is_left(message):
        assert order == [1, 2]
        assert "waiting for another process" in message
        theirs.release()

    monkeypatch.setattr(tqdm, "write", release_when_it_is_all_that_is_left)
    shared = train.train_population(run, text, directory=tmp_path, progress=False)
    assert order == [1, 2, 0]
    assert same(shared, trained(run, text, tmp_path / "alone"))


def test_a_checkpoint_of_other_code_is_refused_too(text, tmp_path, monkeypatch):
    run = tiny_study().run("ensemble", 2)
    with pytest.raises(train.Stopped):
        trained(run, text, tmp_path, 3)
    monkeypatch.setattr(provenance, "code", lambda: {"optim": "00000000"})
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt holds what commit .* other code in q0lib/"
    ):
        trained(run, text, tmp_path)


def test_a_stop_is_heard_while_waiting_and_a_switched_off_signal_is_left_alone(tmp_path):
    held = FileLock(tmp_path / ".lock")
    held.acquire()
    with pytest.raises(train.Stopped), runtime.locked(tmp_path, stop_requested=lambda: True):
        pass
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with runtime.stop_requests():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


def test_a_trajectory_trained_alone_is_the_one_that_the_population_has(text, tmp_path):
    run = tiny_study().run("ensemble", 4)
    assert run.trajectories == 2
    apart, together = tmp_path / "apart", tmp_path / "together"
    for index in (1, 0):
        train.train_members(run, text, directory=apart, only=[index], progress=False)
        assert not population.is_complete(run, apart), "it is declared by whoever asks for all"
        assert population.has_member(run, apart, index, run.cycles - 1)
        assert population.has_member(run, apart, 0, 0) == (index == 0)
    kept = population.member_path(apart, 0, 0).stat().st_ino
    ours = train.train_population(run, text, directory=apart, progress=False)
    assert population.member_path(apart, 0, 0).stat().st_ino == kept
    theirs = train.train_population(run, text, directory=together, progress=False)
    for split, rows in theirs.P.items():
        np.testing.assert_array_equal(ours.P[split], rows)


@pytest.mark.parametrize(
    ("method", "only", "words"),
    [
        ("ensemble", [2], r"only must be of 2 trajectories, got \[2\]"),
        ("distilled_ensemble", [1], r"distilled_ensemble are trained in order, got only \[1\]"),
    ],
)
def test_trajectories_that_cannot_be_trained_alone_are_refused(method, only, words, text, tmp_path):
    with pytest.raises(ValueError, match=words):
        train.train_members(
            tiny_study().run(method, 4), text, directory=tmp_path / "run", only=only
        )
    assert not (tmp_path / "run").exists()
