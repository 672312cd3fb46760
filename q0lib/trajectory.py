"""Training: one trajectory of cycles, or one independent run, by the same loop.

The state of a trajectory is its weights, its optimizers, its teacher and its step. Everything
else (learning rate, batch, dropout draws, perturbation) is a pure function of the config, the
seed and the step, so a run that was stopped goes on bit for bit, on a CPU and at the same
`Runtime` settings.
"""

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from tqdm import tqdm

from q0lib import config, corpus, distill, files, optim, population, schedule
from q0lib.model import GPT, forward_flops, layer_passes, parameter_count

# What a random draw is for; part of its seed, so that no two uses share a stream.
_WEIGHTS, _DATA, _DROPOUT, _PERTURBATION = range(4)


class Stopped(KeyboardInterrupt):
    """Training was asked to stop (Ctrl-C or SIGTERM) and has saved where to go on."""


def train_population(
    run: config.Run,
    text: corpus.Text | None = None,
    *,
    directory: Path | None = None,
    progress: bool = True,
) -> population.Population:
    """Train what is missing of a run and return its population.

    Finished members are reused, a stopped trajectory goes on where its checkpoint stands, and a
    run that is a prefix of what is there trains nothing. One process trains a trajectory at a
    time; a second one waits for it.

    Raises:
        Stopped: after Ctrl-C or SIGTERM, with everything saved.
        ValueError: the directory belongs to another config.
        FloatingPointError: the loss is no longer finite.
    """
    directory = directory or run.directory
    _device(run)
    text = text or corpus.load(run.corpus)
    population.open_directory(run, directory, text)
    if population.is_complete(run, directory):
        return population.load(run, directory)
    steps = sum(cycle.steps for cycle in plan(run, text))
    with (
        _threads(run.runtime.threads),
        _stop_requests() as stop_requested,
        tqdm(total=run.trajectories * steps, desc=f"{run.name} seed {run.seed}", unit="step",
             disable=not progress, mininterval=1.0) as bar,
    ):  # fmt: skip
        for index in range(run.trajectories):
            with _locked(directory / f"t{index:02d}"):
                if all(population.has_member(run, directory, index, c) for c in range(run.cycles)):
                    bar.update(steps)
                else:
                    Trajectory(run, index, text, directory).train(run.cycles, stop_requested, bar)
    with _locked(directory):
        population.write_result(run, directory)
    return population.load(run, directory)


def plan(run: config.Run, text: corpus.Text, cycles: int | None = None) -> list[schedule.Cycle]:
    """The cycles of a run, in steps and rows."""
    count = run.cycles if cycles is None else cycles
    rows = len(text["train"].tokens) // (run.model.context + 1)
    method = run.method
    per_step = [
        schedule.batch_tokens(c, method.horizon, method.batch_tokens, method.edge_batch_tokens)
        // run.model.context
        for c in range(count)
    ]
    ends = schedule.snapshot_epochs(count, method.epochs_per_cycle, method.tail)
    return schedule.plan(ends, rows, per_step)


def estimate(run: config.Run) -> dict[str, float]:
    """What a run will need, before it is started: parameters, training tokens, FLOPs, memory.

    `flops` counts student and teacher passes, not evaluation; `taught` is the share of training
    that has a teacher. `memory` is bytes on the device, roughly: weights, gradients, optimizer
    state, average and teacher; the copies of weights in bf16 that each layer pass keeps for its
    gradient; some 50 bytes of activations a token of a micro-batch, layer pass and unit of width;
    and six chunks of logits.
    """
    model, method = run.model, run.method
    tokens = run.epochs * run.corpus.train_tokens
    members = run.cycles if method.teacher == "chain" else run.trajectories
    taught = 0.0 if method.teacher == "none" else max(0, members - method.distill_after) / members
    student = (1 - method.loop_from) * forward_flops(model, True, multi_token=True)
    student += method.loop_from * forward_flops(model, False, multi_token=True)
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
        "flops": tokens * (3 * student + taught * forward_flops(model)),
        "memory": fixed + active,
    }


class Trajectory:
    """One trajectory of a run, from where its directory says that it stands."""

    def __init__(self, run: config.Run, index: int, text: corpus.Text, directory: Path) -> None:
        self.run, self.index, self.text, self.directory = run, index, text, directory
        self.method, self.dtype = run.method, _DTYPES[run.precision]
        self.device = _device(run)
        self.stream = corpus.EpochStream(text["train"], run.model.context, (run.seed, index, _DATA))
        self.model = GPT(run.model).initialise(self._generator(_WEIGHTS)).to(self.device)
        self.forward: Callable[..., Tensor] = self.model
        if run.runtime.compile:
            self.forward = torch.compile(self.model)
        self.optimizers = optim.optimizers(self.model, self.method)
        self.plan = plan(run, text)
        self.cycle = self.step = 0  # steps count from 0 within the cycle
        self.cycle_loss = 0.0
        self.spent: dict[str, float] = dict.fromkeys(population.SPENT, 0)
        self.average: dict[str, Tensor] | None = None  # of weights, late in a cycle
        self.newest: GPT | None = None  # the snapshot that may teach, frozen
        self._restore()
        if self.method.teacher == "previous_member" and index >= self.method.distill_after:
            path = population.weights_path(directory, index - 1, run.cycles - 1)
            self.newest = self._frozen(population.read_weights(path))

    def train(self, cycles: int, stop_requested: Callable[[], bool], bar: tqdm) -> None:
        """Train to the end of `cycles` cycles, leaving a member at the end of each.

        Raises:
            Stopped: when `stop_requested()` turns true; the state is saved.
            FloatingPointError: the loss is no longer finite.
        """
        bar.update(int(self.spent["steps"]))
        began = saved = time.monotonic()
        before = self.spent["wall_seconds"]
        while self.cycle < cycles:
            if self.step == 0 and self.cycle > 0 and not self.method.tail:
                self._perturb()
            loss = self.train_step()
            bar.update()
            bar.set_postfix_str(
                f"trajectory {self.index} cycle {self.cycle} loss {loss:.3f}", refresh=False
            )
            now = time.monotonic()
            self.spent["wall_seconds"] = before + now - began
            if self.step == self.plan[self.cycle].steps:
                self._leave_member()
            if stop_requested():
                self._save()
                raise Stopped("training was stopped and saved; run it again to go on")
            if now - saved > self.run.runtime.checkpoint_seconds:
                self._save()
                saved = now
        if self.method.cycles == 1:
            self._checkpoint.unlink(missing_ok=True)  # complete: no longer run goes on from it
        else:
            self._save()
        if self._further.exists() and self._read(self._further)["cycle"] <= self.cycle:
            self._further.unlink()

    @property
    def teacher(self) -> GPT | None:
        """Who teaches in this cycle: nobody until `distill_after`, then the newest snapshot."""
        if self.method.teacher == "chain" and self.cycle < self.method.distill_after:
            return None
        return self.newest

    # --- one step ------------------------------------------------------------------------------

    def train_step(self) -> float:
        """Take one optimizer step; returns the batch's cross-entropy, nats per token."""
        started = time.perf_counter()
        method, (start, _, rows) = self.method, self.plan[self.cycle]
        done, steps = self._progress
        # A cycle's last step runs at the floor; a cosine's last step is still worth taking.
        at = done + 1 if method.schedule == "cyclic" else done
        optim.scale(
            self.optimizers,
            schedule.lr_multiplier(at, steps, method.lr_floor, method.schedule),
            schedule.wd_multiplier(
                at, steps, method.lr_floor, method.wd_floor, method.wd_schedule, method.schedule
            ),
        )
        block = torch.from_numpy(self.stream.rows(start + self.step * rows, rows))
        block = block.to(self.device)
        looped = done >= method.loop_from * steps
        torch.manual_seed(self._seed(_DROPOUT, int(self.spent["steps"])))
        self.model.train()
        loss = 0.0
        for part in block.split(self.run.runtime.micro_batch or rows):
            loss += self._backward(part, rows * self.run.model.context, looped)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), method.grad_clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"training loss is {loss}, gradient norm {norm}, at step {self.step} of cycle "
                f"{self.cycle}, trajectory {self.index}; lower the learning rates or grad_clip"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_average()
        tokens = rows * self.run.model.context
        student = forward_flops(self.run.model, looped, multi_token=True)
        teacher = forward_flops(self.run.model) if self.teacher is not None else 0.0
        self.spent["flops"] += tokens * (3 * student + teacher)
        self.spent["tokens"] += tokens
        self.spent["steps"] += 1
        self.spent["train_seconds"] += time.perf_counter() - started
        self.step += 1
        self.cycle_loss += (loss - self.cycle_loss) / self.step
        return loss

    @property
    def _progress(self) -> tuple[int, int]:
        """Steps done, and all steps, of the stretch over which the learning rate falls once."""
        if not self.method.tail:
            return self.step, self.plan[self.cycle].steps
        before = sum(cycle.steps for cycle in self.plan[: self.cycle])
        return before + self.step, sum(cycle.steps for cycle in self.plan)

    def _backward(self, rows: Tensor, total: int, looped: bool) -> float:
        """Add the gradient of some rows [n, context + 1] of a batch; return their share of CE."""
        method, model = self.method, self.model
        inputs, following = rows[:, :-1], rows[:, 1:]
        targets = following.flatten()
        lesson, teacher = None, self.teacher
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(inputs, self.dtype).flatten(0, 1)
            lesson = distill.Distillation(
                taught, teacher.head.weight, method.alpha, method.temperature
            )
        hidden = self.forward(inputs, self.dtype, method.dropout, looped)
        loss, entropy = distill.head_loss(
            hidden.flatten(0, 1), model.head.weight, targets,
            softcap=model.config.softcap, total=total, teacher=lesson,
        )  # fmt: skip
        if model.config.multi_token:
            beyond = torch.full_like(following, distill.IGNORED)
            beyond[:, :-1] = following[:, 1:]
            ahead = model.forward_next(hidden, following, method.dropout).flatten(0, 1)
            extra, _ = distill.head_loss(
                ahead, model.head.weight, beyond.flatten(),
                softcap=model.config.softcap, total=total,
            )  # fmt: skip
            share = 1.0 if lesson is None else 1.0 - method.alpha
            loss = loss + share * method.multi_token_weight * extra
        loss.backward()
        return float(entropy)

    def _update_average(self) -> None:
        steps = self.plan[self.cycle].steps
        if self.step + 1 <= steps * (1 - self.method.ema_fraction):
            return
        weights = self.model.state_dict()
        if self.average is None:
            self.average = {name: value.clone() for name, value in weights.items()}
        else:
            for name, value in weights.items():
                self.average[name].lerp_(value, 1 - self.method.ema_decay)

    # --- between cycles ------------------------------------------------------------------------

    def _leave_member(self) -> None:
        """At the floor, before restart and perturbation: evaluate and write the snapshot."""
        snapshot = self.model if self.average is None else self._built(self.average)
        log_probs = {
            split: population.held_out_log_probs(snapshot, self.text[split], self.dtype)
            for split in corpus.HELD_OUT
        }
        if not all(rows.isfinite().all() for rows in log_probs.values()):
            raise FloatingPointError(
                f"the snapshot of cycle {self.cycle}, trajectory {self.index} gives probabilities "
                "that are not finite; lower the learning rates"
            )
        record = {
            "trajectory": self.index,
            "cycle": self.cycle,
            "epochs": self.spent["tokens"] / (self.stream.rows_per_epoch * self.stream.context),
            "train_loss": self.cycle_loss,
            **{f"{split}_loss": -rows.double().mean().item() for split, rows in log_probs.items()},
            **self.spent,
            "fingerprints": {split: self.text[split].fingerprint for split in corpus.HELD_OUT},
            "commit": population.provenance()["commit"],
            "runtime": self._runtime,
        }
        last = self.cycle + 1 == self.method.cycles
        if self.run.runtime.keep_weights or (self.method.teacher == "previous_member" and last):
            path = population.weights_path(self.directory, self.index, self.cycle)
            population.write_weights(path, snapshot)
        path = population.member_path(self.directory, self.index, self.cycle)
        population.write_member(path, log_probs, record)
        if self.method.teacher == "chain" and self.cycle % self.method.teacher_every == 0:
            self.newest = distill.frozen_teacher(snapshot, self.dtype)
        self.average = None
        self.cycle, self.step, self.cycle_loss = self.cycle + 1, 0, 0.0

    @torch.no_grad()
    def _perturb(self) -> None:
        """Shake every tensor at the boundary into this cycle, the same on every replica."""
        method = self.method
        sigma = schedule.perturbation(
            self.cycle, method.horizon - 1, method.perturb_start, method.perturb_end
        )
        if not sigma:
            return
        generator = self._generator(_PERTURBATION, self.cycle)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(self.device)
            parameter.add_(noise * (sigma * parameter.std(correction=0)))

    # --- state ---------------------------------------------------------------------------------

    def _save(self) -> None:
        state = {
            "cycle": self.cycle,
            "step": self.step,
            "cycle_loss": self.cycle_loss,
            "spent": self.spent,
            "runtime": self._runtime,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "newest": None if self.newest is None else self.newest.state_dict(),
        }
        with files.replacing(self._checkpoint) as temporary:
            torch.save(state, temporary)

    def _read(self, checkpoint: Path) -> dict[str, Any]:
        try:
            return torch.load(checkpoint, map_location=self.device, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{checkpoint} cannot be read ({type(error).__name__}); delete it and rerun"
            ) from error

    def _restore(self) -> None:
        there = [path for path in (self._checkpoint, self._further) if path.exists()]
        states = [
            state
            for state in map(self._read, there)
            if all(
                population.has_member(self.run, self.directory, self.index, cycle)
                for cycle in range(state["cycle"])
            )
        ]
        if not states:  # a member is gone: train it again from the start, to the same bits
            if there == [self._checkpoint]:
                self._checkpoint.replace(self._further)  # a longer run can still go on from it
            return
        state = max(states, key=lambda state: (state["cycle"], state["step"]))
        if state["runtime"] != self._runtime:
            warnings.warn(
                f"{self._checkpoint.parent} goes on under {self._runtime}, it was begun under "
                f"{state['runtime']}: the result will differ in the last bits",
                stacklevel=4,
            )
        self.cycle, self.step = state["cycle"], state["step"]
        self.cycle_loss, self.spent = state["cycle_loss"], state["spent"]
        self.model.load_state_dict(state["model"], strict=True)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average = state["average"]
        self.newest = None if state["newest"] is None else self._frozen(state["newest"])

    def _built(self, weights: dict[str, Tensor]) -> GPT:
        model = GPT(self.run.model).to(self.device)
        model.load_state_dict(weights, strict=True)
        return model

    def _frozen(self, weights: dict[str, Tensor]) -> GPT:
        return distill.frozen_teacher(self._built(weights), self.dtype)

    @property
    def _runtime(self) -> str:
        """What can change the last bits of a result, though not what is trained."""
        chosen = self.run.runtime
        return (
            f"device {self.device.type}, threads {torch.get_num_threads()}, micro_batch "
            f"{chosen.micro_batch}, compile {chosen.compile}"
        )

    @property
    def _checkpoint(self) -> Path:
        return self.directory / f"t{self.index:02d}" / "checkpoint.pt"

    @property
    def _further(self) -> Path:
        """What an earlier training had come to, while the members behind it are trained again."""
        return self._checkpoint.with_name("checkpoint-further.pt")

    def _seed(self, purpose: int, number: int = 0) -> int:
        words = [self.run.seed, self.index, purpose, number]
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)

    def _generator(self, purpose: int, number: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(purpose, number))


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _device(run: config.Run) -> torch.device:
    name = run.runtime.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"runtime.device must be auto, cpu, or an accelerator of this machine, got {name!r}"
        ) from error


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run with `count` threads (0 = as it is): a sum's order, and so its bits, depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question that the loop asks between steps."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set  # signals belong to the main thread
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: requested.set()) for each in signals]
    try:
        yield requested.is_set
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tqdm.write(f"waiting for another process that trains {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
