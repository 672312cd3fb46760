"""Run one notebook on this Python, with checked parameters, and believe only what ran whole."""

import ast
import contextlib
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TextIO

import nbformat
import numpy as np
import papermill
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from traitlets import Float

from q0lib import files

PACKAGE = Path(__file__).resolve().parents[1]  # all of q0lib, whichever room this is in
STARTS = 3  # attempts to bring a kernel up
GRACE = 60.0  # seconds that an interrupted kernel has at most to save and leave
DRAIN = 60.0  # seconds that a finished cell's output has at most to arrive
EXIT = "get_ipython().ask_exit = __import__('sys').exit"  # exit() is an error, as sys.exit() is
# The kernel watches its parent, unless that has gone before the kernel was up.
ORPHAN = "import os; os.getppid() == int(os.environ['JPY_PARENT_PID']) or os._exit(1); del os"
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


class NotebookError(RuntimeError):
    """A notebook did not run from its first cell to its last; the message is one line."""


class _ThisPython(AsyncKernelManager):
    """Starts kernels of the running interpreter, whatever the notebook's metadata ask for."""

    shutdown_wait_time = Float(GRACE)

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[
                *(sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
                *("--log-level=50", f"--IPKernelApp.exec_lines={EXIT}"),
                f"--IPKernelApp.exec_lines={ORPHAN}",
            ],
            language="python",
            env={
                "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures are embedded
                "PYTHONPATH": python_path(),
            },
        )


def python_path() -> str:
    """PYTHONPATH with this q0lib first: the one whose source is in the key."""
    return os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))


def read(notebook: Path) -> Any:
    """The notebook as an nbformat node; ValueError if it is not one."""
    try:
        return nbformat.read(notebook, as_version=4)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no notebook {notebook}") from error
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        raise ValueError(f"{notebook} is not a notebook: {one_line(error)}") from error


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
                return (
                    f"In [{cell.execution_count}]: {errors[0].ename}: {one_line(errors[0].evalue)}"
                )
            if not cell.execution_count:
                return f"the cell {cell.source.strip().splitlines()[0]!r} did not run"
    return None


def one_line(text: object) -> str:
    """`text` on one line, short enough for a table."""
    return " ".join(str(text).split())[:300]


def overwritten(text: str) -> str:
    """`text` without what carriage returns wrote over: of a progress bar, its last state."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


class _Log:
    """Writes whole lines, as `overwritten`; a log that cannot be written ends nothing."""

    def __init__(self, file: TextIO | None) -> None:
        self.file, self.line = file, ""

    def write(self, text: str) -> None:
        *whole, self.line = f"{self.line}{text}".split("\n")
        self.line = self.line[self.line.rstrip("\r").rfind("\r") + 1 :]  # the rest is written over
        self._put(whole)

    def flush(self) -> None:
        """Nothing: papermill asks for it after each message."""

    def close(self) -> None:
        """Write the line that has no end yet."""
        self._put([self.line] if self.line else [])
        self.line = ""

    def _put(self, lines: Sequence[str]) -> None:
        if self.file and lines:
            text = overwritten("".join(f"{line}\n" for line in lines))
            encoding = self.file.encoding or "utf-8"
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
                self.file.write(text.encode(encoding, "backslashreplace").decode(encoding))
                self.file.flush()


def _join_streams(node: Any) -> None:
    """Make one output of what a cell printed in a row, in place, as a terminal shows it."""
    for cell in node.cells:
        if cell.cell_type == "code":
            joined = []
            for name, group in itertools.groupby(cell.outputs, lambda output: output.get("name")):
                first, *rest = group
                if name:  # of a stream; other outputs have none
                    first.text = overwritten("".join(each.text for each in (first, *rest)))
                joined += [first] if name else [first, *rest]
            cell.outputs = joined


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
        NotebookError: if a cell raised, exited, timed out or died with its kernel, or if its
            output did not arrive.
    """
    notebook, node, logs = Path(notebook), read(notebook), (_Log(log), _Log(log))
    check(notebook, node, parameters)
    node.metadata.kernelspec = KERNEL
    for attempt in range(STARTS):
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
                iopub_timeout=math.ceil(DRAIN),
                stdout_file=logs[0],
                stderr_file=logs[1],
            )
            break
        except PapermillExecutionError as error:
            message = f"In [{error.exec_count}]: {error.ename}: {one_line(error.evalue)}"
            raise NotebookError(message) from error
        except CellTimeoutError as error:
            if "The message was: Timeout waiting for IOPub" in str(error):
                late = f"a cell ended, but its output had not all arrived {DRAIN:g} s later"
                raise NotebookError(late) from error
            raise NotebookError(f"a cell ran for more than {timeout:g} s") from error
        except DeadKernelError as error:
            raise NotebookError("the kernel died: killed, crashed, or left by a cell") from error
        except RuntimeError as error:
            # Kernels that start at the same time can be given the same port. No cell has run.
            if "died before replying" not in str(error):
                raise
            if attempt + 1 == STARTS:
                raise NotebookError(f"no kernel came up in {STARTS} attempts: {error}") from error
        finally:
            for each in logs:
                each.close()
    if reason := unfinished(done):
        raise NotebookError(reason)
    _join_streams(done)
    done.metadata.papermill.update(input_path=str(notebook), output_path=str(output))
    done.metadata.q0 = dict(stamp or {})
    files.write_text(Path(output), nbformat.writes(done) + "\n")
