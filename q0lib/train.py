"""Training a population: what is missing of it, with a bar, stopped and gone on with at will."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from q0lib import (
    config,
    corpus,
    distill,
    evaluate,
    lessons,
    population,
    provenance,
    runtime,
    student,
)
from q0lib.checkpoint import Checkpoint
from q0lib.model import forward_flops, layer_passes, parameter_count
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
    if not population.is_complete(run, directory):
        with runtime.locked(directory):
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
    population.open_directory(run, directory, text)
    if population.is_complete(run, directory):
        return
    for record in population.records(directory):
        _check_code(run, record, directory)
    if run.teaching is not None and run.teaching.generated_tokens:
        text = student.lengthened(text, run, progress=progress)
    steps = sum(cycle.steps for cycle in planned_cycles(run, text))
    with (
        runtime.threads(run.runtime.threads),
        runtime.stop_requests() as stop_requested,
        tqdm(total=len(left) * steps, desc=f"{run.name} seed {run.seed}", unit="step",
             disable=not progress, mininterval=1.0) as bar,
    ):  # fmt: skip
        waits = in_order
        while left:
            for index in list(left):
                folder = population.trajectory_path(directory, index)
                with runtime.locked(folder, wait=waits, stop_requested=stop_requested) as ours:
                    if not ours:
                        continue
                    waits = in_order
                    left.remove(index)
                    if _is_trained(run, directory, index):
                        bar.update(steps)
                    else:
                        train_trajectory(run, index, text, directory, stop_requested, bar)
            waits = True  # only what others hold is left


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
    under = runtime.decides_bits(run.runtime, one.device)

    def reached(cycles: int) -> bool:
        return all(population.has_member(run, directory, index, c) for c in range(cycles))

    if state := checkpoint.newest(one.device, under, reached):
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
        stop = stop_requested()
        if stop or clock.due():
            checkpoint.save(_stamped(one), under)
        if stop:
            raise Stopped("training was stopped and saved; run it again to go on")
    longer = run.method.cycles != 1  # a longer run goes on from here
    if longer:
        checkpoint.save(_stamped(one), under)
    checkpoint.finish(one.cycle, one.device, longer=longer)


def _leave_member(one: Trajectory, text: corpus.Text, directory: Path, under: str) -> None:
    """Evaluate the snapshot of this cycle and write it."""
    run, snapshot = one.run, one.snapshot()
    log_probs = {
        split: evaluate.held_out_log_probs(snapshot, text[split], one.dtype)
        for split in corpus.HELD_OUT
    }
    if not all(rows.isfinite().all() for rows in log_probs.values()):
        raise FloatingPointError(
            f"the snapshot of cycle {one.cycle}, trajectory {one.index} gives probabilities that "
            "are not finite; lower the learning rates"
        )
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
    }
    if population.keeps_weights(run, one.cycle):
        path = population.weights_path(directory, one.index, one.cycle)
        population.write_weights(path, snapshot)
    path = population.member_path(directory, one.index, one.cycle)
    population.write_member(path, log_probs, record)


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
    that has a teacher. `memory` is bytes on the device, roughly: weights, gradients, optimizer
    state, average and teacher; the copies of weights in bf16 that each layer pass keeps for its
    gradient; some 50 bytes of activations a token of a micro-batch, layer pass and unit of width;
    and six chunks of logits.
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
    parameters = parameter_count(model)
    vocabulary = 2 * model.vocab_size * model.width
    fixed = 12 * parameters + 4 * vocabulary  # weights, gradients, momentum; AdamW keeps two
    fixed += 4 * parameters * (method.ema_fraction > 0) + 2 * parameters * (taught > 0)
    fixed += parameters * len(layer_passes(model)) // model.layers * 2
    rows = run.runtime.micro_batch or method.batch_tokens // model.context
    active = 50 * rows * model.context * model.width * len(layer_passes(model))
    active += 6 * 4 * min(distill.GPU_CHUNK_ELEMENTS, rows * model.context * model.vocab_size)
    return {
        "parameters": parameters,
        "tokens": tokens,
        "taught": taught,
        "flops": tokens * (3 * own + taught * teacher),
        "memory": fixed + active,
    }
