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
from conftest import some_messages, tiny_study, with_runtime
from safetensors.torch import load_file

from q0lib import corpus, optim, population, trajectory
from q0lib.model import GPT

HELD_OUT = corpus.HELD_OUT


def train(run, text, directory, stop_at=None):
    """Train, stopping after so many steps of this call; returns whether it ran to the end."""
    calls = itertools.count(1)
    from tqdm import tqdm

    for index in range(run.trajectories):
        one = trajectory.Trajectory(run, index, text, directory)
        one.train(run.cycles, lambda: next(calls) == stop_at, tqdm(disable=True))
    population.write_documents(directory, text, run.model.context)
    population.write_result(run, directory)
    return population.load(run, directory)


def same(one: population.Population, two: population.Population) -> bool:
    clocks = ["train_seconds", "wall_seconds"]
    return all(np.array_equal(one.P[split], two.P[split]) for split in HELD_OUT) and (
        one.members.drop(columns=clocks).equals(two.members.drop(columns=clocks))
    )


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    run = tiny_study().run("q0", 6)
    folder = tmp_path_factory.mktemp("whole")
    return run, train(run, text, folder), folder


# A cycle is 9 steps, an epoch 4.5: mid-epoch, mid-cycle, the last step of a cycle, the first
# after a boundary, and with a teacher in place.
@pytest.mark.parametrize("stop_at", [2, 5, 9, 10, 19, 20])
def test_resume_is_bit_exact_wherever_it_stopped(uninterrupted, text, tmp_path, stop_at):
    run, whole, folder = uninterrupted
    assert trajectory.steps_of(run, text, 0) == 9
    with pytest.raises(trajectory.Stopped):
        train(run, text, tmp_path, stop_at)
    assert same(train(run, text, tmp_path), whole)
    states = [torch.load(at / "t00" / "checkpoint.pt", weights_only=True)["model"]
              for at in (folder, tmp_path)]  # fmt: skip
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_longer_run_begins_with_the_shorter_one(uninterrupted, text, tmp_path):
    run, whole, _ = uninterrupted
    short = tiny_study().run("q0", 2)
    first = train(short, text, tmp_path)
    assert same(whole.prefix(1, 1), first)
    assert same(train(run, text, tmp_path), whole)
    assert population.completed(tmp_path) == (1, 3)
    again = trajectory.train_population(short, text, directory=tmp_path, progress=False)
    assert same(again, first)
    assert population.completed(tmp_path) == (1, 3), "the longer result stays"


def test_a_lost_member_is_trained_again(uninterrupted, text, tmp_path):
    run, whole, _ = uninterrupted
    train(run, text, tmp_path)
    population.member_path(tmp_path, 0, 1).unlink()
    assert same(train(run, text, tmp_path), whole)


def test_members_differ_and_the_first_two_of_three_are_the_two(text, tmp_path):
    study = tiny_study(0, "q0.trajectories=2")
    two = train(study.run("q0", 4), text, tmp_path / "two")
    three = train(tiny_study(0, "q0.trajectories=3").run("q0", 6), text, tmp_path / "three")
    assert two.run.key == three.run.key
    assert same(three.prefix(2, 1), two)
    rows = three.P["test"]
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(rows, 2))


def test_seed_decides(uninterrupted, text, tmp_path):
    other = train(tiny_study(1).run("q0", 2), text, tmp_path)
    assert not np.array_equal(other.P["test"][0], uninterrupted[1].P["test"][0])


def test_snapshot_is_taken_at_the_floor_before_the_perturbation(text, tmp_path, monkeypatch):
    seen = []
    scale = optim.scale
    monkeypatch.setattr(optim, "scale", lambda o, lr, wd: (seen.append((lr, wd)), scale(o, lr, wd)))
    run = with_runtime(tiny_study().run("q0", 4), keep_weights=True)
    train(run, text, tmp_path)
    assert seen[8] == seen[17] == pytest.approx((0.08, 1.0)), "a cycle ends at its floor"
    assert seen[9] == seen[0]
    assert len({lr for lr, _ in seen[:9]}) == 9, "the rate moves with every step"
    kept = load_file(population.weights_path(tmp_path, 0, 1))
    live = torch.load(tmp_path / "t00" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(kept[name], live[name]) for name in live)
    assert sorted(kept) == sorted(name for name, _ in GPT(run.model).named_parameters())


def test_recorded_loss_is_pure_cross_entropy_of_the_kept_weights(text, tmp_path):
    run = with_runtime(tiny_study(0, "study.precision=fp32").run("q0", 4), keep_weights=True)
    trained = train(run, text, tmp_path)
    net = GPT(run.model).eval()
    net.load_state_dict(load_file(population.weights_path(tmp_path, 0, 1)), strict=True)
    rows = corpus.held_out_rows(text["test"].tokens, 32)
    tokens = torch.from_numpy(corpus.held_out(text["test"], 32, 0, rows))
    with torch.no_grad():
        logits = 15 * torch.tanh(net.head(net(tokens[:, :-1])) / 15)
    nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert trained.members.test_loss[1] == pytest.approx(float(nll.mean()), abs=1e-5)
    np.testing.assert_allclose(-np.log(trained.P["test"][1]), nll.numpy(), atol=1e-4)


def test_distillation_starts_when_it_should_and_is_counted(uninterrupted, text):
    _, whole, _ = uninterrupted
    flops = whole.members.flops.diff().fillna(whole.members.flops)
    assert flops[1] / flops[0] == pytest.approx(4 / 3), "one teacher pass beside three of training"
    assert flops[2] == pytest.approx(flops[1])
    assert whole.members.tokens.tolist() == [9 * 256, 18 * 256, 27 * 256]
    assert whole.flops == whole.members.flops.max()


def test_ensemble_members_are_independent_and_distilled_ones_are_not(text, tmp_path):
    study = tiny_study()
    plain = train(study.run("ensemble", 4), text, tmp_path / "plain")
    taught = train(study.run("distilled_ensemble", 4), text, tmp_path / "taught")
    assert np.array_equal(plain.P["test"][0], taught.P["test"][0]), "the first has no teacher"
    assert not np.array_equal(plain.P["test"][1], taught.P["test"][1])
    assert taught.members.flops[1] > plain.members.flops[1]
    assert not list((tmp_path / "plain").glob("*/checkpoint.pt")), "no longer run goes on from it"


def test_average_covers_the_last_part_of_the_cycle(text, tmp_path):
    run = tiny_study(0, "ensemble.ema_fraction=0.34", "ensemble.ema_decay=0.5").run("ensemble", 2)
    run = with_runtime(run, keep_weights=True)
    one = trajectory.Trajectory(run, 0, text, tmp_path)
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
    whole = train(run, text, tmp_path / "whole")
    parts = train(with_runtime(run, micro_batch=3), text, tmp_path / "parts")
    np.testing.assert_allclose(whole.members.test_loss, parts.members.test_loss, atol=2e-3)


def test_directory_of_another_config_is_refused_by_name(uninterrupted, text):
    _, _, folder = uninterrupted
    population.open_directory(tiny_study().run("q0", 6), folder)
    changed = tiny_study(0, "q0.lr_floor=0.1").run("q0", 8)
    with pytest.raises(ValueError, match=r"method\.lr_floor is 0\.08 there and 0\.1 here"):
        trajectory.train_population(changed, text, directory=folder, progress=False)


def test_a_failed_save_leaves_the_last_good_state(uninterrupted, text, tmp_path, monkeypatch):
    run, whole, _ = uninterrupted
    with pytest.raises(trajectory.Stopped):
        train(run, text, tmp_path, 5)
    save = torch.save

    def full_disk(state, path):
        path.write_bytes(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left to write"):
        train(run, text, tmp_path, 3)
    monkeypatch.setattr(torch, "save", save)
    assert same(train(run, text, tmp_path), whole)
    assert not [p for p in (tmp_path / "t00").iterdir() if p.name.startswith(".checkpoint")]


def test_a_damaged_checkpoint_is_named(text, tmp_path):
    run = tiny_study().run("q0", 4)
    with pytest.raises(trajectory.Stopped):
        train(run, text, tmp_path, 3)
    (tmp_path / "t00" / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be read .*delete it and rerun"):
        train(run, text, tmp_path)


def test_an_infinite_loss_is_an_error(text, tmp_path, monkeypatch):
    one = trajectory.Trajectory(tiny_study().run("q0", 2), 0, text, tmp_path)
    with torch.no_grad():
        one.model.embedding.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="training loss is nan at step 0 of cycle 0"):
        one.train_step()


def test_threads_and_signal_handlers_are_given_back(text, tmp_path):
    before = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    run = with_runtime(tiny_study().run("q0", 2), threads=2)
    trajectory.train_population(run, text, directory=tmp_path, progress=False)
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGTERM)) == before


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest
conftest.some_messages = lambda: sys.argv[2]
from pathlib import Path
from q0lib import corpus, trajectory
study = conftest.tiny_study()
text = corpus.load(study.corpus, Path(sys.argv[3]) / "cache")
trajectory.train_population(study.run("q0", 400), text, directory=Path(sys.argv[3]) / "run")
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
    resumed = trajectory.train_population(run, text, directory=tmp_path / "run", progress=False)
    whole = trajectory.train_population(run, text, directory=tmp_path / "w", progress=False)
    assert same(resumed, whole)


def test_a_teacher_kept_from_the_start(text, tmp_path):
    """Refreshing every second cycle: cycles 1 and 2 share the first snapshot as their teacher."""
    run = tiny_study(0, "q0.teacher_every=2").run("q0", 8)
    one = trajectory.Trajectory(run, 0, text, tmp_path)
    teachers = []
    leave = one._leave_member
    one._leave_member = lambda: (teachers.append(one.teacher), leave())
    from tqdm import tqdm

    one.train(4, lambda: False, tqdm(disable=True))
    assert teachers[0] is None
    assert teachers[1] is teachers[2]
    assert teachers[3] is not teachers[2]
