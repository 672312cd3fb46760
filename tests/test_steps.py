"""What a step trains on, and what a snapshot is: each against its definition, step by step."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_study, with_runtime

from q0lib import corpus, optim, population, schedule
from q0lib.model import GPT
from q0lib.train import train_population
from q0lib.trajectory import Trajectory


def train(run, text, directory):
    return train_population(run, text, directory=directory, progress=False)


@pytest.fixture
def live(monkeypatch):
    """The weights of the head after every step, in the order in which steps are taken."""
    weights = []
    step = Trajectory.train_step

    def recorded(one):
        loss = step(one)
        weights.append(one.model.head.weight.detach().clone())
        return loss

    monkeypatch.setattr(Trajectory, "train_step", recorded)
    return weights


@pytest.mark.parametrize("decay", [0.9, 0.2])
def test_a_snapshot_is_the_average_of_the_end_of_its_own_cycle(text, tmp_path, live, decay):
    changes = "q0.ema_fraction=0.34", f"q0.ema_decay={decay}"
    run = with_runtime(tiny_study(0, *changes).run("q0", 4), keep_weights=True)
    train(run, text, tmp_path)
    assert len(live) == 18
    for cycle in (0, 1):
        first, *later = live[9 * cycle :][5:9]  # the last third of nine steps
        for weights in later:
            first = decay * first + (1 - decay) * weights
        kept = population.read_weights(population.weights_path(tmp_path, 0, cycle))
        torch.testing.assert_close(kept["head.weight"], first)


def test_every_split_has_the_probabilities_of_its_own_tokens(text, tmp_path):
    changes = "study.precision=fp32", "q0.ema_fraction=0.5", "methods.dropout=0.3"
    run = with_runtime(tiny_study(0, *changes).run("q0", 4), keep_weights=True)
    trained = train(run, text, tmp_path)
    for cycle in (0, 1):
        net = GPT(run.model).eval()
        net.load_state_dict(population.read_weights(trained.weights_path(cycle)))
        for split in corpus.HELD_OUT:
            count = corpus.held_out_rows(text[split].tokens, 32) * 32
            tokens = torch.from_numpy(text[split].tokens[: count + 1].astype(np.int64))
            with torch.no_grad():
                logits = 15 * torch.tanh(net.head(net(tokens[:-1].view(-1, 32))) / 15)
            nll = F.cross_entropy(logits.flatten(0, 1), tokens[1:], reduction="none").numpy()
            np.testing.assert_allclose(-np.log(trained.P[split][cycle]), nll, atol=1e-4)
            loss = trained.members[f"{split}_loss"][cycle]
            assert loss == pytest.approx(float(nll.mean()), abs=1e-5)
            assert np.array_equal(trained.documents[split], text[split].document_ids(32))


def test_a_member_is_taught_by_the_one_before_it(text, tmp_path):
    """The third of three, with the first or the second replaced by the other."""
    run = tiny_study().run("distilled_ensemble", 6)
    whole = train(run, text, tmp_path / "whole")
    for given, same in (((1, 1), True), ((0, 0), False)):
        folder = tmp_path / str(given[0])
        shutil.copytree(tmp_path / "whole", folder)
        (folder / "result.json").unlink()
        shutil.rmtree(folder / "t02")
        for index, source in enumerate(given):
            shutil.copy(
                population.weights_path(tmp_path / "whole", source, 0),
                population.weights_path(folder, index, 0),
            )
        again = train(run, text, folder)
        assert np.array_equal(again.P["test"][2], whole.P["test"][2]) is same


@pytest.mark.parametrize("mode", ["anti", "in_phase", "flat"])
def test_weight_decay_follows_its_schedule(text, tmp_path, monkeypatch, mode):
    seen = []
    scale = optim.scale

    def recorded(optimizers, *multipliers):
        scale(optimizers, *multipliers)
        seen.append(optimizers[0].param_groups[0]["weight_decay"])

    monkeypatch.setattr(optim, "scale", recorded)
    run = tiny_study(0, f"q0.wd_schedule={mode}", "q0.wd_floor=0.6").run("q0", 2)
    train(run, text, tmp_path)
    expected = [schedule.wd_multiplier(step, 9, 0.08, 0.6, mode) for step in range(1, 10)]
    assert seen == pytest.approx(run.method.weight_decay * np.array(expected))


@pytest.fixture
def rows(monkeypatch):
    """The training rows, a block a step."""
    blocks = []
    read = corpus.EpochStream.rows

    def recorded(stream, first, count):
        blocks.append(read(stream, first, count))
        return blocks[-1]

    monkeypatch.setattr(corpus.EpochStream, "rows", recorded)
    return blocks


def test_every_seed_and_trajectory_has_its_own_start_and_its_own_order(text, tmp_path, rows):
    starts, orders = [], []
    for seed, index in ((0, 0), (0, 1), (1, 0)):
        run = tiny_study(seed, "q0.trajectories=2").run("q0", 4)
        one = Trajectory(run, index, text)
        starts.append(one.model.head.weight.detach().clone())
        one.train_step()
        orders.append(rows[-1])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(starts[a], starts[b])
        assert not np.array_equal(orders[a], orders[b])


def test_training_reads_training_text_all_of_it_and_nothing_else(text, tmp_path, rows):
    train(tiny_study().run("q0", 4), text, tmp_path)
    epoch = 1200 // 33
    seen = np.concatenate(rows)
    assert 4 * epoch - 4 <= len(seen) <= 4 * epoch + 4, "four epochs, to the nearest batch"
    whole = np.bincount(text["train"].tokens, minlength=300)
    for number in range(3):
        once = np.bincount(seen[number * epoch : (number + 1) * epoch].ravel(), minlength=300)
        assert (once <= whole).all(), "an epoch reads no token more often than it is there"
    documents = [np.split(split.tokens, split.starts[1:]) for split in text.splits.values()]
    texts = [{part.tobytes() for part in parts[:-1]} for parts in documents]  # the last is cut
    assert sum(map(len, texts)) == len(set().union(*texts)), "no document is in two splits"


def test_every_step_drops_other_units(text, tmp_path, monkeypatch):
    """Else the same units are dropped all the way, and a resumed run could not tell."""
    seeds = []
    seed = torch.manual_seed
    monkeypatch.setattr(
        torch, "manual_seed", lambda number: (seeds.append(number), seed(number))[1]
    )
    train(tiny_study(0, "q0.trajectories=2").run("q0", 8), text, tmp_path)
    assert len(set(seeds)) == len(seeds) == 36
