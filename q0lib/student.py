"""One model out of a population: a mixture teaches it, distribution by distribution.

The fourth primitive, which the paper leaves undone. Members of any populations, weighted, teach
one model of any size; what they cost to run is paid once, in training. `teaching` says who teaches,
a method whose teacher is "mixture" learns from it (`presets`: "student"), and everything else is as
for any other run: resumed to the bit, evaluated on the same held-out text, kept under a key that
holds its teachers' keys.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from q0lib import config, corpus, distill, files, paths, population, prior, runtime
from q0lib.model import GPT, Cache, forward_flops, mixed_logits

_AT_ONCE = 64  # rows that a mixture writes at a time
_DIGITS = 6  # of a weight: what a fit leaves beyond them differs from machine to machine


def teaching(
    populations: population.Population | Sequence[population.Population],
    k: int | None = None,
    *,
    from_best: bool = False,
    generated_tokens: int = 0,
) -> config.Teaching:
    """The mixture of `k` members of one or more populations, chosen greedily on fitness text.

    Without `k`, all members: weighed as their method is meant to be (a prior fitted to fitness
    text, or all alike), and by a prior if there are several populations. Members without weight
    are left out. `from_best` lets the student start from the member with the lowest fitness loss,
    instead of afresh; the mixture writes `generated_tokens`, to be read beside the text.

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
        generated_tokens,
    )


def taught_by(
    names: Sequence[str], k: int | None = None, *, generated_tokens: int = 0
) -> config.Teaching:
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
    return teaching(found, k, generated_tokens=generated_tokens)


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


def lengthened(text: corpus.Text, run: config.Run, *, progress: bool = True) -> corpus.Text:
    """The text with what the run's teachers have written (`generated_tokens`) behind its own.

    They write in rows of a context, each from the start of a document on, by the mixture at
    temperature 1; the run's seed decides all draws. Kept on disk, for runs that go on.
    """
    assert run.teaching is not None, "nobody teaches"
    taught, context = run.teaching, run.model.context
    name = hashlib.sha256(
        json.dumps([taught.decides, run.seed, run.precision, context], sort_keys=True).encode()
    ).hexdigest()[:12]
    path = paths.CACHE / "generated" / f"{name}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                written = _written(text, run, progress)
                files.save_tensors(path, {"tokens": torch.from_numpy(written)})
    written = files.open_tensors(path)[0]["tokens"].read()[: taught.generated_tokens]
    train = text["train"]
    tokens = np.concatenate([train.tokens, written.astype(train.tokens.dtype)])
    starts = np.concatenate([train.starts, len(train.tokens) + np.arange(0, len(written), context)])
    fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    longer = corpus.Split("train", tokens, starts, fingerprint)
    return dataclasses.replace(text, splits={**text.splits, "train": longer})


@torch.no_grad()
def _written(text: corpus.Text, run: config.Run, progress: bool) -> np.ndarray:
    """Rows of a context that the mixture writes, one after the other, int64."""
    assert run.teaching is not None, "nobody teaches"
    context, device = run.model.context, runtime.device(run.runtime.device)
    mixture = teacher(run.teaching, device, runtime.DTYPES[run.precision])
    end = int(text["train"].tokens[0])  # every document begins with <|endoftext|>
    rows, found = -(-run.teaching.generated_tokens // context), []
    generator = torch.Generator().manual_seed(run.seed)
    with tqdm(total=rows * context, desc="generating", unit="token", disable=not progress) as bar:
        for first in range(0, rows, _AT_ONCE):
            block = torch.full((min(_AT_ONCE, rows - first), 1), end)
            caches = [Cache(context) for _ in mixture.models]
            for _ in range(context - 1):
                new = block[:, -1:].to(device)
                said = mixed_logits(mixture.models, run.teaching.weights, new, caches, last=1)
                p = said[:, 0, : text.vocab_size].softmax(-1).cpu()
                block = torch.cat([block, torch.multinomial(p, 1, generator=generator)], dim=1)
                bar.update(len(block))
            found.append(block)
    return torch.cat(found).flatten().numpy()


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
