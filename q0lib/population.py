"""The run directory: what training leaves, and how it is read back.

    <run>/run.json                the whole config, what decides it, and where it was started
    <run>/tokenizer.json          how its text became tokens
    <run>/documents.safetensors   the document of every held-out token
    <run>/t00/c0000.safetensors   member (trajectory 0, cycle 0): log p of every held-out token
    <run>/t00/c0000.weights.safetensors   its weights, when they are kept
    <run>/t00/checkpoint.pt       where to go on: see `checkpoint`
    <run>/result.json             written last: how far the run is complete, and what it cost
    <run>/mixture.json            which members are mixed, and how, once that was chosen

Every file appears by rename. A population of N trajectories and C cycles is complete when
`result.json` says so and its members are there; a larger run contains every smaller one. The
folder explains itself: `Population.open(path)` needs nothing else.
"""

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tokenizers
import torch
from safetensors.torch import load_file

from q0lib import config, corpus, ensemble, files, prior, rows
from q0lib.model import GPT
from q0lib.provenance import provenance
from q0lib.trajectory import SPENT

_DEFAULTS = "all, by the prior", "all, alike"  # how members are mixed where nobody has chosen


@dataclass(frozen=True)
class Mixture:
    """What a population is used as: `members` (trajectory, cycle), heaviest first, by `weights`.

    `choice` says how they were chosen, `fitness_loss` what they lose there, nats per token.
    """

    members: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]
    choice: str
    fitness_loss: float


@dataclass
class Population:
    """M snapshots: `P[split]` [M, T] holds the probability each gives to every true token.

    P is an array, or `rows.Rows` where that would not fit: both are read as `P[members, tokens]`.
    `members` has one row a member, in the order of P: trajectory, cycle, and what training up to
    its end cost (epochs, tokens, steps, flops, train_seconds: of its own trajectory), and its
    mean loss on training batches and on each held-out split, in nats per token.
    """

    run: config.Run
    directory: Path
    P: dict[str, Any]
    members: pd.DataFrame
    documents: dict[str, np.ndarray]  # document of each token of P, by split
    # Each part of the population is fitted once: by its trajectories, cycles, and the fit.
    _fits: dict[tuple[int, int, str], prior.Prior] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.members)

    @classmethod
    def open(
        cls, path: Path | str, trajectories: int | None = None, cycles: int | None = None
    ) -> "Population":
        """The population of a run directory, from its path alone.

        By default the largest N x C that is complete; else as many as asked for.

        Raises:
            FileNotFoundError: `path` is no run directory, or not so much of it is complete.
            ValueError: a file there is damaged; says which.
        """
        directory = Path(path)
        run = described_run(directory)
        done = completed(directory)
        complete = {n: min(done[:n]) for n in range(1, len(done) + 1)}
        if cycles is not None:
            complete = {n: cycles for n, most in complete.items() if most >= cycles}
        if trajectories is None:
            trajectories = max(complete, key=lambda n: (n * complete[n], -n), default=1)
        if cycles is None:
            cycles = complete.get(trajectories, 1)
        run = dataclasses.replace(run, trajectories=trajectories, cycles=cycles)
        return load(run, directory)

    def prefix(self, trajectories: int, cycles: int) -> "Population":
        """The population as it was after `cycles` cycles of the first `trajectories`."""
        if not (0 < trajectories <= self.run.trajectories and 0 < cycles <= self.run.cycles):
            raise ValueError(
                f"prefix must be within {self.run.trajectories} trajectories x {self.run.cycles} "
                f"cycles, got {trajectories} x {cycles}"
            )
        members = self.members
        kept = ((members.trajectory < trajectories) & (members.cycle < cycles)).to_numpy()
        part = dataclasses.replace(
            self,
            run=dataclasses.replace(self.run, trajectories=trajectories, cycles=cycles),
            P={split: each[kept] for split, each in self.P.items()},
            members=members[kept].reset_index(drop=True),
        )
        part._fits = self._fits
        return part

    def fitted(self, fit: prior.Fit = "exact") -> prior.Prior:
        """The prior over all members, by fitness text; fitted once and kept."""
        key = self.run.trajectories, self.run.cycles, fit
        if key not in self._fits:
            self._fits[key] = prior.fit_prior(self.P["fitness"], fit)
        return self._fits[key]

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """How text becomes the tokens that the members know."""
        return corpus.read_tokenizer(self.directory / "tokenizer.json")

    def model(self, member: int, device: str = "cpu") -> GPT:
        """A member as a model, in evaluation mode; its weights must have been kept.

        Raises:
            FileNotFoundError: they were not; says how they are.
        """
        model = GPT(self.run.model)
        model.load_state_dict(read_weights(self.weights_path(member)), strict=True)
        return model.to(device).eval()

    def weights_path(self, member: int) -> Path:
        """Where the weights of a member are, if `runtime.keep_weights` kept them."""
        row = self.members.iloc[member]
        return weights_path(self.directory, int(row.trajectory), int(row.cycle))

    def keep_mixture(self, chosen: prior.Selection | None = None) -> Mixture:
        """Save how the population is to be mixed, in its directory, and return it.

        By default all members with the weights that the method is meant for: fitted exactly to
        fitness text, or all alike; but what was chosen before, or of more members, stays.
        """
        if chosen is None:
            if (self.directory / "mixture.json").exists():
                held = self.mixture
                run = self.run
                if held.choice not in _DEFAULTS or not all(
                    t < run.trajectories and c < run.cycles for t, c in held.members
                ):
                    return held
            learned = self.run.method.mixture == "learned"
            weights = self.fitted().weights if learned else np.full(len(self), 1 / len(self))
            order = np.argsort(-weights, kind="stable")
            kept = order[weights[order] > 0]
            chosen = prior.Selection(kept, weights, len(kept), _DEFAULTS[not learned])
        at = self.members.iloc[chosen.members]
        mixture = Mixture(
            tuple(zip(at.trajectory.tolist(), at.cycle.tolist(), strict=True)),
            tuple(chosen.weights[chosen.members].tolist()),
            chosen.method,
            ensemble.mixture_nll(chosen.weights, self.P["fitness"]),
        )
        text = json.dumps(dataclasses.asdict(mixture), indent=1)
        files.write_text(self.directory / "mixture.json", text)
        return mixture

    @property
    def mixture(self) -> Mixture:
        """How the population is to be mixed, as `keep_mixture` saved it; of its whole directory.

        Raises:
            FileNotFoundError: nobody has chosen yet.
        """
        held = files.read_json(self.directory / "mixture.json")
        pairs = tuple((trajectory, cycle) for trajectory, cycle in held.pop("members"))
        return Mixture(pairs, tuple(held.pop("weights")), **held)

    @property
    def flops(self) -> float:
        """FLOPs spent on the whole population, teacher passes included, evaluation not."""
        return float(self.members.groupby("trajectory").flops.max().sum())


def trajectory_path(directory: Path, trajectory: int) -> Path:
    return directory / f"t{trajectory:02d}"


def member_path(directory: Path, trajectory: int, cycle: int) -> Path:
    return trajectory_path(directory, trajectory) / f"c{cycle:04d}.safetensors"


def weights_path(directory: Path, trajectory: int, cycle: int) -> Path:
    return member_path(directory, trajectory, cycle).with_suffix(".weights.safetensors")


def keeps_weights(run: config.Run, cycle: int) -> bool:
    """Whether the weights of this cycle's members are kept: asked for, to teach the next, or
    because a student is there for its weights."""
    last = cycle + 1 == run.method.cycles
    return run.runtime.keep_weights or (
        run.method.teacher in ("previous_member", "mixture") and last
    )


# --- writing -----------------------------------------------------------------------------------


def write_member(path: Path, log_probs: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Save a member's rows and its record (plain values), whole or not at all."""
    files.save_tensors(path, log_probs, record=json.dumps(record))


def write_weights(path: Path, model: GPT) -> None:
    """Save the plain module's weights (no prefix of a compiler or wrapper in their names)."""
    files.save_tensors(path, model.state_dict())


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a snapshot, for `load_state_dict(..., strict=True)`.

    Raises:
        FileNotFoundError: they were not kept; says how they are.
        ValueError: the file is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: train the run with runtime.keep_weights=true to keep weights "
            "(a finished run without them is trained again, to the same bits)"
        )
    files.open_tensors(path)
    return load_file(path)


def open_directory(run: config.Run, directory: Path, text: corpus.Text) -> None:
    """Create the run's directory, or make sure that it belongs to this run and this text.

    Whatever of it is not there yet is added.

    Raises:
        ValueError: the directory holds another config or was trained on other tokens; names the
            values that differ.
    """
    path = directory / "run.json"
    ours = {"decides": json.loads(json.dumps(run.decides)), "tokens": text.fingerprints}
    about = {"key": run.key, "preset": run.preset, "method": run.name, **provenance()}
    if path.exists():
        about = files.read_json(path)
        for name, what in (("decides", "config"), ("tokens", "text (its source has changed)")):
            if differing := _differences(about.get(name, {}), ours[name]):
                raise ValueError(f"{directory} belongs to another {what}: {'; '.join(differing)}")
    if not (directory / "documents.safetensors").exists():
        ids = {name: torch.from_numpy(text[name].document_ids(run.model.context))
               for name in corpus.HELD_OUT}  # fmt: skip
        files.save_tensors(directory / "documents.safetensors", ids)
    if not (directory / "tokenizer.json").exists():
        files.write_text(directory / "tokenizer.json", text.tokenizer.to_str(pretty=True))
    if "run" not in about:
        described = dataclasses.asdict(run)
        for extent in ("runtime", "trajectories", "cycles"):  # the run may grow in these
            del described[extent]
        files.write_text(path, json.dumps({**about, **ours, "run": described}, indent=1))


def described_run(directory: Path) -> config.Run:
    """The run that a directory says it holds; of no extent yet: that is for `result.json`.

    Raises:
        FileNotFoundError: it is no run directory.
        ValueError: it was written before it held its config; says what to do.
    """
    path = directory / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"{directory} is no run directory: it has no run.json")
    about = files.read_json(path)
    if "run" not in about:
        raise ValueError(f"{path} is of an earlier q0lib; train_population adds what it lacks")
    parts: dict[str, Any] = {
        "corpus": config.Corpus,
        "model": config.Model,
        "method": config.Method,
    }
    if about["run"].get("teaching"):
        parts["teaching"] = config.Teaching
    try:
        built = {name: kind(**about["run"].pop(name)) for name, kind in parts.items()}
        return config.Run(
            **built, **about["run"], trajectories=0, cycles=0, runtime=config.Runtime()
        )
    except (TypeError, LookupError) as error:
        raise ValueError(f"{path} is of another q0lib ({error})") from error


def _differences(theirs: dict, ours: dict, prefix: str = "") -> list[str]:
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        left, right = theirs.get(name), ours.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            found += _differences(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append(f"{prefix}{name} is {left!r} there and {right!r} here")
    return found


def write_result(run: config.Run, directory: Path) -> None:
    """Declare N x C complete, beside whatever was declared before, with the totals of it all."""
    cycles = completed(directory)
    cycles += [0] * (run.trajectories - len(cycles))
    for trajectory, declared in enumerate(cycles):
        there = 0  # what was declared before may have been lost since
        while there < declared and member_path(directory, trajectory, there).exists():
            there += 1
        cycles[trajectory] = max(there, run.cycles if trajectory < run.trajectories else 0)
    while not cycles[-1]:
        cycles.pop()
    last = [
        read_record(member_path(directory, trajectory, count - 1))
        for trajectory, count in enumerate(cycles)
    ]
    totals = {name: sum(record[name] for record in last) for name in ("epochs", *SPENT)}
    text = json.dumps({"key": run.key, "cycles": cycles, **totals}, indent=1)
    files.write_text(directory / "result.json", text)


# --- reading -----------------------------------------------------------------------------------


def completed(directory: Path) -> list[int]:
    """Cycles that each trajectory of the directory is declared complete for; [] when none is."""
    path = directory / "result.json"
    return files.read_json(path)["cycles"] if path.exists() else []


def has_member(run: config.Run, directory: Path, trajectory: int, cycle: int) -> bool:
    """Whether a member is there, with its weights where the run keeps them.

    Raises:
        ValueError: one of its files was cut short; says which.
    """
    paths = [member_path(directory, trajectory, cycle)]
    if keeps_weights(run, cycle):
        paths.append(weights_path(directory, trajectory, cycle))
    if not all(path.exists() for path in paths):
        return False
    for path in paths:
        files.open_tensors(path, verify=False)
    return True


def is_complete(run: config.Run, directory: Path | None = None) -> bool:
    """Whether the run was declared complete, and every member is there to be loaded."""
    directory = directory or run.directory
    declared = completed(directory)[: run.trajectories]
    return (
        len(declared) == run.trajectories
        and min(declared) >= run.cycles
        and all(
            has_member(run, directory, trajectory, cycle)
            for trajectory in range(run.trajectories)
            for cycle in range(run.cycles)
        )
    )


def load(run: config.Run, directory: Path | None = None) -> Population:
    """Read the population of a complete run, every row checked against its checksum.

    Raises:
        FileNotFoundError: the run is not complete.
        ValueError: a damaged file, or members that were evaluated on different streams of tokens.
    Warns:
        UserWarning: the members were trained by different code.
    """
    directory = directory or run.directory
    if not is_complete(run, directory):
        raise FileNotFoundError(
            f"{run.name} (seed {run.seed}) needs {run.trajectories} trajectories x {run.cycles} "
            f"cycles in {directory}; it is not complete: train it first"
        )
    places: dict[str, list[files.Place]] = {split: [] for split in corpus.HELD_OUT}
    found: list[dict[str, Any]] = []
    for trajectory in range(run.trajectories):
        for cycle in range(run.cycles):
            path = member_path(directory, trajectory, cycle)
            rows_of, about = files.open_tensors(path)
            record = json.loads(about["record"])
            if found and record["fingerprints"] != found[0]["fingerprints"]:
                raise ValueError(
                    f"{path} was evaluated on other tokens than the members before it: "
                    f"{record['fingerprints']} against {found[0]['fingerprints']}"
                )
            found.append(record)
            for split in corpus.HELD_OUT:
                places[split].append(rows_of[split])
    if len({json.dumps(record["code"]) for record in found if "code" in record}) > 1:
        warnings.warn(f"{directory} mixes members that different code has trained", stacklevel=2)
    members = pd.DataFrame(found).drop(columns=["fingerprints", "code"], errors="ignore")
    P = {split: rows.probabilities(each) for split, each in places.items()}
    return Population(run, directory, P, members, _documents(directory))


def _documents(directory: Path) -> dict[str, np.ndarray]:
    path = directory / "documents.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; train_population writes it anew")
    return {split: place.read() for split, place in files.open_tensors(path)[0].items()}


def read_record(path: Path) -> dict[str, Any]:
    """What a member's file says of it: a row of `Population.members`.

    Raises:
        ValueError: the file is damaged; says what to do.
    """
    return json.loads(files.open_tensors(path, verify=False)[1]["record"])


def records(directory: Path) -> Iterator[dict[str, Any]]:
    """What each member that is there says of itself, whatever the run is complete for."""
    for path in sorted(directory.glob("t*/c*.safetensors")):
        if not path.name.endswith(".weights.safetensors"):
            yield read_record(path)
