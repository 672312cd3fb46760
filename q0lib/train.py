"""Train a population: what is missing of it, with a bar, stopped and gone on with at will.

    python -m q0lib.train --preset cpu --method q0 --epochs 64
    torchrun --standalone --nproc-per-node=8 -m q0lib.train --preset gpu --method q0

The second trains each trajectory on eight devices together (see `ranks`). Ctrl-C saves; the same
command goes on, on any number of devices.
"""

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from q0lib import (
    command,
    config,
    corpus,
    evaluate,
    lessons,
    memory,
    population,
    presets,
    provenance,
    ranks,
    runtime,
    student,
)
from q0lib.checkpoint import Checkpoint
from q0lib.model import GPT, forward_flops, parameter_count
from q0lib.runtime import Stopped
from q0lib.trajectory import Trajectory, planned_cycles

__all__ = ["Stopped", "estimate", "train_members", "train_population", "train_trajectory"]


def train_population(
    run: config.Run,
    text: corpus.Text | None = None,
    *,
    directory: Path | None = None,
    progress: bool = True,
) -> population.Population:
    """Train what is missing of a run and return its population.

    Finished members are reused, a stopped trajectory goes on where its checkpoint stands, and a
    run that is a prefix of what is there trains nothing. Several processes may train one run: a
    trajectory that another one holds is left to it, and waited for at the end.

    Raises:
        Stopped: after Ctrl-C, SIGTERM or SIGHUP, with everything saved.
        ValueError: the directory belongs to another config, its members were trained by other
            code (see `runtime.other_code`), or a teacher does not fit (`student.check`).
        FloatingPointError: the loss is no longer finite.
    """
    directory = directory or run.directory
    train_members(run, text, directory=directory, progress=progress)
    if not ranks.firsts(population.is_complete(run, directory)):
        with ranks.locked(directory), ranks.one_after_rank_0():
            if ranks.rank() == 0:
                population.write_result(run, directory)
    return population.load(run, directory)


def train_members(
    run: config.Run,
    text: corpus.Text | None = None,
    *,
    directory: Path | None = None,
    only: Sequence[int] | None = None,
    progress: bool = True,
) -> None:
    """Train what is missing of a run, or `only` of these trajectories, and declare nothing.

    So processes that no lock reaches, on machines of their own, can be given trajectories each;
    `train_population` finds what they have trained, and completes it.

    Raises:
        ValueError: `only` names what the run has not, or, where each trajectory is taught by the
            one before it, not all of it; and whatever `train_population` raises.
    """
    in_order = run.method.teacher == "previous_member"  # each waits for the one before it
    left = list(range(run.trajectories) if only is None else only)
    if not set(left) <= set(range(run.trajectories)):
        raise ValueError(f"only must be of {run.trajectories} trajectories, got {left}")
    if in_order and len(left) < run.trajectories:
        raise ValueError(f"trajectories of {run.name} are trained in order, got only {left}")
    directory = directory or run.directory
    runtime.device(run.runtime.device)
    text = text or corpus.load(run.corpus)
    if run.teaching is not None:
        student.check(run.teaching, text)
    _agree(run, text, directory)
    if ranks.firsts(population.is_complete(run, directory)):
        return
    run = memory.fitted(run)
    for record in population.records(directory):
        _check_code(run, record, directory)
    if run.teaching is not None and run.teaching.generated_tokens:
        text = student.lengthened(text, run, progress=progress and not ranks.rank())
        ranks.agree(text=text.fingerprints)
    for cycle in planned_cycles(run, text):
        ranks.check(run.runtime, cycle.rows_per_step)
    steps = sum(cycle.steps for cycle in planned_cycles(run, text))
    with (
        runtime.threads(run.runtime.threads),
        runtime.stop_requests() as stop_requested,
        tqdm(total=len(left) * steps, desc=f"{run.name} seed {run.seed}", unit="step",
             disable=not progress or ranks.rank() > 0, mininterval=1.0) as bar,
    ):  # fmt: skip
        waits = in_order
        while left:
            for index in list(left):
                folder = population.trajectory_path(directory, index)
                with ranks.locked(folder, wait=waits, stop_requested=stop_requested) as ours:
                    if not ours:
                        continue
                    waits = in_order
                    left.remove(index)
                    if ranks.firsts(_is_trained(run, directory, index)):
                        bar.update(steps)
                    else:
                        train_trajectory(run, index, text, directory, stop_requested, bar)
            waits = True  # only what others hold is left


def _agree(run: config.Run, text: corpus.Text, directory: Path) -> None:
    """Open the run's directory; of several ranks the first, once all are seen to want the same."""
    ranks.agree(
        run=(run.key, run.trajectories, run.cycles), text=text.fingerprints, code=provenance.code(),
        versions=provenance.provenance()["versions"], reduce=run.runtime.reduce,
        micro_batch=run.runtime.micro_batch, threads=run.runtime.threads or torch.get_num_threads(),
    )  # fmt: skip
    with ranks.one_after_rank_0():
        if ranks.rank() == 0:
            population.open_directory(run, directory, text)
    path = directory / "run.json"
    held = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "nothing"
    ranks.agree(folder=f"{held} in {path}")


def _is_trained(run: config.Run, directory: Path, index: int) -> bool:
    return all(population.has_member(run, directory, index, c) for c in range(run.cycles))


def train_trajectory(
    run: config.Run,
    index: int,
    text: corpus.Text,
    directory: Path,
    stop_requested: Callable[[], bool],
    bar: tqdm,
) -> None:
    """Train one trajectory to its end, leaving a member at the end of each cycle.

    Raises:
        Stopped: when `stop_requested()` turns true; the state is saved.
        FloatingPointError: the loss is no longer finite.
    """
    one = Trajectory(run, index, text)
    checkpoint = Checkpoint(population.trajectory_path(directory, index))
    under = runtime.decides_bits(run.runtime, one.device) + ranks.decide_bits(run.runtime)
    writes = ranks.rank() == 0

    def reached(cycles: int) -> bool:
        return all(population.has_member(run, directory, index, c) for c in range(cycles))

    with ranks.one_after_rank_0():  # who may put a state aside
        state = checkpoint.newest(one.device, under, reached)
    ranks.agree(start=(state["cycle"], state["step"]) if state else None)
    if state:
        _check_code(run, state, checkpoint.path)
        one.restore(state)
    elif run.teaching is not None and run.teaching.start >= 0:
        one.model.load_state_dict(student.start(run.teaching, run.model), strict=True)
    if run.method.teacher == "previous_member" and index >= run.method.distill_after:
        path = population.weights_path(directory, index - 1, run.cycles - 1)
        one.taught_by(population.read_weights(path))
    if run.teaching is not None:
        mixture = student.teacher(run.teaching, one.device, one.dtype)
        kept = None
        if run.runtime.cache_lessons:
            kept = lessons.Kept(mixture, one.stream, run.teaching)
        one.taught_by_mixture(mixture, kept)
    bar.update(int(one.spent["steps"]))
    clock = runtime.Clock(one.spent["wall_seconds"], run.runtime.checkpoint_seconds)
    while one.cycle < run.cycles:
        loss = one.train_step()
        bar.update()
        bar.set_postfix_str(f"trajectory {index} cycle {one.cycle} loss {loss:.3f}", refresh=False)
        one.spent["wall_seconds"] = clock.seconds
        if one.at_end_of_cycle:
            _leave_member(one, text, directory, under)
            one.next_cycle()
        stop = ranks.any_of(stop_requested())  # on all ranks after the same step
        if (stop or clock.due()) and writes:
            checkpoint.save(_stamped(one), under)
        if stop:
            ranks.everyones(None)  # nobody leaves, and has the others ended, before all is saved
            raise Stopped("training was stopped and saved; run it again to go on")
    longer = run.method.cycles != 1  # a longer run goes on from here
    if longer and writes:
        checkpoint.save(_stamped(one), under)
    if writes:
        checkpoint.finish(one.cycle, one.device, longer=longer)


def _leave_member(one: Trajectory, text: corpus.Text, directory: Path, under: str) -> None:
    """Evaluate the snapshot of this cycle and write it."""
    run, snapshot = one.run, one.snapshot()
    ranks.agree(weights=_bits(snapshot))
    log_probs = {
        split: evaluate.held_out_log_probs(snapshot, text[split], one.dtype)
        for split in corpus.HELD_OUT
    }
    if not all(rows.isfinite().all() for rows in log_probs.values()):
        raise FloatingPointError(
            f"the snapshot of cycle {one.cycle}, trajectory {one.index} gives probabilities that "
            "are not finite; lower the learning rates"
        )
    if ranks.rank():
        return
    record = {
        "trajectory": one.index,
        "cycle": one.cycle,
        "epochs": one.spent["tokens"] / (one.stream.rows_per_epoch * one.stream.context),
        "train_loss": one.cycle_loss,
        **{f"{split}_loss": -rows.double().mean().item() for split, rows in log_probs.items()},
        **one.spent,
        "fingerprints": {split: text[split].fingerprint for split in corpus.HELD_OUT},
        "commit": provenance.provenance()["commit"],
        "code": provenance.code(),
        "runtime": under,
        **ranks.record(run.runtime),
    }
    if population.keeps_weights(run, one.cycle):
        path = population.weights_path(directory, one.index, one.cycle)
        population.write_weights(path, snapshot)
    path = population.member_path(directory, one.index, one.cycle)
    population.write_member(path, log_probs, record)


def _bits(model: GPT) -> int:
    """A number that two models share if their weights have the same bits."""
    if ranks.count() == 1:
        return 0  # nobody asks
    return sum(int(each.detach().view(torch.int32).long().sum()) for each in model.parameters())


def _stamped(one: Trajectory) -> dict[str, Any]:
    """A trajectory's state, with the commit and the code that took it there."""
    made = {"commit": provenance.provenance()["commit"], "code": provenance.code()}
    return one.state() | made


def _check_code(run: config.Run, held: dict[str, Any], where: Path) -> None:
    """Refuse to go on from a member's record or a checkpoint of other code, unless asked to.

    Those from before this was noted say nothing of their code: they are believed.
    """
    theirs, ours = held.get("code", {}), provenance.code()
    differing = [f"q0lib/{name}.py" for name in theirs if theirs[name] != ours.get(name)]
    if not differing:
        return
    what = f"{where} holds what commit {held['commit']} trained, by other code in "
    what += ", ".join(differing)
    if not run.runtime.other_code:
        raise ValueError(
            f"{what}: go back to that code, remove the folder to train anew, or set "
            "runtime.other_code=true to mix members of both"
        )
    warnings.warn(f"{what}; members of both will be mixed", stacklevel=3)


def estimate(run: config.Run) -> dict[str, float]:
    """What a run will need, before it is started: parameters, training tokens, FLOPs, memory.

    `flops` counts student and teacher passes, not evaluation; `taught` is the share of training
    that has a teacher; `memory` is bytes on the run's device at the peak: see `memory.training`.
    """
    model, method = run.model, run.method
    generated = run.teaching.generated_tokens if run.teaching is not None else 0
    tokens = run.epochs * (run.corpus.train_tokens + generated)
    members = run.trajectories if method.teacher == "previous_member" else run.cycles
    taught = 0.0 if method.teacher == "none" else max(0, members - method.distill_after) / members
    teacher = forward_flops(model)
    if run.teaching is not None:
        teacher = student.lesson_flops(run.teaching)
        if run.runtime.cache_lessons and method.packings:
            teacher *= min(1.0, method.packings / (run.epochs / run.trajectories))
    own = (1 - method.loop_from) * forward_flops(model, True, multi_token=True)
    own += method.loop_from * forward_flops(model, False, multi_token=True)
    return {
        "parameters": parameter_count(model),
        "tokens": tokens,
        "taught": taught,
        "flops": tokens * (3 * own + taught * teacher),
        "memory": memory.training(memory.fitted(run), taught > 0),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = command.parser("q0lib.train", __doc__ or "")
    parser.add_argument("--preset", default="quick", help=f"{', '.join(presets.NAMES)}")
    parser.add_argument("--method", default="q0", help="one of the preset's, default q0")
    parser.add_argument("--epochs", type=float, help="total budget (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", dest="overrides",
        help="such as q0.alpha=0.3 or runtime.micro_batch=8; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--teachers", nargs="+", metavar="RUN", help="of a student: run directories"
    )
    parser.add_argument("--teacher-k", type=int, help="how many of their members (default: all)")
    given = parser.parse_args(argv)

    def work() -> None:
        study = presets.load(given.preset, seed=given.seed, overrides=given.overrides)
        taught = student.taught_by(given.teachers, given.teacher_k) if given.teachers else None
        run = study.run(given.method, given.epochs, taught)
        with ranks.joined(run.runtime.device):
            if ranks.rank():  # what all have to say is said once
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115
                warnings.simplefilter("ignore")
            print(
                f"{run.trajectories} trajectories x {run.cycles} cycles, on {ranks.count()} ranks"
            )
            print(f"directory {run.directory}")
            try:
                trained = train_population(run)
            except FloatingPointError as error:
                raise RuntimeError(str(error)) from error
            if ranks.rank() == 0:
                trained.keep_mixture()
            columns = ["trajectory", "cycle", "epochs", "train_loss", "validation_loss"]
            print(trained.members[columns].round(4).to_string(index=False))

    return command.status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
