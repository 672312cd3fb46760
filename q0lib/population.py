"""The run directory: what training leaves, and how it is read back.

    <run>/run.json                what decides the run, and where and with what it was started
    <run>/documents.safetensors   the document of every held-out token
    <run>/t00/c0000.safetensors   member (trajectory 0, cycle 0): log p of every held-out token
    <run>/t00/c0000.weights.safetensors   its weights, when they are kept
    <run>/t00/checkpoint.pt       where to go on; last good state (checkpoint-further.pt: of an
                                  earlier, longer training, while lost members are made again)
    <run>/result.json             written last: how far the run is complete, and what it cost

Every file appears by rename. A population of N trajectories and C cycles is complete when
`result.json` says so and its members are there; a larger run contains every smaller one.
"""

import dataclasses
import functools
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from q0lib import config, corpus, distill, files, paths
from q0lib.model import GPT

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors")
SPENT = ("steps", "tokens", "flops", "train_seconds", "wall_seconds")  # by a trajectory so far


@dataclass(frozen=True)
class Population:
    """M snapshots: `P[split]` [M, T] holds the probability each gives to every true token.

    `members` has one row a member, in the order of P: trajectory, cycle, and what training up to
    its end cost (epochs, tokens, steps, flops, train_seconds: of its own trajectory), and its
    mean loss on training batches and on each held-out split, in nats per token.
    """

    run: config.Run
    directory: Path
    P: dict[str, np.ndarray]
    members: pd.DataFrame
    documents: dict[str, np.ndarray]  # document of each token of P, by split

    def __len__(self) -> int:
        return len(self.members)

    def prefix(self, trajectories: int, cycles: int) -> "Population":
        """The population as it was after `cycles` cycles of the first `trajectories`."""
        if not (0 < trajectories <= self.run.trajectories and 0 < cycles <= self.run.cycles):
            raise ValueError(
                f"prefix must be within {self.run.trajectories} trajectories x {self.run.cycles} "
                f"cycles, got {trajectories} x {cycles}"
            )
        members = self.members
        kept = ((members.trajectory < trajectories) & (members.cycle < cycles)).to_numpy()
        return Population(
            run=dataclasses.replace(self.run, trajectories=trajectories, cycles=cycles),
            directory=self.directory,
            P={split: rows[kept] for split, rows in self.P.items()},
            members=members[kept].reset_index(drop=True),
            documents=self.documents,
        )

    def weights_path(self, member: int) -> Path:
        """Where the weights of a member are, if `runtime.keep_weights` kept them."""
        row = self.members.iloc[member]
        return weights_path(self.directory, int(row.trajectory), int(row.cycle))

    @property
    def flops(self) -> float:
        """FLOPs spent on the whole population, teacher passes included, evaluation not."""
        return float(self.members.groupby("trajectory").flops.max().sum())


def member_path(directory: Path, trajectory: int, cycle: int) -> Path:
    return directory / f"t{trajectory:02d}" / f"c{cycle:04d}.safetensors"


def weights_path(directory: Path, trajectory: int, cycle: int) -> Path:
    return member_path(directory, trajectory, cycle).with_suffix(".weights.safetensors")


# --- writing -----------------------------------------------------------------------------------


@torch.no_grad()
def held_out_log_probs(
    model: GPT, split: corpus.Split, dtype: torch.dtype, batch: int = 32
) -> torch.Tensor:
    """log p of every scored token of a held-out split, nats, fp32 [T], in the split's order.

    The model is used as it is evaluated (no dropout) and left as it was.
    """
    context, softcap = model.config.context, model.config.softcap
    device = model.head.weight.device
    training = model.training
    model.eval()
    rows = corpus.held_out_rows(split.tokens, context)
    if rows < 1:
        raise ValueError(
            f"{split.name}_tokens must be > context ({context}), got {len(split.tokens)}"
        )
    parts = []
    for first in range(0, rows, batch):
        block = corpus.held_out(split, context, first, min(batch, rows - first))
        tokens = torch.from_numpy(block).to(device)
        hidden = model(tokens[:, :-1], dtype).flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts.append(distill.token_log_probs(hidden, model.head.weight, targets, softcap))
    model.train(training)
    return torch.cat(parts).cpu()


def write_member(path: Path, log_probs: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Save a member's rows and its record (plain values), whole or not at all."""
    with files.replacing(path) as temporary:
        save_file(log_probs, temporary, metadata={"record": json.dumps(record)})


def write_weights(path: Path, model: GPT) -> None:
    """Save the plain module's weights (no prefix of a compiler or wrapper in their names)."""
    with files.replacing(path) as temporary:
        save_file({name: value.contiguous() for name, value in model.state_dict().items()},
                  temporary)  # fmt: skip


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a snapshot, for `load_state_dict(..., strict=True)`.

    Raises:
        FileNotFoundError: they were not kept; says how they are.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: train the run with runtime.keep_weights=true to keep weights "
            "(a finished run without them is trained again, to the same bits)"
        )
    return load_file(path)


def open_directory(run: config.Run, directory: Path, text: corpus.Text) -> None:
    """Create the run's directory, or make sure that it belongs to this run and this text.

    Raises:
        ValueError: the directory holds another config or was trained on other tokens; names the
            values that differ.
    """
    path = directory / "run.json"
    ours = {"decides": json.loads(json.dumps(run.decides)), "tokens": text.fingerprints}
    if path.exists():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        for name, what in (("decides", "config"), ("tokens", "text (its source has changed)")):
            if differing := _differences(theirs[name], ours[name]):
                raise ValueError(f"{directory} belongs to another {what}: {'; '.join(differing)}")
        return
    ids = {name: torch.from_numpy(text[name].document_ids(run.model.context))
           for name in corpus.HELD_OUT}  # fmt: skip
    with files.replacing(directory / "documents.safetensors") as temporary:
        save_file(ids, temporary)
    about = {"key": run.key, "preset": run.preset, "method": run.name, **provenance()}
    files.write_text(path, json.dumps({**about, **ours}, indent=1))


def _differences(theirs: dict, ours: dict, prefix: str = "") -> list[str]:
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        left, right = theirs.get(name), ours.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            found += _differences(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append(f"{prefix}{name} is {left!r} there and {right!r} here")
    return found


@functools.cache
def provenance() -> dict[str, Any]:
    """Versions, commit and machine: where a number was made."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "platform": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
    }


def _commit() -> str:
    """The checkout's commit, with a + when files differ from it; "unknown" outside a checkout."""
    git = ["git", "-C", str(paths.ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "q0lib"], capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def write_result(run: config.Run, directory: Path) -> None:
    """Declare N x C complete, beside whatever was declared before, with the totals of it all."""
    cycles = completed(directory)
    cycles += [0] * (run.trajectories - len(cycles))
    cycles[: run.trajectories] = [max(c, run.cycles) for c in cycles[: run.trajectories]]
    records = [
        read_record(member_path(directory, trajectory, count - 1))
        for trajectory, count in enumerate(cycles)
    ]
    totals = {name: sum(record[name] for record in records) for name in ("epochs", *SPENT)}
    text = json.dumps({"key": run.key, "cycles": cycles, **totals}, indent=1)
    files.write_text(directory / "result.json", text)


# --- reading -----------------------------------------------------------------------------------


def completed(directory: Path) -> list[int]:
    """Cycles that each trajectory of the directory is declared complete for; [] when none is."""
    path = directory / "result.json"
    return json.loads(path.read_text(encoding="utf-8"))["cycles"] if path.exists() else []


def has_member(run: config.Run, directory: Path, trajectory: int, cycle: int) -> bool:
    """Whether a member is there, with its weights where the run keeps them."""
    weights = run.runtime.keep_weights or (
        run.method.teacher == "previous_member" and cycle + 1 == run.method.cycles
    )
    return member_path(directory, trajectory, cycle).exists() and (
        not weights or weights_path(directory, trajectory, cycle).exists()
    )


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
    """Read the population of a complete run.

    Raises:
        FileNotFoundError: the run is not complete.
        ValueError: members that were evaluated on different streams of tokens.
    """
    directory = directory or run.directory
    if not is_complete(run, directory):
        raise FileNotFoundError(
            f"{run.name} (seed {run.seed}) needs {run.trajectories} trajectories x {run.cycles} "
            f"cycles in {directory}; it is not complete: train it first"
        )
    rows: dict[str, list[np.ndarray]] = {split: [] for split in corpus.HELD_OUT}
    records: list[dict[str, Any]] = []
    for trajectory in range(run.trajectories):
        for cycle in range(run.cycles):
            path = member_path(directory, trajectory, cycle)
            record = read_record(path)
            if records and record["fingerprints"] != records[0]["fingerprints"]:
                raise ValueError(
                    f"{path} was evaluated on other tokens than the members before it: "
                    f"{record['fingerprints']} against {records[0]['fingerprints']}"
                )
            records.append(record)
            with safe_open(path, framework="numpy") as file:
                for split in corpus.HELD_OUT:
                    rows[split].append(np.exp(file.get_tensor(split)))
    documents = _documents(directory)
    members = pd.DataFrame(records).drop(columns="fingerprints")
    return Population(
        run, directory, {name: np.stack(each) for name, each in rows.items()}, members, documents
    )


def _documents(directory: Path) -> dict[str, np.ndarray]:
    with safe_open(directory / "documents.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in corpus.HELD_OUT}


def read_record(path: Path) -> dict[str, Any]:
    """What a member's file says of it: a row of `Population.members`.

    Raises:
        ValueError: the file is damaged; says what to do.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return json.loads(file.metadata()["record"])
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and rerun") from error
