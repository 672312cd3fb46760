"""One trajectory of cycles, or one independent run, by the same steps.

Its state is its weights, its optimizers, its teacher and its step. Everything else (learning
rate, batch, dropout draws, perturbation) is a pure function of the config, the seed and the step,
so a run that was stopped goes on bit for bit, on a CPU and at the same `Runtime` settings.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from q0lib import config, corpus, distill, lessons, optim, ranks, runtime, schedule
from q0lib.model import GPT, forward_flops

# What a random draw is for; part of its seed, so that no two uses share a stream.
_WEIGHTS, _DATA, _DROPOUT, _PERTURBATION = range(4)
SPENT = ("steps", "tokens", "flops", "train_seconds", "wall_seconds")  # by a trajectory so far


def planned_cycles(
    run: config.Run, text: corpus.Text, count: int | None = None
) -> list[schedule.Cycle]:
    """The cycles of a run (or its first `count`), in steps and rows."""
    count = run.cycles if count is None else count
    rows = len(text["train"].tokens) // (run.model.context + 1)
    method = run.method
    per_step = [
        schedule.batch_tokens(c, method.horizon, method.batch_tokens, method.edge_batch_tokens)
        // run.model.context
        for c in range(count)
    ]
    ends = schedule.snapshot_epochs(count, method.epochs_per_cycle, method.tail)
    return schedule.plan(ends, rows, per_step)


class Trajectory:
    """Trajectory `index` of a run at its start; `restore` takes it to where a `state` was.

    `step` counts from 0 within `cycle`; `spent` adds up over the trajectory; `newest` is the
    snapshot or mixture that may teach, `kept` what such a mixture says, read from disk; `average`
    the mean of weights, late in a cycle.
    """

    def __init__(self, run: config.Run, index: int, text: corpus.Text) -> None:
        self.run, self.index, self.method = run, index, run.method
        self.dtype = runtime.DTYPES[run.precision]
        self.device = runtime.device(run.runtime.device)
        self.stream = corpus.EpochStream(
            text["train"], run.model.context, (run.seed, index, _DATA), run.method.packings
        )
        self.model = GPT(run.model).initialise(self._generator(_WEIGHTS)).to(self.device)
        self.forward: Callable[..., Tensor] = self.model
        if run.runtime.compile:
            self.forward = torch.compile(self.model)
        self.optimizers = optim.optimizers(self.model, self.method)
        self.cycles = planned_cycles(run, text)
        self.cycle = self.step = 0
        self.cycle_loss = 0.0
        self.spent: dict[str, float] = dict.fromkeys(SPENT, 0)
        self.average: dict[str, Tensor] | None = None
        self.newest: distill.Teacher | None = None
        self.kept: lessons.Kept | None = None

    @property
    def teacher(self) -> distill.Teacher | None:
        """Who teaches in this cycle: nobody until `distill_after`, then the newest snapshot, or
        the mixture that the run is taught by."""
        in_cycles = self.method.teacher in ("chain", "mixture")
        if in_cycles and self.cycle < self.method.distill_after:
            return None
        return self.newest

    @property
    def at_end_of_cycle(self) -> bool:
        return self.step == self.cycles[self.cycle].steps

    # --- one step ------------------------------------------------------------------------------

    def train_step(self) -> float:
        """Take one optimizer step; returns the batch's cross-entropy, nats per token.

        Raises:
            FloatingPointError: the loss, or its gradient, is no longer finite.
        """
        started = time.perf_counter()
        method, (start, _, rows) = self.method, self.cycles[self.cycle]
        if self.step == 0 and self.cycle > 0 and not method.tail:
            self.perturb()
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
        first = start + self.step * rows
        block = torch.from_numpy(self.stream.rows(first, rows)).to(self.device)
        looped = done >= method.loop_from * steps
        self.model.train()
        size = ranks.micro_batch(self.run.runtime, rows)
        parts, losses = block.split(size), []
        gradients = ranks.Gradients(self.model, len(parts), self.run.runtime.reduce)
        for number in gradients.mine():
            # A micro-batch has draws of its own, whichever rank it is passed on.
            torch.manual_seed(self._seed(_DROPOUT, int(self.spent["steps"]), number))
            total = rows * self.run.model.context
            losses.append(self._backward(parts[number], first + number * size, total, looped))
        loss = 0.0
        for share in ranks.in_order(losses):
            loss += share
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
        self.spent["flops"] += tokens * (3 * student + self._lesson_flops(first))
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
            return self.step, self.cycles[self.cycle].steps
        before = sum(cycle.steps for cycle in self.cycles[: self.cycle])
        return before + self.step, sum(cycle.steps for cycle in self.cycles)

    def _lesson_flops(self, row: int) -> float:
        """FLOPs a token that the lesson of this row costs; to read a kept one costs nothing."""
        if self.teacher is None or (self.kept is not None and self.kept.repeats(row)):
            return 0.0
        return self.teacher.flops

    def _backward(self, rows: Tensor, first: int, total: int, looped: bool) -> float:
        """Add the gradient of some rows [n, context + 1] of a batch, the `first` one of the stream
        and those after it; return their share of CE."""
        method, model = self.method, self.model
        inputs, following = rows[:, :-1], rows[:, 1:]
        taught = None
        if self.teacher is not None:
            read = self.kept and self.kept.lesson(first, len(rows))
            lesson = read or self.teacher.lesson(inputs)
            taught = distill.Distillation(lesson, method.alpha, method.temperature)
        hidden = self.forward(inputs, self.dtype, method.dropout, looped)
        loss, entropy = distill.head_loss(
            hidden.flatten(0, 1), model.head.weight, following.flatten(),
            softcap=model.config.softcap, total=total, teacher=taught,
        )  # fmt: skip
        if model.config.multi_token:
            beyond = torch.full_like(following, distill.IGNORED)
            beyond[:, :-1] = following[:, 1:]
            ahead = model.forward_next(hidden, following, method.dropout).flatten(0, 1)
            extra, _ = distill.head_loss(
                ahead, model.head.weight, beyond.flatten(),
                softcap=model.config.softcap, total=total,
            )  # fmt: skip
            share = 1.0 if taught is None else 1.0 - method.alpha
            loss = loss + share * method.multi_token_weight * extra
        loss.backward()
        return float(entropy)

    def _update_average(self) -> None:
        steps = self.cycles[self.cycle].steps
        if self.step + 1 <= steps * (1 - self.method.ema_fraction):
            return
        weights = self.model.state_dict()
        if self.average is None:
            self.average = {name: value.clone() for name, value in weights.items()}
        else:
            for name, value in weights.items():
                self.average[name].lerp_(value, 1 - self.method.ema_decay)

    # --- between cycles ------------------------------------------------------------------------

    def snapshot(self) -> GPT:
        """The model that this cycle leaves: at the floor, before restart and perturbation."""
        return self.model if self.average is None else self._built(self.average)

    def next_cycle(self) -> None:
        """Let the snapshot of this cycle teach, if it is to, and begin the next."""
        if self.method.teacher == "chain" and self.cycle % self.method.teacher_every == 0:
            self.newest = distill.Teacher([self.snapshot()], dtype=self.dtype)
        self.average = None
        self.cycle, self.step, self.cycle_loss = self.cycle + 1, 0, 0.0

    def taught_by(self, weights: dict[str, Tensor]) -> None:
        """Make a model with these weights the one that may teach."""
        self.newest = distill.Teacher([self._built(weights)], dtype=self.dtype)

    def taught_by_mixture(self, mixture: distill.Teacher, kept: lessons.Kept | None) -> None:
        """Make a mixture the one that teaches throughout, by what is `kept` of it if anything."""
        self.newest, self.kept = mixture, kept

    @torch.no_grad()
    def perturb(self) -> None:
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

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs: tensors and plain values. A mixture that teaches is no
        part of it: it lies where it was trained."""
        newest = None
        if self.newest is not None and self.method.teacher != "mixture":
            newest = self.newest.models[0].state_dict()
        return {
            "cycle": self.cycle,
            "step": self.step,
            "cycle_loss": self.cycle_loss,
            "spent": self.spent,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "newest": newest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken."""
        self.cycle, self.step = state["cycle"], state["step"]
        self.cycle_loss, self.spent = state["cycle_loss"], state["spent"]
        self.model.load_state_dict(state["model"], strict=True)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average = state["average"]
        if state["newest"] is not None:
            self.taught_by(state["newest"])

    def _built(self, weights: dict[str, Tensor]) -> GPT:
        model = GPT(self.run.model).to(self.device)
        model.load_state_dict(weights, strict=True)
        return model

    def _seed(self, purpose: int, number: int = 0, part: int = 0) -> int:
        words = [self.run.seed, self.index, purpose, number, *([part] if part else [])]
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)

    def _generator(self, purpose: int, number: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(purpose, number))
