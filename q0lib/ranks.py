"""One trajectory on several devices: who computes what, and how the parts become one sum.

torchrun starts a process, a *rank*, for each device; every rank holds the whole model and both
optimizers, and all take the same steps. The micro-batches of a batch are dealt to the ranks in
turn, their gradients are summed over all ranks, and what follows (clipping, Muon, averaging, noise)
every rank does alike. Rank 0 alone writes.

`Runtime.reduce` says how gradients are summed. "ordered": one micro-batch after the other, as a
single process does, so that the same micro-batches give the same bits on any number of ranks.
"all_reduce": by each rank first, and then over the ranks: fewer exchanges, other last bits.

Alone, which is what a process is that torchrun has not started, nothing here does anything.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from q0lib import config, runtime

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # with a rank that neither answers nor hangs up


class Lost(RuntimeError):
    """Another rank has ended, or cannot be reached."""


def count() -> int:
    """How many ranks train together; 1 alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this process is; 0 alone."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Be one of the ranks that torchrun has started, if it has, on a GPU of its own or the CPU.

    Raises:
        ValueError: a device that ranks cannot share, or more ranks on a machine than GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"on several ranks runtime.device must be auto, cpu or cuda, got {device}")
    on_gpu = runtime.device(device).type == "cuda"
    if on_gpu:
        local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= there:
            raise ValueError(f"a GPU is needed for each rank, got rank {local} of {there} GPUs")
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    lost = False
    try:
        yield
    except Lost:
        lost = True  # nobody is there to take leave of
        raise
    finally:
        if not lost:
            dist.destroy_process_group()


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Lost(
            f"rank {rank()} of {count()} has lost another one ({str(error).splitlines()[0]}); "
            "start all of them again to go on from the last checkpoint"
        ) from error


def everyones(value: T) -> list[T]:
    """What each rank says, in the order of ranks; all must ask. Plain values and CPU tensors.

    Raises:
        Lost: one of them cannot say anything any more.
    """
    if count() == 1:
        return [value]
    said: list[Any] = [None] * count()
    with _together():
        dist.all_gather_object(said, value)
    return said


def firsts(value: T) -> T:
    """What rank 0 says: for what it alone can know."""
    return everyones(value)[0]


def any_of(flag: bool) -> bool:
    """Whether it is so on any rank."""
    if count() == 1:
        return flag
    said = torch.tensor([int(flag)])
    with _together():
        dist.all_reduce(said, dist.ReduceOp.MAX)
    return bool(said)


def in_order(mine: Sequence[T]) -> list[T]:
    """The things that were dealt to the ranks in turn, one to each, in their order."""
    each = everyones(list(mine))
    return [part[i] for i in range(len(each[0])) for part in each if i < len(part)]


def dealt(things: Sequence[T]) -> Sequence[T]:
    """This rank's of the things that are dealt to the ranks in turn."""
    return things[rank() :: count()]


def agree(**facts: Any) -> None:
    """Make sure that all ranks are about to do the same.

    Raises:
        ValueError: one of them has another value of one of these facts.
    """
    for number, theirs in enumerate(everyones(facts)):
        for name, value in theirs.items():
            if value != facts[name]:
                raise ValueError(
                    f"all ranks must have the same {name}: rank {rank()} has {facts[name]}, "
                    f"rank {number} {value}"
                )


@contextmanager
def one_after_rank_0() -> Iterator[None]:
    """Let rank 0 do this before the others do."""
    if rank():
        everyones(None)
    yield
    if not rank():
        everyones(None)


@contextmanager
def locked(
    folder: Path, *, wait: bool = True, stop_requested: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """`runtime.locked` for all ranks: rank 0 holds the lock, and a stop on any of them is heard."""
    if rank() == 0:
        heard: Callable[[], bool] = lambda: any(everyones(stop_requested()))  # noqa: E731
        with runtime.locked(folder, wait=wait, stop_requested=heard) as ours:
            everyones("held" if ours else "left")
            yield ours
        return
    while (answer := everyones(stop_requested()))[0] not in ("held", "left"):
        if any(answer):
            raise runtime.Stopped("stopped while another process trained what was left")
    yield answer[0] == "held"


def micro_batch(how: config.Runtime, rows: int) -> int:
    """Rows that are passed at once, of a batch of `rows`; by default a rank's share."""
    return how.micro_batch or max(1, rows // count())


def check(how: config.Runtime, rows: int) -> None:
    """ValueError unless every rank has something to do in a batch of `rows`."""
    parts = -(-rows // micro_batch(how, rows))
    if parts < count():
        raise ValueError(
            f"{count()} ranks need at least as many micro-batches, got {parts} in a batch of "
            f"{rows} rows: lower runtime.micro_batch ({how.micro_batch}) or take fewer ranks"
        )


def decide_bits(how: config.Runtime) -> str:
    """What of the ranks can change last bits; "" where it cannot."""
    if count() == 1 or (how.reduce == "ordered" and how.micro_batch):
        return ""
    return f", ranks {count()} {how.reduce}"


def record(how: config.Runtime) -> dict[str, Any]:
    """What a member's record says of its ranks; nothing alone."""
    return {"ranks": count(), "reduce": how.reduce} if count() > 1 else {}


class Gradients:
    """The gradient of a batch of `parts` micro-batches, summed over all ranks into `.grad`."""

    def __init__(self, model: nn.Module, parts: int, reduce: str) -> None:
        self.weights = [each for each in model.parameters() if each.requires_grad]
        self.parts, self.reduce = parts, reduce
        self.reached: list[nn.Parameter] = []  # by the gradient: on all ranks the same
        self.share: Tensor | None = None  # ordered: this rank's part of the sum so far

    def mine(self) -> Iterator[int]:
        """The numbers of this rank's micro-batches; each is passed backward before the next is
        asked for, and after the last one `.grad` holds the sum."""
        for start in range(0, self.parts, count()):
            number = start + rank()
            if number < self.parts:
                yield number
            if count() > 1 and self.reduce == "ordered":
                self._add_in_order(min(count(), self.parts - start))
        if count() > 1:
            self._spread()

    def _add_in_order(self, there: int) -> None:
        """Add one micro-batch of each of the first `there` ranks. A rank sums its own part of the
        weights alone, so that all together send as little as an all_reduce does."""
        flat = self._flat()
        found = torch.empty_like(flat)
        with _together():
            dist.all_to_all_single(found, flat)
        for part in found.view(count(), -1)[:there]:
            if self.share is None:
                self.share = part.clone()
            else:
                self.share += part
        for weight in self.reached:
            weight.grad = None

    def _spread(self) -> None:
        """Leave the whole sum in `.grad` on every rank."""
        with _together():
            if self.share is not None:
                flat = self.share.new_empty(count() * len(self.share))
                dist.all_gather(list(flat.view(count(), -1)), self.share)
            else:
                flat = self._flat()
                dist.all_reduce(flat)
        sizes = [each.numel() for each in self.reached]
        for weight, part in zip(self.reached, flat[: sum(sizes)].split(sizes), strict=True):
            weight.grad = part.view_as(weight).clone()

    def _flat(self) -> Tensor:
        """This rank's gradients end to end, filled up to a multiple of the ranks; 0 where it had no
        micro-batch."""
        self.reached = self.reached or [each for each in self.weights if each.grad is not None]
        found = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.reached]
        flat = torch.cat([each.reshape(-1) for each in found])
        return nn.functional.pad(flat, (0, -len(flat) % count()))
