"""What students of a population are worth, and what they cost: `students.csv`, and its kin.

A student is charged for all that it took: its own training, its teachers' passes, and the training
of whoever taught it, down to the first generation, each run once.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import config, corpus, efficiency, ensemble, population, prior
from q0lib.model import forward_flops
from q0lib.population import Population
from q0lib.study import plan
from q0lib.study.tables import intervals, mixtures

KS = 1, 2, 4, 8, 16  # of a trajectory's snapshots, chosen greedily


def tables(found: plan.Trained) -> dict[str, pd.DataFrame]:
    """The worth of every population of the part "student", alone and mixed.

    students: a row a (label, seed, budget, choice, K). A trajectory is read where it teaches and at
    its end, by K members chosen greedily and by all of them ("learned", exact weights); students
    and ensembles by their first K ("uniform"); all students of a label together with all members
    of who taught them by one prior ("with teachers"). Columns: method (what is before a comma in
    the label, with choice and K unless that is one student, all that is learned, or an ensemble),
    label, generation (teachers between it and the first), seed, epochs and flops (of its own
    training), total_epochs and total_flops (with everyone who taught), choice, k, inference (FLOPs
    a token, of members with a weight), validation, test, test_se; of those who are taught
    teacher_test and snapshot_test (what the mixture that teaches loses, and the best of the
    teachers' members by fitness text); run, commit.
    student_documents: the test loss of each row by document, as `intervals.document_frame` has it;
    epochs are the total.
    """
    held = {run.directory: population.load(run) for _, run in found}
    rows: list[dict] = []
    sums: dict[tuple, np.ndarray] = {}
    for each, run in found:
        whole = held[run.directory]
        if not sums:
            sums[intervals.TOKENS] = intervals.document_sizes(whole)
        for part in _extents(each, whole, found):
            epochs, flops = _spent(each, part.run, held)
            taught = _taught(each, run, held)
            named = each.label.partition(",")[0]
            for choice, k, weights in _mixtures(part):
                nll = -ensemble.mixture_log_probs(weights, part.P["test"])
                plain = choice == "learned" or (choice == "uniform" and (k == 1 or not taught))
                method = named if plain else f"{named}, {choice} {k}"
                rows.append(
                    {"method": method, "label": each.label, "generation": _generation(each),
                     "seed": run.seed,
                     "epochs": part.run.epochs, "flops": part.flops, "total_epochs": epochs,
                     "total_flops": flops, "choice": choice, "k": k,
                     "inference": int((weights > 0).sum()) * forward_flops(run.model),
                     "validation": ensemble.mixture_nll(weights, part.P["validation"]),
                     "test": float(nll.mean()),
                     "test_se": ensemble.standard_error(nll, part.documents["test"]),
                     **taught, **mixtures.origin(whole)}
                )  # fmt: skip
                sums[method, run.seed, epochs] = intervals.document_sums(part, weights)
        if taught and whole.run.cycles == 1:
            rows.append(_together(rows[-1], each, whole, held))
    return {"students": pd.DataFrame(rows), "student_documents": intervals.document_frame(sums)}


def tuning(found: plan.Trained) -> pd.DataFrame:
    """The trials that fixed the student's recipe, by validation loss.

    Columns: label (what differs from the recipe), seed, epochs, validation, flops, run, commit.
    """
    rows = []
    for each, run in found:
        whole = population.load(run)
        member = whole.members.iloc[-1]
        rows.append({"label": each.label, "seed": run.seed, "epochs": run.epochs,
                     "validation": member.validation_loss, "flops": whole.flops,
                     **mixtures.origin(whole)})  # fmt: skip
    return pd.DataFrame(rows)


def _extents(each: plan.Experiment, whole: Population, found: plan.Trained) -> list[Population]:
    """Of a trajectory its beginnings that teach, and all of it; of models their first N."""
    run = whole.run
    if run.cycles == 1:
        return [whole.prefix(n, 1) for n in range(1, run.trajectories + 1)]
    sizes = {
        (part.trajectories, part.cycles)
        for other, _ in found
        for part in other.teachers
        if part.of == each
    }
    return [whole.prefix(*size) for size in sorted(sizes | {(run.trajectories, run.cycles)})]


def _mixtures(part: Population) -> Iterator[tuple[str, int, np.ndarray]]:
    """How a population is read: choice, K, weights [M]."""
    M = len(part)
    if part.run.cycles == 1:
        yield "uniform", M, np.full(M, 1 / M)
        return
    sizes = [k for k in KS if k < M]
    for k, chosen in prior.select_path(part.P["fitness"], sizes).items():
        yield "greedy", k, chosen.weights
    yield "learned", M, part.fitted().weights


def _spent(
    each: plan.Experiment, run: config.Run, held: dict[Path, Population]
) -> tuple[float, float]:
    """Epochs and FLOPs of a run and of all who taught it, what they share counted once."""
    extents: dict[Path, tuple[int, int]] = {}

    def charge(one: plan.Experiment, directory: Path, trajectories: int, cycles: int) -> None:
        before = extents.get(directory, (0, 0))
        extents[directory] = max(before[0], trajectories), max(before[1], cycles)
        for part in one.teachers:
            theirs = part.run(run.preset, run.seed)
            charge(part.of, theirs.directory, part.trajectories, part.cycles)

    charge(each, run.directory, run.trajectories, run.cycles)
    parts = [held[directory].prefix(*size) for directory, size in extents.items()]
    return sum(part.run.epochs for part in parts), sum(part.flops for part in parts)


def _together(
    last: dict, each: plan.Experiment, whole: Population, held: dict[Path, Population]
) -> dict:
    """The row of all students and all members of who taught them, under one prior."""
    parts = [whole, *_teachers(each, whole.run, held)]
    P = {
        split: np.concatenate([np.asarray(part.P[split]) for part in parts])
        for split in corpus.HELD_OUT
    }
    weights = prior.fit_prior(P["fitness"]).weights
    nll = -ensemble.mixture_log_probs(weights, P["test"])
    used = int((weights > 0).sum())
    return {
        **last, "method": f"{last['method'].partition(',')[0]}, with teachers",
        "choice": "with teachers", "k": len(weights),
        "inference": used * forward_flops(whole.run.model),
        "validation": ensemble.mixture_nll(weights, P["validation"]), "test": float(nll.mean()),
        "test_se": ensemble.standard_error(nll, whole.documents["test"]),
    }  # fmt: skip


def _teachers(
    each: plan.Experiment, run: config.Run, held: dict[Path, Population]
) -> list[Population]:
    parts = [part.run(run.preset, run.seed) for part in each.teachers]
    return [held[one.directory].prefix(one.trajectories, one.cycles) for one in parts]


def _taught(
    each: plan.Experiment, run: config.Run, held: dict[Path, Population]
) -> dict[str, float]:
    """What the mixture that teaches a run loses on test, and the best of its members by fitness."""
    if run.teaching is None:
        return {}
    rows = {
        (part.run.key, row.trajectory, row.cycle): (part.P["test"][i], row)
        for part in _teachers(each, run, held)
        for i, row in enumerate(part.members.itertuples())
    }
    weights = np.array(run.teaching.weights)
    P = np.stack([rows[member][0] for member in run.teaching.members])
    best = min((row for _, row in rows.values()), key=lambda row: row.fitness_loss)
    return {"teacher_test": ensemble.mixture_nll(weights / weights.sum(), P),
            "snapshot_test": best.test_loss}  # fmt: skip


def means(students: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds, with its 95% interval (Student's t), of every line of a table of students.

    Columns: method, label, generation, choice, k, total_epochs, validation, loss, low, high,
    total_flops, inference, seeds.
    """
    rows = []
    what = ["method", "label", "generation", "choice", "k", "total_epochs"]
    for names, block in students.groupby(what, sort=False):
        mean, low, high = efficiency.interval(block.test.to_list())
        rows.append({**dict(zip(what, names, strict=True)),
                     "validation": block.validation.mean(), "loss": mean, "low": low, "high": high,
                     "total_flops": block.total_flops.mean(), "inference": block.inference.mean(),
                     "seeds": len(block)})  # fmt: skip
    return pd.DataFrame(rows)


def kept(students: pd.DataFrame) -> pd.DataFrame:
    """The share of what mixing gains that one student keeps, by label, over seeds.

    The gain is from the teachers' best member (by fitness text) to the mixture that teaches.
    Columns: label, seeds, snapshot, teacher, student (means on test), share, low, high.
    """
    rows = []
    alone = students[(students.k == 1) & students.teacher_test.notna()]
    for label, block in alone[alone.choice == "uniform"].groupby("label", sort=False):
        share = (block.snapshot_test - block.test) / (block.snapshot_test - block.teacher_test)
        mean, low, high = efficiency.interval(share.to_list())
        rows.append({"label": label, "seeds": len(block), "snapshot": block.snapshot_test.mean(),
                     "teacher": block.teacher_test.mean(), "student": block.test.mean(),
                     "share": mean, "low": low, "high": high})  # fmt: skip
    return pd.DataFrame(rows)


def curves(students: pd.DataFrame) -> pd.DataFrame:
    """A table of students as curves by all that was spent, as `epoch_efficiency.curves` has them.

    Columns: seed, method, epochs, flops, k, choice, validation, loss.
    """
    named = {"total_epochs": "epochs", "total_flops": "flops", "test": "loss"}
    columns = ["seed", "method", *named, "k", "choice", "validation"]
    return students[columns].rename(columns=named)


def _generation(each: plan.Experiment) -> int:
    return max((1 + _generation(part.of) for part in each.teachers), default=0)
