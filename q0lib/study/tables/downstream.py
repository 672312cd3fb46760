"""Accuracy on downstream tasks, item by item: `downstream.csv`, `downstream_items.csv`, and what
follows from them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import efficiency, ensemble, language_model, paths, prior
from q0lib.corpus import held_out_documents
from q0lib.downstream import evaluation
from q0lib.downstream import tasks as own_tasks
from q0lib.population import Population, load
from q0lib.presets import load as preset_of
from q0lib.study import plan
from q0lib.study.tables import intervals, mixtures

REFERENCE = "one epoch"
AVERAGE = "average"
KS = 1, 8, 16  # of a trajectory's snapshots, chosen greedily on fitness text


def tables(
    found: plan.Trained,
    tasks: Sequence[str],
    *,
    include: Path | str | None = None,
    answers: str = "evaluation",
    progress: bool = True,
) -> dict[str, pd.DataFrame]:
    """What every model of the part "downstream" answers; what was answered before is not asked
    again: it lies in `answers` within each run directory, a folder for each set of tasks. Tasks are
    those that `downstream.evaluation` knows, those made from text are made from the test text.

    downstream: a row a (method, k, seed, task): metric, accuracy, se (items of one document taken
    together), chance, items; tokens (of training), test (loss, nats per token); run, commit. Method
    is the label, and "one epoch" for the reference.
    downstream_items: for every row of it answers, a string of 0 and 1, in the order of items; and a
    row of each task, method "documents", with the document of each item, separated by spaces.
    """
    rows: list[dict] = []
    items: list[dict] = []
    for each, run in found:
        if include is None and set(tasks) & set(own_tasks.NAMES):
            include = paths.CACHE / "tasks" / run.preset
            own_tasks.write(include, held_out_documents(preset_of(run.preset).corpus))
        whole = load(run)
        method = REFERENCE if is_reference(each) else each.label.partition(",")[0]
        for part, choice, chosen in _read(whole):
            folder = run.directory / answers / f"{choice}-{chosen.k}"
            known = evaluation.evaluate(
                language_model.mixed(part, chosen), tasks, folder, include=include,
                precision=run.precision, progress=progress,
            )  # fmt: skip
            loss = ensemble.mixture_nll(chosen.weights, part.P["test"])
            for task in tasks:
                metric = _metric(known[known.task == task].metric.to_list())
                at = known[(known.task == task) & (known.metric == metric)].iloc[0]
                name = {"method": method, "k": chosen.k, "seed": run.seed, "task": task}
                rows.append(
                    {**name, "metric": metric, "accuracy": at.value, "se": at.se,
                     "chance": at.chance, "items": at["items"],
                     "tokens": run.corpus.train_tokens, "test": loss, **mixtures.origin(whole)}
                )  # fmt: skip
                if (folder / f"{task}.samples.jsonl").exists():  # a group has none of its own
                    kept = evaluation.samples(folder, task)
                    if not any(i["method"] == "documents" and i["task"] == task for i in items):
                        said = " ".join(map(str, kept.document))
                        items.append({"method": "documents", "k": 0, "seed": -1, "task": task,
                                      "tokens": 0, "answers": said})  # fmt: skip
                    right = "".join("1" if value else "0" for value in kept[metric])
                    items.append({**name, "tokens": run.corpus.train_tokens, "answers": right})
    columns = ["method", "k", "seed", "tokens", "task", "answers"]
    return {"downstream": pd.DataFrame(rows), "downstream_items": pd.DataFrame(items)[columns]}


def is_reference(each: plan.Experiment) -> bool:
    """Whether it is a run of the one-epoch reference, rather than a method's."""
    return each.label.startswith("width")


def _read(whole: Population) -> Iterator[tuple[Population, str, prior.Selection]]:
    """How a population is asked: a trajectory by its K best, students one by one, others all."""
    if whole.run.cycles > 1:
        for k in KS:
            if k <= len(whole):
                yield whole, "greedy", prior.select(whole.P["fitness"], k)
        return
    part = whole.prefix(1, 1) if whole.run.method.teacher == "mixture" else whole
    M = len(part)
    yield part, "uniform", prior.Selection(np.arange(M), np.full(M, 1 / M), M, "uniform")


def _metric(metrics: Sequence[str]) -> str:
    """The accuracy that a task is judged by: with mutual information where it has it."""
    for name in ("acc_mutual_info", "acc"):
        if name in metrics:
            return name
    raise ValueError(f"a task must have an accuracy, it has {', '.join(metrics)}")


class Answers:
    """Every answer of a table of items, and texts drawn anew: the same for all models.

    `right[method, k, tokens][task]` is [seeds, items] of 0 and 1; `draws[task]` [draws, items] says
    how often each item is drawn, whole documents at a time.
    """

    def __init__(self, items: pd.DataFrame) -> None:
        documents = items[items.method == "documents"].set_index("task").answers
        self.tasks = list(documents.index)
        self.right: dict[tuple, dict[str, np.ndarray]] = {}
        models = items[items.method != "documents"].sort_values("seed")
        for (method, k, tokens, task), block in models.groupby(
            ["method", "k", "tokens", "task"], sort=False
        ):
            rows = [np.frombuffer(each.encode(), np.uint8) - ord("0") for each in block.answers]
            self.right.setdefault((method, k, tokens), {})[task] = np.array(rows, float)
        ids = {task: np.array(documents[task].split()) for task in self.tasks}
        known = np.unique(np.concatenate(list(ids.values())))  # tasks share documents
        chances = np.full(len(known), 1 / len(known))
        drawn = np.random.default_rng(0).multinomial(len(known), chances, size=intervals.DRAWS)
        self.draws = {task: drawn[:, np.searchsorted(known, each)] for task, each in ids.items()}

    def accuracy(self, model: tuple, task: str) -> np.ndarray:
        """Accuracy of a model (method, k, tokens) by seed; on `AVERAGE`, the mean over tasks."""
        if task == AVERAGE:
            return np.mean([self.accuracy(model, each) for each in self.tasks], axis=0)
        return self.right[model][task].mean(1)

    def drawn(self, model: tuple, task: str) -> np.ndarray:
        """The same on documents drawn anew, [draws, seeds]."""
        if task == AVERAGE:
            return np.mean([self.drawn(model, each) for each in self.tasks], axis=0)
        draws = self.draws[task]
        return draws @ self.right[model][task].T / draws.sum(1, keepdims=True)


def accuracies(items: pd.DataFrame) -> pd.DataFrame:
    """Every model on every task and on average: mean over seeds, 95% interval of seeds and items.

    Columns: method, k, tokens, task, accuracy, low, high, seeds; and against the ensemble of the
    same text, paired by seed and item: gain, gain_low, gain_high.
    """
    answers = Answers(items)
    base = next(model for model in answers.right if model[0] == "ensemble")
    rows = []
    for model in answers.right:
        for task in [*answers.tasks, AVERAGE]:
            own, drawn = answers.accuracy(model, task), answers.drawn(model, task)
            mean, low, high = efficiency.interval(own, drawn.mean(1).std())
            gain = own - answers.accuracy(base, task)
            spread = (drawn - answers.drawn(base, task)).mean(1).std()
            rows.append(
                dict(zip(["method", "k", "tokens"], model, strict=True))
                | {"task": task, "accuracy": mean, "low": low, "high": high, "seeds": len(own)}
                | dict(zip(["gain", "gain_low", "gain_high"], efficiency.interval(gain, spread),
                           strict=True))
            )  # fmt: skip
    return pd.DataFrame(rows)


def data_efficiency(items: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """How many times `tokens` one epoch needs to be as accurate, as the paper's table 2 reads it.

    Each seed is read off the reference of the same seed. The reference may go back and forth:
    multiplier is the first crossing, the fewest tokens at which it was ever as accurate; last, from
    which on it stays so. Columns: method, k, task, accuracy, multiplier, low, high (95%, seeds and
    items), last, seeds, reached (seeds that the reference matches).
    """
    answers = Answers(items)
    line = sorted((model for model in answers.right if model[0] == REFERENCE), key=lambda m: m[2])
    axis = [model[2] for model in line]
    rows = []
    for model in (model for model in answers.right if model[0] != REFERENCE):
        for task in [*answers.tasks, AVERAGE]:
            own, drawn = answers.accuracy(model, task), answers.drawn(model, task)
            theirs = np.array([answers.accuracy(each, task) for each in line])
            theirs_drawn = np.array([answers.drawn(each, task) for each in line])
            found = {
                crossing: [
                    efficiency.data_efficiency(
                        value, axis, theirs[:, seed], tokens, crossing, higher_is_better=True
                    )
                    for seed, value in enumerate(own)
                ]
                for crossing in ("first", "last")
            }
            curves = [  # as losses, which come down to what they meet
                (np.array(axis, float), -theirs_drawn[:, :, seed], -drawn[:, seed])
                for seed in range(len(own))
            ]
            spread, _ = intervals.crossing_spread(curves)
            ratio, low, high = efficiency.ratio_interval(found["first"], spread)
            rows.append(
                {"method": model[0], "k": model[1], "task": task, "accuracy": own.mean(),
                 "multiplier": ratio, "low": low, "high": high,
                 "last": efficiency.ratio_interval(found["last"])[0], "seeds": len(own),
                 "reached": int(np.isfinite(found["first"]).sum())}
            )  # fmt: skip
    return pd.DataFrame(rows)


def beyond_loss(table: pd.DataFrame, items: pd.DataFrame) -> pd.DataFrame:
    """How much more accurate, on average over tasks, a model is than the reference of its loss.

    The reference's accuracy is read off, seed by seed, at the model's test loss, between its points
    by a straight line. Columns: method, k, loss, accuracy, reference, surplus, low, high.
    """
    answers = Answers(items)
    losses = table.groupby(["method", "k", "tokens", "seed"]).test.first()
    line = sorted((model for model in answers.right if model[0] == REFERENCE), key=lambda m: -m[2])
    at = np.array([losses[model].to_numpy() for model in line])  # by rising loss
    known = np.array([answers.accuracy(model, AVERAGE) for model in line])
    drawn = np.array([answers.drawn(model, AVERAGE) for model in line])
    rows = []
    for model in (model for model in answers.right if model[0] != REFERENCE):
        loss, own = losses[model].to_numpy(), answers.accuracy(model, AVERAGE)
        theirs = [np.interp(loss[s], at[:, s], known[:, s]) for s in range(len(own))]
        ours_drawn = answers.drawn(model, AVERAGE)
        gaps = [
            [ours_drawn[d, s] - np.interp(loss[s], at[:, s], drawn[:, d, s])
             for s in range(len(own))]
            for d in range(len(ours_drawn))
        ]  # fmt: skip
        surplus, low, high = efficiency.interval(own - theirs, np.mean(gaps, axis=1).std())
        rows.append({"method": model[0], "k": model[1], "loss": loss.mean(),
                     "accuracy": own.mean(), "reference": np.mean(theirs), "surplus": surplus,
                     "low": low, "high": high})  # fmt: skip
    return pd.DataFrame(rows)
