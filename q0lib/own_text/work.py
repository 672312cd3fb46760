"""Doing what a plan says: tuning, the population, one model alone, the student.

Each stage is a run of its own directory: one that is complete is reused, one that was stopped goes
on. So a stopped command is simply given again.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pandas as pd

from q0lib import config, corpus, ensemble, population, prior, student, train
from q0lib.own_text import proposal
from q0lib.own_text.plan import Plan, duration


@dataclass(frozen=True)
class Trained:
    """What came out of a plan: `chosen` of the population taught the student; `trials` is empty
    without tuning."""

    plan: Plan
    q0: population.Population
    chosen: prior.Selection
    single: population.Population | None
    student: population.Population
    trials: pd.DataFrame

    @property
    def best(self) -> tuple[str, population.Population]:
        """The one model to take home, by validation loss: the student, or the single model."""
        named = {"student": self.student, "single model": self.single}
        there = {name: one for name, one in named.items() if one is not None}
        return min(there.items(), key=lambda item: item[1].members.validation_loss.iloc[-1])

    @property
    def populations(self) -> dict[str, population.Population]:
        """Every population by the name of its stage."""
        named = {"population": self.q0, "single model": self.single, "student": self.student}
        return {name: each for name, each in named.items() if each is not None}


def do(plan: Plan, *, progress: bool = True) -> Trained:
    """Train what is missing of a plan.

    Raises:
        Stopped: after Ctrl-C, SIGTERM or SIGHUP, with everything saved.
        ValueError: the text is no longer the one that the runs were trained on.
        FloatingPointError: a loss is no longer finite.
    """
    one = plan.proposal
    stages = iter(one.stages)

    def say() -> None:
        if progress:
            stage = next(stages)
            print(f"{stage.name}: {stage.epochs:g} epochs, foretold {duration(stage.seconds)}")

    text = corpus.load(one.study.corpus)
    study, trials = one.study, pd.DataFrame()
    if one.trial_epochs:
        say()
        trials = _tuned(study, one.trial_epochs, text, progress)
        best = trials.validation.idxmin()
        study = proposal.tuned(study, trials.rate[best], trials.decay[best])
    say()
    q0 = train.train_population(study.run("q0", one.epochs), text, progress=progress)
    chosen = prior.select(q0.P["fitness"], one.k)
    q0.keep_mixture(chosen)
    single = None
    if one.single_epochs:
        say()
        run = proposal.single(dataclasses.replace(one, study=study))
        single = train.train_population(run, corpus.load(run.corpus), progress=progress)
    say()
    taught = student.teaching(q0, one.k)
    run = study.run("student", one.student_epochs, taught)
    pupil = train.train_population(run, text, progress=progress)
    return Trained(plan, q0, chosen, single, pupil, trials)


def _tuned(study: config.Preset, epochs: int, text: corpus.Text, progress: bool) -> pd.DataFrame:
    """Trials of q0: factors on matrix_lr and weight_decay, the mixture's loss on validation."""
    rows = []
    for rate, decay in ((1.0, 1.0), *proposal.TRIALS):
        run = proposal.trial(study, epochs, rate, decay)
        one = train.train_population(run, text, progress=progress)
        loss = ensemble.mixture_nll(one.fitted().weights, one.P["validation"])
        rows.append((rate, decay, run.method.matrix_lr, run.method.weight_decay, loss))
    columns = ["rate", "decay", "matrix_lr", "weight_decay", "validation"]
    return pd.DataFrame(rows, columns=columns)


def losses(trained: Trained) -> pd.DataFrame:
    """Test loss of every way to use what was trained, in nats per token.

    Columns: model, k (its forward passes), test, se (by documents); difference and difference_se
    to the single model, or without one to the best snapshot (paired by token). Errors are NaN where
    the test text is one document.
    """
    q0, rows = trained.q0, {}
    if trained.single is not None:
        rows["single model", 1] = _nll(trained.single)
    rows["best snapshot", 1] = _nll(q0, prior.select(q0.P["fitness"], 1, "lowest").weights)
    ks = [2**power for power in range(1, 9) if 2**power < len(q0)]
    for k, selection in prior.select_path(q0.P["fitness"], sorted({*ks, len(q0)})).items():
        rows["snapshots", k] = _nll(q0, selection.weights)
    rows["student", 1] = _nll(trained.student)
    documents, reference = q0.documents["test"], next(iter(rows.values()))

    def mean(nll: np.ndarray) -> tuple[float, float]:
        one = len(np.unique(documents)) == 1
        return float(nll.mean()), np.nan if one else ensemble.standard_error(nll, documents)

    table = [(*name, *mean(nll), *mean(nll - reference)) for name, nll in rows.items()]
    return pd.DataFrame(table, columns=["model", "k", "test", "se", "difference", "difference_se"])


def _nll(one: population.Population, weights: np.ndarray | None = None) -> np.ndarray:
    weights = np.ones(1) if weights is None else weights
    return -ensemble.mixture_log_probs(weights, one.P["test"])


def costs(trained: Trained) -> pd.DataFrame:
    """What each stage took: epochs, FLOPs, seconds, seconds that were foretold, and its run."""
    foretold = {stage.name: stage.seconds for stage in trained.plan.proposal.stages}
    rows = []
    for name, one in trained.populations.items():
        seconds = float(one.members.groupby("trajectory").wall_seconds.max().sum())
        rows.append((name, one.run.epochs, one.flops, seconds, foretold[name], one.directory))
    columns = ["stage", "epochs", "flops", "seconds", "foretold", "run"]
    return pd.DataFrame(rows, columns=columns)


def prompts(trained: Trained, count: int = 3, tokens: int = 12) -> list[str]:
    """The first words of test documents, those that are long enough."""
    text = corpus.load(trained.q0.run.corpus)
    split, tokenizer = text["test"], trained.q0.tokenizer
    found = []
    for start in split.starts[: 4 * count]:
        ids = split.tokens[start + 1 : start + 1 + tokens].tolist()
        said = tokenizer.decode(ids).strip()
        if len(ids) == tokens and said not in found:
            found.append(said)
    return found[:count]
