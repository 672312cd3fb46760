"""Run a notebook over a grid of its parameters, and believe only what ran to its last cell.

A *point* is one set of parameters. Its output carries a key: the SHA-256 of the notebook's code
cells, the parameters, q0lib's source and the `inputs` files. While that stays the same the point is
skipped; else it runs, in a process of its own, so one that fails or is killed costs only itself.

    python -m q0lib.sweeps notebooks/train_population.ipynb -g method=q0,ensemble -g seed=0,1,2
"""

import ast
import hashlib
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock
from tqdm import tqdm

from q0lib import command, files, paths
from q0lib.sweeps import engines
from q0lib.sweeps.notebook import (
    GRACE,
    PACKAGE,
    NotebookError,
    check,
    code_hash,
    execute,
    one_line,
    plain,
    read,
)

CACHED = 3  # exit status of a child that found its point already done
COLUMNS = ["status", "seconds", "reason", "output"]


class Interrupted(KeyboardInterrupt):
    """A sweep was stopped; its argument is the table of what each point had come to."""


def point_key(node: Any, parameters: Mapping[str, Any], inputs: Sequence[str | Path]) -> str:
    """SHA-256 of all that decides what a point's output is."""
    # Plans and styles decide an output as code does.
    package = (file for file in PACKAGE.rglob("*") if file.suffix in engines.SOURCES)
    read_by_it = [*sorted(package), *map(Path, inputs)]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in read_by_it]
    whole = json.dumps([code_hash(node), parameters, contents], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def _stamped(output: Path) -> tuple[str | None, float]:
    """The key under which `output` was written, and the seconds that it took to make; (None, 0) if
    it is missing or broken."""
    try:
        metadata = json.loads(output.read_text(encoding="utf-8"))["metadata"]
        return metadata["q0"]["key"], float(metadata["papermill"]["duration"])
    except (OSError, ValueError, LookupError, TypeError):
        return None, 0.0


@dataclass
class _Point:
    """One set of parameters on its way through a sweep."""

    parameters: dict[str, Any]
    output: Path
    status: str = "interrupted"  # until more is known
    seconds: float = 0.0
    reason: str = ""

    def start(self, order: Mapping[str, Any], session: engines.Session) -> None:
        """Begin it in a process of its own, which ends when this one does."""
        task = {**order, "parameters": self.parameters, "output": str(self.output)}
        program = "from q0lib.sweeps import sweep; sweep._child()"
        self.process = session.start(program, json.dumps(task), self.output.with_suffix(".log"))

    def ended(self) -> bool:
        """Whether its process has gone; if so, note what it came to."""
        if (code := self.process.poll()) is None:
            return False
        self.status = {0: "done", CACHED: "skipped"}.get(code, "failed")
        failed = self.status == "failed"
        self.seconds = self.process.seconds if failed else _stamped(self.output)[1]
        if code < 0:
            self.reason = f"killed by {signal.Signals(-code).name}"
        elif failed:
            said = self.output.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            self.reason = one_line(said.strip().rpartition("\n")[2])
        return True


def _child() -> None:
    """In a process of its own: run the point that the last argument describes, once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave as after Ctrl-C
    if hasattr(signal, "pthread_sigmask"):  # workers of Ray block what a kernel is told to stop by
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):  # the log, which is UTF-8 whatever the terminal is
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    task = json.loads(sys.argv[-1])
    notebook, output, parameters = Path(task["notebook"]), Path(task["output"]), task["parameters"]
    try:
        with FileLock(output.with_name(f".{output.name}.lock")):
            key = point_key(read(notebook), parameters, task["inputs"])
            if _stamped(output)[0] == key and not task["force"]:
                sys.exit(CACHED)
            timeout, stamp = task["timeout"], {"key": key}
            execute(notebook, output, parameters, timeout=timeout, stamp=stamp, log=sys.stdout)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except Exception as error:
        traceback.print_exc()
        sys.exit(one_line(error if isinstance(error, NotebookError) else repr(error)))


def _leave_with_parent() -> None:
    """When the sweep has gone, end as `_stop` would end this process."""
    os.read(0, 1)  # returns at the end of the pipe that only the sweep holds
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE + 10)
    os._exit(1)


def _points(
    stem: str,
    fixed: Mapping[str, Any],
    grid: Mapping[str, Any],
    out: Path,
    listed: Sequence[Mapping[str, Any]] = ({},),
) -> list[_Point]:
    """The distinct points of `grid` and `listed`, in order, each with its place in `out`; named by
    what varies, or by the notebook's `stem`."""
    names = [*fixed, *grid, *dict.fromkeys(name for point in listed for name in point)]
    if both := [name for name, count in Counter(names).items() if count > 1]:
        where = (
            "fixed and in the grid" if both[0] in fixed and both[0] in grid else "listed and not"
        )
        raise ValueError(f"parameter {both[0]} is both {where}")
    if taken := [name for name in names if name in COLUMNS]:
        raise ValueError(f"parameter {taken[0]} has the name of a column of the sweep's table")
    if empty := [n for n, v in grid.items() if isinstance(v, str) or not plain(n, list(v))]:
        raise ValueError(f"the grid of {empty[0]} must be a list of values, at least one")
    points = {}
    for one, *values in itertools.product(listed, *grid.values()):
        varied = {**one, **dict(zip(grid, values, strict=True))}
        parameters = {name: plain(name, value) for name, value in {**fixed, **varied}.items()}
        identity = json.dumps(parameters, sort_keys=True)
        label = ",".join(f"{name}={parameters[name]}" for name in varied) or stem
        label = re.sub(r"[^\w.,=+-]+", "-", label, flags=re.ASCII)[:120]
        name = f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.ipynb"
        points[identity] = _Point(parameters, out / name)
    return list(points.values())


def sweep(
    notebook: Path,
    fixed: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    *,
    jobs: int | None = None,
    out: Path | None = None,
    timeout: float | None = None,
    force: bool = False,
    inputs: Sequence[Path] = (),
    listed: Sequence[Mapping[str, Any]] = ({},),
    engine: engines.Engine = engines.THIS_MACHINE,
    writes: Sequence[Path] = (),
) -> pd.DataFrame:
    """Run the missing points of `grid`, `jobs` at a time, into `out` (data/runs/sweeps/<notebook>).

    By default one at a time on this machine, or as many as another `engine` has room for. `writes`
    are folders that the points write to beside `out`, for engines where one sweep must own them.
    `listed` holds sets of parameters that go together; each is combined with the whole grid.
    Returns a row for each point, kept as `<out>/sweep.csv`: its parameters, status (done, failed,
    or skipped since it was done before), seconds that it took when it ran, reason of a failure, and
    output path. `timeout` is in seconds, for each cell; `force` runs also what could be skipped.

    Raises:
        ValueError, OSError: for bad arguments, before anything runs.
        RuntimeError: another sweep has taken over a folder of this one, on Ray; see `engines`.
        Interrupted: after Ctrl-C, when the running points have been told to save and have gone.
    """
    notebook, node = Path(notebook).resolve(), read(notebook)
    for one in listed:
        check(notebook, node, {**fixed, **grid, **one})
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be > 0, got {jobs}")
    if not (timeout is None or 0 < timeout < math.inf):
        raise ValueError(f"timeout must be > 0 seconds, got {timeout}")
    out = Path(out or paths.RUNS / "sweeps" / notebook.stem).resolve()
    points = _points(notebook.stem, fixed, grid, out, listed)
    waiting: list[_Point] = []
    running: list[_Point] = []
    resolved = [str(Path(file).resolve()) for file in inputs]
    out.mkdir(parents=True, exist_ok=True)
    for point in points:
        stamped, seconds = _stamped(point.output)
        if not force and stamped == point_key(node, point.parameters, resolved):
            point.status, point.seconds = "skipped", seconds
        else:
            waiting.append(point)
    order = {"notebook": str(notebook), "inputs": resolved, "timeout": timeout, "force": force}
    interrupted = False
    if not waiting:
        engine = engines.THIS_MACHINE  # another takes its time to come up
    with (
        engine.opened([out, *writes], jobs, len(waiting)) as session,
        tqdm(total=len(points), initial=len(points) - len(waiting), unit="point") as bar,
    ):
        try:
            while waiting or running:
                while waiting and len(running) < session.room:
                    waiting[0].start(order, session)
                    running.append(waiting.pop(0))
                    bar.set_postfix_str(" | ".join(point.output.stem[:40] for point in running[:4]))
                time.sleep(0.05)
                session.check()
                for point in [point for point in running if point.ended()]:
                    running.remove(point)
                    bar.update()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _stop(running)
    rows = [{**p.parameters, **{name: getattr(p, name) for name in COLUMNS}} for p in points]
    table = pd.DataFrame(rows).astype({"output": str})
    files.write_text(out / "sweep.csv", table.to_csv(index=False))
    if interrupted:
        raise Interrupted(table)
    return table


def _stop(running: Sequence[_Point]) -> None:
    """Let the running points save and leave; end those that stay. A second Ctrl-C ends the wait."""
    for point in running:
        point.process.terminate()
    try:
        deadline = time.monotonic() + GRACE + 10  # a child outlives its kernel, to tell of it
        while not all(p.ended() for p in running) and time.monotonic() < deadline:
            time.sleep(0.05)
    except KeyboardInterrupt:
        pass
    for point in running:
        point.process.kill()  # of one that has gone, it does nothing
        point.ended()
        if point.status == "failed":
            point.status, point.reason = "interrupted", ""


def _value(text: str) -> Any:
    """A value as typed: a JSON or Python literal, a list in brackets, else the text itself."""
    text = text.strip()
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    if text.startswith("[") and text.endswith("]"):
        return _values(text[1:-1])
    return text


def _values(text: str) -> list[Any]:
    """The values in `16,1e-4,true,q0,[1, 2]`; commas in brackets or quotes do not part them."""
    try:
        return json.loads(f"[{text}]")
    except ValueError:
        items = re.findall(r"""(?:\[[^\]]*\]|'[^']*'|"[^"]*"|[^,])+""", text)
        return [_value(item) for item in items]


def _assignments(given: Sequence[str], parse: Callable[[str], Any]) -> dict[str, Any]:
    """The arguments `name=value` as a dictionary."""
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in values:
            raise ValueError(f"expected name=value, each name once, got {text!r}")
        values[name] = parse(value)
    return values


def _report(table: pd.DataFrame) -> str:
    """The table for a terminal, and the counts of what its points came to."""
    outputs = [Path(output) for output in table["output"]]
    shown = table.assign(seconds=table["seconds"].round(1), output=[o.name for o in outputs])
    counts = dict.fromkeys(["done", "failed", "skipped"], 0) | Counter(table["status"])
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{shown.to_string(index=False)}\n{total}; outputs and logs in {outputs[0].parent}"


EXAMPLES = """examples:
  python -m q0lib.sweeps notebooks/train_population.ipynb -p preset=cpu \\
      -g method=q0,ensemble -g seed=0,1,2 --jobs 2
  python -m q0lib.sweeps notebooks/train_population.ipynb -p preset=cpu \\
      -g 'overrides=["q0.alpha=0.3"],["q0.alpha=0.6"]' --jobs 2
  python -m q0lib.sweeps notebooks/train_population.ipynb -p preset=cpu \\
      -g method=q0,ensemble -g seed=0,1,2 --engine ray --address auto

Values are JSON or Python literals, else strings.
Exit status: 0 nothing failed, 1 a point failed, 2 bad usage, 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    about = "Run a notebook over a grid of its parameters; skip what is already done."
    parser = command.parser("q0lib.sweeps", about, epilog=EXAMPLES)
    add = parser.add_argument
    add("notebook", type=Path)
    add("-p", dest="fixed", action="append", default=[], metavar="NAME=VALUE", help="fixed")
    add("-g", dest="grid", action="append", default=[], metavar="NAME=V1,V2", help="varied")
    add("--jobs", type=int, metavar="N",
        help="points at a time (default: 1, on Ray as many as there is room for)")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="default: data/runs/sweeps/<notebook>")
    add("--timeout", type=float, metavar="S", help="seconds for any one cell (default: no limit)")
    add("--force", action="store_true", help="run also the points that are already done")
    add("--input", dest="inputs", action="append", default=[], type=Path, metavar="FILE",
        help="a file that the notebook reads: when it changes, the points run again")  # fmt: skip
    engines.add_arguments(parser)
    given = vars(parser.parse_args(argv))

    def work() -> int:
        given["engine"] = engines.chosen(given)
        given["fixed"] = _assignments(given["fixed"], _value)
        given["grid"] = _assignments(given["grid"], _values)
        try:
            table = sweep(**given)
        except Interrupted as stopped:
            print(_report(stopped.args[0]))
            raise
        print(_report(table))
        return int((table["status"] == "failed").any())

    return command.status(parser.prog, work)
