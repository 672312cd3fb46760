"""Run a notebook over a grid of its parameters, and believe only what ran to its last cell.

A *point* is one set of parameters. Its output carries a key: the SHA-256 of the notebook's code
cells, the parameters, q0lib's source and the `inputs` files. While that stays the same the point is
skipped; else it runs, in a process of its own, so one that fails or is killed costs only itself.

    python -m q0lib.sweep notebooks/train_population.ipynb -g method=q0,ensemble -g seed=0,1,2
"""

import argparse
import ast
import hashlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TextIO

import nbformat
import numpy as np
import pandas as pd
import papermill
from filelock import FileLock
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm
from traitlets import Float

from q0lib import paths

PACKAGE = Path(__file__).resolve().parent
GRACE = 60.0  # seconds that an interrupted kernel has at most to save and leave
CACHED = 3  # exit status of a child that found its point already done
COLUMNS = ["status", "seconds", "reason", "output"]
EXIT = "get_ipython().ask_exit = __import__('sys').exit"  # exit() is an error, as sys.exit() is
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


class NotebookError(RuntimeError):
    """A notebook did not run from its first cell to its last; the message is one line."""


class Interrupted(KeyboardInterrupt):
    """A sweep was stopped; its argument is the table of what each point had come to."""


class _ThisPython(AsyncKernelManager):
    """Starts kernels of the running interpreter, whatever the notebook's metadata ask for."""

    shutdown_wait_time = Float(GRACE)

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[
                *(sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
                *("--log-level=50", f"--IPKernelApp.exec_lines={EXIT}"),
            ],
            language="python",
            env={
                "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures are embedded
                "PYTHONPATH": _python_path(),
            },
        )


def _python_path() -> str:
    """PYTHONPATH with this q0lib first: the one whose source is in the key."""
    return os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))


def read(notebook: Path) -> Any:
    """The notebook as an nbformat node; ValueError if it is not one."""
    try:
        return nbformat.read(notebook, as_version=4)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no notebook {notebook}") from error
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        raise ValueError(f"{notebook} is not a notebook: {_line(error)}") from error


def code_hash(node: Any) -> str:
    """SHA-256 of the notebook's code cells, in order; prose and outputs do not count."""
    cells = [cell.source for cell in node.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def unfinished(node: Any) -> str | None:
    """Why an executed notebook did not run to its last cell, or None if it did.

    papermill passes over `sys.exit(0)`, and leaves the cells after it unexecuted: look at each.
    """
    for cell in node.cells:
        if cell.cell_type == "code" and cell.source.strip():
            if errors := [output for output in cell.outputs if output.output_type == "error"]:
                return f"In [{cell.execution_count}]: {errors[0].ename}: {_line(errors[0].evalue)}"
            if not cell.execution_count:
                return f"the cell {cell.source.strip().splitlines()[0]!r} did not run"
    return None


def _line(text: object) -> str:
    """`text` on one line, short enough for a table."""
    return " ".join(str(text).split())[:300]


def plain(name: str, value: Any) -> Any:
    """`value` as a notebook can be given it: str, int, float, bool, None, or lists of them.

    Raises:
        ValueError: naming the parameter; NumPy values, tuples, ranges and paths are turned into
            these, anything else is refused, and so are floats that are not finite.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, list | tuple | range):
        return [plain(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if value is not None and type(value) not in (str, int, float, bool):
        kinds = "a str, int, float, bool, None or a list of them"
        raise ValueError(f"parameter {name} must be {kinds}, got {type(value).__name__}")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"parameter {name} cannot be {value!r}: {error}") from error
    return value


def check(notebook: Path, node: Any, names: Iterable[str]) -> None:
    """ValueError if one of `names` is not assigned in the notebook's cell tagged `parameters`."""
    cells = [cell for cell in node.cells if "parameters" in cell.metadata.get("tags", [])]
    if not cells or cells[0].cell_type != "code":
        raise ValueError(f"{notebook} has no code cell tagged 'parameters'")
    try:
        words = [word for word in ast.walk(ast.parse(cells[0].source)) if type(word) is ast.Name]
    except SyntaxError as error:
        raise ValueError(f"the parameters cell of {notebook} is not Python: {error}") from error
    known = [word.id for word in words if isinstance(word.ctx, ast.Store)]
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(known) or "none"
        raise ValueError(f"{notebook} has no parameter {unknown[0]!r}; its parameters: {listed}")


def execute(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any],
    *,
    timeout: float | None = None,
    progress: bool = False,
    stamp: Mapping[str, Any] | None = None,
    log: TextIO | None = None,
    kernel_arguments: Sequence[str] = (),
) -> None:
    """Run `notebook` in its own folder, and write `output` only if every cell of it ran.

    Else an earlier `output` stays as it was. `timeout` is in seconds, for each cell; `stamp` goes
    into the output's metadata as "q0"; what the cells print goes to `log` too.

    Raises:
        ValueError: before anything runs, for parameters that are unknown or not plain literals.
        NotebookError: if a cell raised, exited, timed out or died with its kernel.
    """
    notebook, node = Path(notebook), read(notebook)
    check(notebook, node, parameters)
    node.metadata.kernelspec = KERNEL
    try:
        done = papermill.execute_notebook(
            node,
            None,  # nothing is written until it is known to be whole
            {name: plain(name, value) for name, value in parameters.items()},
            kernel_name="python3",
            language="python",
            kernel_manager_class=_ThisPython,
            extra_arguments=list(kernel_arguments),
            cwd=notebook.resolve().parent,
            progress_bar=progress,
            start_timeout=120,
            execution_timeout=timeout and math.ceil(timeout),
            stdout_file=log,
            stderr_file=log,
        )
    except PapermillExecutionError as error:
        message = f"In [{error.exec_count}]: {error.ename}: {_line(error.evalue)}"
        raise NotebookError(message) from error
    except CellTimeoutError as error:
        raise NotebookError(f"a cell ran for more than {timeout:g} s") from error
    except DeadKernelError as error:
        raise NotebookError("the kernel died: killed, crashed, or left by a cell") from error
    if reason := unfinished(done):
        raise NotebookError(reason)
    done.metadata.papermill.update(input_path=str(notebook), output_path=str(output))
    done.metadata.q0 = dict(stamp or {})
    paths.write_text(Path(output), nbformat.writes(done) + "\n")


def point_key(node: Any, parameters: Mapping[str, Any], inputs: Sequence[str | Path]) -> str:
    """SHA-256 of all that decides what a point's output is."""
    files = [*sorted(PACKAGE.glob("*.py")), *map(Path, inputs)]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    whole = json.dumps([code_hash(node), parameters, contents], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def _stamped_key(output: Path) -> str | None:
    """The key under which `output` was written; None if it is missing or broken."""
    try:
        return json.loads(output.read_text(encoding="utf-8"))["metadata"]["q0"]["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


@dataclass
class _Point:
    """One set of parameters on its way through a sweep."""

    parameters: dict[str, Any]
    output: Path
    status: str = "interrupted"  # until more is known
    seconds: float = 0.0
    reason: str = ""

    def start(self, order: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Begin it in a process that a Ctrl-C at the terminal does not reach: see `_stop`."""
        task = {**order, "parameters": self.parameters, "output": str(self.output)}
        program = "import q0lib.sweep; q0lib.sweep._child()"
        command = [sys.executable, "-c", program, json.dumps(task)]
        self.started = time.monotonic()
        with self.output.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def ended(self) -> bool:
        """Whether its process has gone; if so, note what it came to."""
        if (code := self.process.poll()) is None:
            return False
        self.seconds = time.monotonic() - self.started
        self.status = {0: "done", CACHED: "skipped"}.get(code, "failed")
        if code < 0:
            self.reason = f"killed by {signal.Signals(-code).name}"
        elif self.status == "failed":
            said = self.output.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            self.reason = _line(said.strip().rpartition("\n")[2])
        return True


def _child() -> None:
    """In a process of its own: run the point that the last argument describes, once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave as after Ctrl-C
    task = json.loads(sys.argv[-1])
    notebook, output, parameters = Path(task["notebook"]), Path(task["output"]), task["parameters"]
    try:
        with FileLock(output.with_name(f".{output.name}.lock")):
            key = point_key(read(notebook), parameters, task["inputs"])
            if _stamped_key(output) == key and not task["force"]:
                sys.exit(CACHED)
            timeout, stamp = task["timeout"], {"key": key}
            execute(notebook, output, parameters, timeout=timeout, stamp=stamp, log=sys.stdout)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except Exception as error:
        traceback.print_exc()
        sys.exit(_line(error if isinstance(error, NotebookError) else repr(error)))


def _points(fixed: Mapping[str, Any], grid: Mapping[str, Any], out: Path) -> list[_Point]:
    """The distinct points of `grid`, in order, each with its place in `out`."""
    if both := [name for name in fixed if name in grid]:
        raise ValueError(f"parameter {both[0]} is both fixed and in the grid")
    if taken := [name for name in {**fixed, **grid} if name in COLUMNS]:
        raise ValueError(f"parameter {taken[0]} has the name of a column of the sweep's table")
    if empty := [n for n, v in grid.items() if isinstance(v, str) or not plain(n, list(v))]:
        raise ValueError(f"the grid of {empty[0]} must be a list of values, at least one")
    points = {}
    for values in itertools.product(*grid.values()):
        varied = dict(zip(grid, values, strict=True))
        parameters = {name: plain(name, value) for name, value in {**fixed, **varied}.items()}
        identity = json.dumps(parameters, sort_keys=True)
        label = ",".join(f"{name}={parameters[name]}" for name in grid) or "point"
        label = re.sub(r"[^\w.,=+-]+", "-", label, flags=re.ASCII)[:120]
        name = f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.ipynb"
        points[identity] = _Point(parameters, out / name)
    return list(points.values())


def sweep(
    notebook: Path,
    fixed: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    *,
    jobs: int = 1,
    out: Path | None = None,
    timeout: float | None = None,
    force: bool = False,
    inputs: Sequence[Path] = (),
) -> pd.DataFrame:
    """Run the missing points of `grid`, `jobs` at a time, into `out` (data/runs/sweeps/<notebook>).

    Returns a row for each point, kept as `<out>/sweep.csv`: its parameters, status (done, failed,
    or skipped since it was done before), seconds, reason of a failure, and output path. `timeout`
    is in seconds, for each cell; `force` runs also what could be skipped.

    Raises:
        ValueError, OSError: for bad arguments, before anything runs.
        Interrupted: after Ctrl-C, when the running points have been told to save and have gone.
    """
    notebook, node = Path(notebook).resolve(), read(notebook)
    check(notebook, node, {**fixed, **grid})
    if jobs < 1 or not (timeout is None or 0 < timeout < math.inf):
        raise ValueError(f"jobs and timeout must be > 0, got {jobs} and {timeout}")
    out = Path(out or paths.RUNS / "sweeps" / notebook.stem).resolve()
    points = _points(fixed, grid, out)
    waiting: list[_Point] = []
    running: list[_Point] = []
    files = [str(Path(file).resolve()) for file in inputs]
    out.mkdir(parents=True, exist_ok=True)
    for point in points:
        if not force and _stamped_key(point.output) == point_key(node, point.parameters, files):
            point.status = "skipped"
        else:
            waiting.append(point)
    jobs = max(1, min(jobs, len(waiting)))
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    limits = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], threads)
    environment = {**(limits if jobs > 1 else {}), **os.environ, "PYTHONPATH": _python_path()}
    order = {"notebook": str(notebook), "inputs": files, "timeout": timeout, "force": force}
    interrupted = False
    with tqdm(total=len(points), initial=len(points) - len(waiting), unit="point") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    waiting[0].start(order, environment)
                    running.append(waiting.pop(0))
                    bar.set_postfix_str(" | ".join(point.output.stem[:40] for point in running))
                time.sleep(0.05)
                for point in [point for point in running if point.ended()]:
                    running.remove(point)
                    bar.update()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _stop(running)
    rows = [{**p.parameters, **{name: getattr(p, name) for name in COLUMNS}} for p in points]
    table = pd.DataFrame(rows).astype({"output": str})
    paths.write_text(out / "sweep.csv", table.to_csv(index=False))
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
        point.process.wait()
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
  python -m q0lib.sweep notebooks/train_population.ipynb -p preset=cpu \\
      -g method=q0,ensemble -g seed=0,1,2 --jobs 2
  python -m q0lib.sweep notebooks/04_epoch_efficiency.ipynb -p 'epoch_budgets=[16, 32]'

Values are JSON or Python literals, else strings.
Exit status: 0 nothing failed, 1 a point failed, 2 bad usage, 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m q0lib.sweep",
        description="Run a notebook over a grid of its parameters; skip what is already done.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("notebook", type=Path)
    add("-p", dest="fixed", action="append", default=[], metavar="NAME=VALUE", help="fixed")
    add("-g", dest="grid", action="append", default=[], metavar="NAME=V1,V2", help="varied")
    add("--jobs", type=int, default=1, metavar="N", help="points at a time (default 1)")
    add("--out", type=Path, metavar="DIR", help="default: data/runs/sweeps/<notebook>")
    add("--timeout", type=float, metavar="S", help="seconds for any one cell (default: no limit)")
    add("--force", action="store_true", help="run also the points that are already done")
    add("--input", dest="inputs", action="append", default=[], type=Path, metavar="FILE",
        help="a file that the notebook reads: when it changes, the points run again")  # fmt: skip
    given = vars(parser.parse_args(argv))
    try:
        given["fixed"] = _assignments(given["fixed"], _value)
        given["grid"] = _assignments(given["grid"], _values)
        table = sweep(**given)
    except Interrupted as stopped:
        print(_report(stopped.args[0]))
        return 130
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(_report(table))
    return int((table["status"] == "failed").any())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the points end first
    sys.exit(main())
