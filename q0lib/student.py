"""One model out of a population: a mixture teaches it, distribution by distribution.

The fourth primitive, which the paper leaves undone. Members of any populations, weighted, teach
one model of any size; what they cost to run is paid once, in training. `teaching` says who teaches,
a method whose teacher is "mixture" learns from it (`presets`: "student"), and everything else is as
for any other run: resumed to the bit, evaluated on the same held-out text, kept under a key that
holds its teachers' keys.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from q0lib import config, corpus, distill, files, paths, population, prior
from q0lib.model import GPT, forward_flops

_DIGITS = 6  # of a weight: what a fit leaves beyond them differs from machine to machine


def teaching(
    populations: population.Population | Sequence[population.Population],
    k: int | None = None,
    *,
    from_best: bool = False,
) -> config.Teaching:
    """The mixture of `k` members of one or more populations, chosen greedily on fitness text.

    Without `k`, all members: weighed as their method is meant to be (a prior fitted to fitness
    text, or all alike), and by a prior if there are several populations. Members without weight
    are left out. `from_best` lets the student start from the member with the lowest fitness loss,
    instead of afresh.

    Raises:
        ValueError: no populations, a K that they do not have.
        FileNotFoundError: weights of a member were not kept; says how they are.
    """
    each = [populations] if isinstance(populations, population.Population) else list(populations)
    if not each:
        raise ValueError("at least one population must teach, got none")
    P = np.concatenate([np.asarray(one.P["fitness"]) for one in each])
    if k is not None:
        chosen = prior.select(P, k)
        weights = chosen.weights
    elif len(each) == 1 and each[0].run.method.mixture == "uniform":
        weights = np.full(len(P), 1 / len(P))
    else:
        weights = prior.fit_prior(P).weights
    weights = np.round(weights, _DIGITS)
    found = [(one, member) for one in each for member in range(len(one))]
    kept = [int(i) for i in np.argsort(-weights, kind="stable") if weights[i] > 0]
    members, folders = [], []
    for one, member in (found[i] for i in kept):
        path = one.weights_path(member)
        if not path.exists():
            population.read_weights(path)  # says what to do
        row = one.members.iloc[member]
        members.append((one.run.key, int(row.trajectory), int(row.cycle)))
        folders.append(_named(one.directory))
    losses = [-np.log(np.maximum(P[i], prior.FLOOR)).mean() for i in kept]
    total = float(sum(weights[kept]))
    return config.Teaching(
        tuple(members),
        tuple(round(float(weights[i]) / total, _DIGITS) for i in kept),
        tuple(folders),
        int(np.argmin(losses)) if from_best else -1,
    )


def taught_by(names: Sequence[str], k: int | None = None) -> config.Teaching:
    """`teaching` by runs named as notebooks and sweeps can: "cpu/q0-seed0-7140a71de9da@1x32".

    A name is a run directory (within `paths.RUNS`, or a path), and after the @ how much of it
    takes part, trajectories x cycles; without, all that is complete.

    Raises:
        ValueError: a name of another form, and as `teaching`.
        FileNotFoundError: no such run, or not so much of it is complete.
    """
    found = []
    for name in names:
        folder, _, extent = name.partition("@")
        sizes = [int(size) if size.isdigit() else 0 for size in extent.split("x")]
        if extent and (len(sizes) != 2 or min(sizes) < 1):
            raise ValueError(
                f"a teacher is a run directory, @ and trajectories x cycles, such as "
                f"cpu/q0-seed0-7140a71de9da@1x32, got {name!r}"
            )
        part = sizes if extent else (None, None)
        found.append(population.Population.open(_directory(folder), *part))
    return teaching(found, k)


def teacher(
    taught: config.Teaching, device: torch.device, dtype: torch.dtype
) -> distill.Teacher:  # fmt: skip
    """The mixture as models that teach.

    Raises:
        FileNotFoundError: a run, or the weights of a member, are not there any more.
        ValueError: a folder holds another run by now.
    """
    models = []
    for member, folder in zip(taught.members, taught.folders, strict=True):
        model = GPT(_run(member, folder).model)
        model.load_state_dict(_weights(member, folder), strict=True)
        models.append(model.to(device))
    return distill.Teacher(models, taught.weights, dtype)


def start(taught: config.Teaching, model: config.Model) -> dict[str, Tensor]:
    """The weights that a student of this shape starts from.

    Raises:
        ValueError: the member has another shape.
    """
    member, folder = taught.members[taught.start], taught.folders[taught.start]
    theirs = _run(member, folder).model
    if theirs != model:
        raise ValueError(f"a student can only start from a model of its shape: {theirs}, {model}")
    return _weights(member, folder)


def lesson_flops(taught: config.Teaching) -> float:
    """FLOPs that a token of a lesson costs: a pass of every member."""
    pairs = zip(taught.members, taught.folders, strict=True)
    return sum(forward_flops(_run(member, folder).model) for member, folder in pairs)


def check(taught: config.Teaching, text: corpus.Text) -> None:
    """Make sure that these teachers speak of the same tokens, and never read what is held out.

    Raises:
        FileNotFoundError: a teacher's run is not there.
        ValueError: another tokenizer, or other held-out text; names the folder.
    """
    ours = text.tokenizer.to_str()
    for member, folder in dict(zip(taught.members, taught.folders, strict=True)).items():
        _run(member, folder)
        directory = _directory(folder)
        if corpus.read_tokenizer(directory / "tokenizer.json").to_str() != ours:
            raise ValueError(f"{directory} has another tokenizer than its student's text")
        theirs = files.read_json(directory / "run.json")["tokens"]
        for split in corpus.HELD_OUT:
            if theirs[split] != text[split].fingerprint:
                raise ValueError(
                    f"{directory} holds out other {split} text than its student, and may have "
                    "been trained on what the student is judged by"
                )


def _named(directory: Path) -> str:
    directory, runs = directory.resolve(), paths.RUNS.resolve()
    inside = directory.is_relative_to(runs)
    return (directory.relative_to(runs) if inside else directory).as_posix()


def _directory(folder: str) -> Path:
    return paths.RUNS / folder  # an absolute path stays as it is


def _run(member: tuple[str, int, int], folder: str) -> config.Run:
    directory, (key, _, _) = _directory(folder), member
    if not (directory / "run.json").exists():
        raise FileNotFoundError(f"the teacher's run {directory} is not there: train it first")
    run = population.described_run(directory)
    if run.key != key:
        raise ValueError(f"{directory} holds run {run.key}, the student's teacher is {key}")
    return run


def _weights(member: tuple[str, int, int], folder: str) -> dict[str, Tensor]:
    _, trajectory, cycle = member
    return population.read_weights(population.weights_path(_directory(folder), trajectory, cycle))
