"""How a process runs here: its device and threads, requests to stop, and whose turn it is."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from q0lib import config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Stopped(KeyboardInterrupt):
    """Training was asked to stop (Ctrl-C, SIGTERM or SIGHUP) and has saved where to go on."""


def device(name: str) -> torch.device:
    """The device called "auto", "cpu", "cuda", "cuda:1", ...

    Raises:
        ValueError: this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"runtime.device must be auto, cpu, or an accelerator of this machine, got {name!r}"
        ) from error


def decides_bits(runtime: config.Runtime, device: torch.device) -> str:
    """What can change the last bits of a result, though not what is trained."""
    threads = f"threads {torch.get_num_threads()}, " if device.type == "cpu" else ""
    return (
        f"device {device.type}, {threads}micro_batch {runtime.micro_batch}, "
        f"compile {runtime.compile}"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads (0 = as it is): a sum's order, and so its bits, depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a question that the loop asks between steps."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set  # signals belong to the main thread
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # not every system hangs up
    there = [getattr(signal, name) for name in names if hasattr(signal, name)]
    signals = [each for each in there if signal.getsignal(each) != signal.SIG_IGN]  # as by nohup
    before = [signal.signal(each, lambda *_: requested.set()) for each in signals]
    try:
        yield requested.is_set
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def locked(
    folder: Path, *, wait: bool = True, stop_requested: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Hold the folder's lock, and yield whether we do; while another process holds it, wait and
    say so, or do without.

    Raises:
        Stopped: when `stop_requested()` turns true while waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait:
            tqdm.write(f"waiting for another process that trains {folder}")
        while wait and not lock.is_locked:
            if stop_requested():
                raise Stopped("stopped while another process trained what was left") from None
            with suppress(Timeout):
                lock.acquire(timeout=1)
    try:
        yield lock.is_locked
    finally:
        lock.release()


class Clock:
    """Wall-clock seconds, with those of earlier calls, and when a checkpoint is due."""

    def __init__(self, before: float, every: float) -> None:
        self.began = self.saved = time.monotonic()
        self.before, self.every = before, every

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def due(self) -> bool:
        """Whether `every` seconds have passed since the last time it was."""
        if time.monotonic() - self.saved <= self.every:
            return False
        self.saved = time.monotonic()
        return True
