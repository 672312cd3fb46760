"""What every `python -m q0lib...` has in common: its help, its exit status, its signals."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def parser(module: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """The parser of `python -m <module>`, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def status(prog: str, work: Callable[[], int | None]) -> int:
    """Do a command's work; its exit status, or one sentence about what went wrong and that status.

    0 all well (or what `work` returns), 1 something failed (RuntimeError), 2 bad usage (ValueError,
    OSError), 130 stopped, after what was running has saved. SIGTERM and SIGHUP stop it as Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show ends no work
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _stop_signals():
            return work() or 0
    except KeyboardInterrupt:
        print("stopped; what was finished or saved is kept, run it again to go on")
        return 130
    except (RuntimeError, ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, but for one that `nohup` has switched off."""
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def stop(number: int, _: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # shells send it once more
        if (
            signal.Signals(number).name == "SIGHUP"
        ):  # the terminal has gone, and writing to it is an error
            null = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(null, terminal)
        raise KeyboardInterrupt

    names = ("SIGTERM", "SIGHUP")  # not every system hangs up
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {each: signal.getsignal(each) for each in signals}
    for each in signals:
        if before[each] is not signal.SIG_IGN:
            signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
