"""What a config accepts, what it refuses and in which words, and what a key depends on."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from q0lib import config, presets


def test_numbers_that_arrive_as_strings_are_cast_or_refused():
    assert config.Method(matrix_lr="1e-4").matrix_lr == 1e-4
    assert config.Method(horizon=np.int64(8)).horizon == 8
    assert type(config.Method(alpha=np.float32(0.5)).alpha) is float
    assert config.Runtime(compile="true").compile is True
    assert config.Corpus(source=Path("a b.txt")).source == "a b.txt"
    for wrong in ("fast", "nan", True, [0.1], float("inf")):
        with pytest.raises(ValueError, match=r"Method\.matrix_lr must be float"):
            config.Method(matrix_lr=wrong)
    with pytest.raises(ValueError, match=r"Model\.layers must be int, got 2\.5"):
        config.Model(layers=2.5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: presets.load("tiny"), r"unknown preset 'tiny', known: quick, cpu, gpu, paper"),
        (lambda: presets.load("quick", overrides=["q0.aplha=1"]), r"unknown field q0\.aplha"),
        (lambda: presets.load("quick", overrides=["q1.alpha=1"]), r"unknown section 'q1'"),
        (lambda: presets.load("quick", overrides=["alpha"]), r"section\.field=value"),
        (lambda: presets.load("quick", overrides=["q0.alpha=2"]), r"alpha must be between 0 and"),
        (lambda: presets.load("quick", seed=-1), r"seed must be >= 0, got -1"),
        (lambda: presets.load("quick").run("q9"), r"unknown method 'q9'"),
        (lambda: presets.load("quick").run("q0", 0), r"epochs must be > 0, got 0"),
        (lambda: presets.load("quick").run("q0", -4), r"epochs must be > 0, got -4"),
        (lambda: presets.load("quick").run("q0", 3), r"multiples of 2 epochs, got 3"),
        (lambda: config.Method(epochs_per_cycle=0), r"exactly one of trajectories, cycles"),
        (lambda: config.Method(epochs_per_cycle=-1), r"epochs_per_cycle must be >= 0, got -1"),
        (lambda: config.Method(temperature=0), r"temperature must be > 0, got 0"),
        (lambda: config.Method(mixture="mean"),
         r"mixture must be one of \('learned', 'uniform'\), got 'mean'"),
        (lambda: config.Method(tail=1.5), r"tail must be between 0 and 1, got 1\.5"),
        (lambda: config.Model(heads=3, width=64), r"heads must be such that"),
        (lambda: presets.load("quick", overrides="q0.alpha=1"), r"must be a list of section"),
        (lambda: presets.load("quick", overrides=["corpus.fitness_tokens=100"]),
         r"corpus\.fitness_tokens must be > model\.context \(128\), got 100"),
        (lambda: config.Corpus(vocab_size=100), r"vocab_size must be >= 257"),
        (lambda: presets.load("quick", overrides=["q0.batch_tokens=1000"]), r"whole sequences"),
        (lambda: presets.load("quick", overrides=["model.vocab_size=999"]), r"must be >= corp"),
    ],
)  # fmt: skip
def test_bad_values_get_one_clear_sentence(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_budget_resolves_the_open_size():
    study = presets.load("cpu")
    tau = study.methods["ensemble"].epochs_per_cycle
    q0, ensemble = study.run("q0", 64), study.run("ensemble", 4 * tau)
    single = study.run("single", 24)
    assert (q0.trajectories, q0.cycles) == (1, 32)
    assert (ensemble.trajectories, ensemble.cycles) == (4, 1)
    assert (single.trajectories, single.cycles, single.method.epochs_per_cycle) == (1, 1, 24)
    assert (q0.epochs, ensemble.epochs, single.epochs) == (64, 4 * tau, 24)


def test_key_names_what_decides_and_nothing_else():
    study = presets.load("cpu")
    key = study.run("q0", 64).key
    assert study.run("q0", 128).key == key, "a longer run contains the shorter one"
    untrained = ["runtime.threads=2", "runtime.keep_weights=true", "q0.mixture=uniform"]
    elsewhere = presets.load("cpu", overrides=untrained)
    assert elsewhere.run("q0", 64).key == key
    assert presets.load("cpu", seed=1).run("q0", 64).key != key
    for change in ("q0.alpha=0.4", "model.layers=5", "corpus.train_tokens=60000",
                   "study.precision=fp32"):  # fmt: skip
        assert presets.load("cpu", overrides=[change]).run("q0", 64).key != key, change
    assert study.run("single", 8).key != study.run("single", 16).key
    two, four = (presets.load("cpu", overrides=[f"tail.cycles={n}"]).run("tail", n) for n in (2, 4))
    assert two.method.epochs_per_cycle == four.method.epochs_per_cycle
    assert two.key != four.key, "a tail's snapshots stand elsewhere when there are more of them"


def test_keys_outlive_a_release():
    """Committed tables name runs by their keys: a field added at its default must not move them."""
    defaults = dataclasses.replace(
        presets.load("cpu"), corpus=config.Corpus(), methods={"q0": config.Method()}
    )
    assert defaults.run("q0", 64).key == "3cc0e36544a7"


KEYS = {  # of every method at a budget, today's presets
    ("quick", 64): {
        "q0": "75a350a2109f",
        "ensemble": "3065d30f9889",
        "distilled_ensemble": "c2d3b242ca89",
        "single": "896f39895723",
        "tail": "bf5546a5e7a4",
    },
    ("cpu", 64): {
        "q0": "7140a71de9da",
        "ensemble": "6ee0972dcc95",
        "single": "918bc98f56fd",
        "distilled_ensemble": "b4713d29d0d2",
        "tail": "24492e67460d",
    },
    ("gpu", 64): {
        "q0": "0b56a9e0246c",
        "ensemble": "5508d3a687e7",
        "distilled_ensemble": "11cd7e08d213",
        "single": "6bbec6b88b6d",
        "tail": "bdb5d7139706",
    },
    ("paper", 256): {
        "q0": "0eedbcb3b39a",
        "ensemble": "2360536d5d43",
        "distilled_ensemble": "63fec042167c",
        "single": "50401ceca171",
        "tail": "ca4ac0e25b66",
    },
}


@pytest.mark.parametrize(("name", "epochs"), KEYS)
def test_keys_of_the_presets_stay(name, epochs):
    """Committed tables name runs by their keys: what is not trained must not move them."""
    study = presets.load(name)
    untaught = [name for name, each in study.methods.items() if each.teacher != "mixture"]
    found = {method: study.run(method, epochs).key for method in untaught}
    assert found == KEYS[name, epochs]


@pytest.mark.parametrize("name", ["quick", "cpu", "gpu", "paper"])
def test_baselines_differ_from_each_other_by_teacher_and_extent_alone(name):
    methods = presets.load(name).methods
    ensemble = dataclasses.asdict(methods["ensemble"])
    distilled = dataclasses.asdict(methods["distilled_ensemble"])
    changed = {field for field in ensemble if ensemble[field] != distilled[field]}
    assert changed == {"teacher", "distill_after"}
    assert methods["q0"].teacher == "chain"
    assert methods["ensemble"].schedule == "cosine"
    assert methods["ensemble"].wd_schedule == "flat"
    learned = {name for name, method in methods.items() if method.mixture == "learned"}
    assert learned == {"q0", "tail"}


def test_paper_preset_is_the_papers():
    study = presets.load("paper")
    q0, base = study.methods["q0"], study.methods["ensemble"]
    assert (q0.alpha, q0.temperature, q0.distill_after) == (0.45, 1.2, 8)
    assert (q0.lr_floor, q0.wd_floor, q0.epochs_per_cycle) == (0.08, 0.7, 2)
    assert (q0.matrix_lr, q0.scalar_lr) == (0.04 * 0.25, 0.1 * 0.25)
    assert (q0.embedding_lr, q0.unembedding_lr) == (0.15 * 0.25, 0.002 * 0.25)
    assert (q0.batch_tokens, q0.edge_batch_tokens, q0.horizon) == (524_288, 393_216, 64)
    run = study.run("q0")
    assert (run.trajectories, run.cycles, run.epochs) == (2, 64, 256)
    baseline = study.run("ensemble")
    assert (baseline.trajectories, base.epochs_per_cycle, baseline.epochs) == (8, 32, 256)
    assert (base.ema_decay, base.ema_fraction, base.loop_from) == (0.95, 0.1, 0.5)
    fitness = study.corpus.fitness_tokens
    assert study.corpus.train_tokens + fitness == 100_000_000


def test_fractions_of_an_epoch_are_budgets_too():
    study = presets.load("quick", overrides=["q0.epochs_per_cycle=0.1"])
    assert study.run("q0", 0.3).cycles == 3


def test_a_larger_vocabulary_takes_the_model_along_unless_that_is_given():
    def sizes(*overrides):
        study = presets.load("gpu", overrides=list(overrides))
        return study.corpus.vocab_size, study.model.vocab_size

    assert sizes() == (50_257, 50_304)
    assert sizes("corpus.vocab_size=32768") == (32_768, 50_304)
    assert sizes("corpus.vocab_size=60000", "model.layers=2") == (60_000, 60_000)
    assert sizes("corpus.vocab_size=60000", "model.vocab_size=61440") == (60_000, 61_440)
