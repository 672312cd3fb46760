"""Several ranks: one process's bits, stopped together, ended together, gone on with at will."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import some_messages, tiny_overrides, tiny_study, with_runtime
from torch import nn

from q0lib import corpus, paths, population, ranks, runtime, train

# Dropout, a teacher, noise between cycles, the token after next; averages and two trajectories.
CHANGES = ("q0.distill_after=1", "methods.dropout=0.1", "ensemble.ema_fraction=0.5",
           "model.multi_token=true", "distilled_ensemble.dropout=0")  # fmt: skip
JOBS = {  # method, epochs, runtime
    "q0": ("q0", 4, {"micro_batch": 2}),
    "ensemble": ("ensemble", 4, {"micro_batch": 2}),
    "distilled_ensemble": ("distilled_ensemble", 4, {"micro_batch": 2}),
    "uneven": ("q0", 2, {"micro_batch": 3}),  # 8 rows: 3, 3 and 2
    "fast": ("q0", 2, {"micro_batch": 2, "reduce": "all_reduce"}),
}
WORKER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import tiny
tiny.some_messages = lambda: sys.argv[2]
from pathlib import Path
import test_ranks
from q0lib import corpus, ranks, train
out, rank = Path(sys.argv[3]), int(sys.argv[4])
for world, port, names in json.loads(sys.argv[5]):
    if rank >= world:
        continue
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    with ranks.joined("cpu"):
        for name in names:
            run = test_ranks.run_of(name)
            text = corpus.load(run.corpus, out / "cache")
            train.train_population(run, text, directory=out / f"{name}-{world}", progress=False)
"""


def run_of(name):
    method, epochs, how = JOBS[name]
    return with_runtime(tiny_study(0, *CHANGES).run(method, epochs), keep_weights=True, **how)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A folder of each job trained by 2, 3 or 4 ranks, and alone."""
    out = tmp_path_factory.mktemp("ranks")
    whole = ["q0", "ensemble", "distilled_ensemble"]
    groups = [(4, free_port(), whole), (2, free_port(), [*whole, "uneven", "fast"])]
    corpus.load(tiny_study(0, *CHANGES).corpus, out / "cache")
    here = os.path.dirname(__file__)
    children = [
        subprocess.Popen([sys.executable, "-c", WORKER, here, str(some_messages()), str(out),
                          str(rank), json.dumps(groups)])
        for rank in range(4)
    ]  # fmt: skip
    for name in JOBS:
        run = run_of(name)
        train.train_population(run, text, directory=out / f"{name}-1", progress=False)
    assert [child.wait(timeout=100) for child in children] == [0] * 4
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of every member, by file and name."""
    return {
        f"{path.parent.name}/{path.name} {name}": value
        for path in sorted(folder.glob("t*/*.weights.safetensors"))
        for name, value in population.read_weights(path).items()
    }


@pytest.mark.parametrize(
    ("name", "world"),
    [*((name, world) for name in ("q0", "ensemble", "distilled_ensemble") for world in (2, 4)),
     ("uneven", 2)],
)  # fmt: skip
def test_ordered_sums_give_the_bits_of_one_process(trained, name, world):
    alone, together = weights(trained / f"{name}-1"), weights(trained / f"{name}-{world}")
    assert alone
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[each], together[each]) for each in alone)
    one, many = (population.load(run_of(name), trained / f"{name}-{count}") for count in (1, world))
    for split in corpus.HELD_OUT:
        assert np.array_equal(one.P[split], many.P[split])
    same = ["epochs", "steps", "tokens", "flops", "train_loss", "test_loss", "runtime"]
    assert one.members[same].equals(many.members[same]), "and nothing warns when they take turns"
    assert set(many.members.ranks) == {world}
    assert "ranks" not in one.members


def test_all_reduce_differs_in_last_bits_alone_and_says_so(trained):
    one, many = (population.load(run_of("fast"), trained / f"fast-{count}") for count in (1, 2))
    np.testing.assert_allclose(one.members.test_loss, many.members.test_loss, atol=2e-3)
    assert many.members.runtime[0] == one.members.runtime[0] + ", ranks 2 all_reduce"


def test_every_micro_batch_drops_other_units_and_the_first_those_of_always(text, monkeypatch):
    seeds = []
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda n: (seeds.append(n), seed(n))[1])
    run = tiny_study().run("q0", 2)
    for size in (0, 2):
        train.Trajectory(with_runtime(run, micro_batch=size), 0, text).train_step()
    assert len(seeds) == 1 + 4
    assert seeds[0] == seeds[1], "a batch that is passed whole keeps its draws"
    assert len(set(seeds[1:])) == 4
    # What the first step of trajectory 0, seed 0, has drawn from since the first committed number.
    words = np.random.SeedSequence([0, 0, 2, 0]).generate_state(1, np.uint64)
    assert seeds[0] == int(words[0] >> 1)


def test_alone_nothing_is_exchanged(text):
    model = nn.Linear(3, 2)
    gradients = ranks.Gradients(model, 3, "ordered")
    for number in gradients.mine():
        (model(torch.ones(1, 3)).sum() * (number + 1)).backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 6.0))
    assert (ranks.rank(), ranks.count(), ranks.everyones("a")) == (0, 1, ["a"])
    assert ranks.in_order([1, 2]) == [1, 2]
    assert ranks.record(tiny_study().runtime) == {}


def test_things_are_dealt_in_turn_and_come_back_in_order(monkeypatch):
    parts = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(ranks, "count", lambda: 3)
        parts.append(list(ranks.dealt(range(7))))
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]
    monkeypatch.setattr(ranks, "everyones", lambda mine: parts)
    assert ranks.in_order(parts[0]) == list(range(7))


def test_what_ranks_cannot_share_is_refused_in_a_sentence(monkeypatch):
    how = with_runtime(tiny_study().run("q0", 2), micro_batch=4).runtime
    monkeypatch.setattr(ranks, "count", lambda: 4)
    with pytest.raises(ValueError, match=r"4 ranks need .* got 2 in a batch of 8 rows: lower"):
        ranks.check(how, 8)
    whole = tiny_study().runtime
    assert ranks.micro_batch(whole, 10) == 2, "a quarter, rounded down"
    ranks.check(whole, 7)  # one each, for some a second
    monkeypatch.setattr(ranks, "everyones", lambda facts: [facts, {"text": "b"}])
    with pytest.raises(ValueError, match="same text: rank 0 has a, rank 1 b"):
        ranks.agree(text="a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match="must be auto, cpu or cuda, got cuda:1"),
        ranks.joined("cuda:1"),
    ):
        pass


# --- the command, under its own steam and under torchrun ----------------------------------------


def arguments(epochs: int, micro_batch: int = 2) -> list[str]:
    changes = [*tiny_overrides(), *CHANGES, f"runtime.micro_batch={micro_batch}",
               "runtime.checkpoint_seconds=0.5", "runtime.keep_weights=true"]  # fmt: skip
    sets = [word for change in changes for word in ("--set", change)]
    return ["-m", "q0lib.train", "--preset", "quick", "--epochs", str(epochs), *sets]


@contextlib.contextmanager
def started(root: Path, epochs: int):
    """Two ranks of the command, without torchrun: so that either can be hit."""
    port = str(free_port())
    children = [
        subprocess.Popen(
            [sys.executable, *arguments(epochs)], text=True,
            env=environment(root) | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port,
                                     "MASTER_ADDR": "127.0.0.1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def environment(root: Path) -> dict[str, str]:
    return os.environ | {"Q0_ROOT": str(root), "PYTHONPATH": str(paths.ROOT)}


def wait_for(path: Path, children) -> None:
    ends = time.monotonic() + 60
    while not path.exists():
        assert all(child.poll() is None for child in children), children[0].communicate()[1]
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_ranks_stop_together_end_together_and_go_on_in_any_number(text, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "data" / "runs")
    run = with_runtime(tiny_study(0, *CHANGES).run("q0", 400), micro_batch=2, keep_weights=True)
    folder = run.directory / "t00"
    with started(tmp_path, 400) as children:
        wait_for(folder / "c0000.safetensors", children)
        children[1].send_signal(signal.SIGTERM)  # to one of them
        said = [child.communicate(timeout=60) for child in children]
        assert [child.returncode for child in children] == [130, 130], said
        assert "stopped; what was finished" in said[0][0]
        assert said[1][0] == "", "rank 0 speaks for all"
    stopped = torch.load(folder / "checkpoint.pt", weights_only=True)
    with started(tmp_path, 400) as children:
        wait_for(folder / f"c{stopped['cycle'] + 1:04d}.safetensors", children)
        children[0].kill()
        hit = time.monotonic()
        _, errors = children[1].communicate(timeout=60)
        assert time.monotonic() - hit < 10, "it does not wait for the dead"
        assert children[1].returncode == 1
        assert len(errors.strip().splitlines()) == 1, errors
        assert "rank 1 of 2 has lost another one" in errors
    reached = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert reached["spent"]["steps"] >= stopped["spent"]["steps"]
    epochs = 2 * (stopped["cycle"] + 3)
    command = ["torchrun", "--standalone", "--nproc-per-node=2", *arguments(epochs)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        env=environment(tmp_path), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout
    run = with_runtime(tiny_study(0, *CHANGES).run("q0", epochs + 2), **vars(run.runtime))
    train.train_population(run, text, progress=False)  # and once more, alone
    train.train_population(run, text, directory=tmp_path / "whole", progress=False)
    one, two = weights(run.directory), weights(tmp_path / "whole")
    assert one.keys() >= two.keys()
    assert all(torch.equal(one[each], two[each]) for each in two)


def test_a_stop_is_heard_by_all_while_rank_0_waits_for_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    answers = iter([["held"], [False, True]])
    monkeypatch.setattr(ranks, "everyones", lambda value: next(answers))
    with ranks.locked(tmp_path) as ours:
        assert ours
    with pytest.raises(runtime.Stopped), ranks.locked(tmp_path):
        pass
