"""Run one notebook on this Python, with checked parameters, and believe only what ran whole."""

import ast
import hashlib
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
EXIT = "get_ipython().ask_exit = __import__('sys').exit"  # exit() is an error, as sys.exit() is
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
                stdout_file=log,
                stderr_file=log,
            )
            break
        except PapermillExecutionError as error:
            message = f"In [{error.exec_count}]: {error.ename}: {one_line(error.evalue)}"
            raise NotebookError(message) from error
        except CellTimeoutError as error:
            raise NotebookError(f"a cell ran for more than {timeout:g} s") from error
        except DeadKernelError as error:
            raise NotebookError("the kernel died: killed, crashed, or left by a cell") from error
        except RuntimeError as error:
            # Kernels that start at the same time can be given the same port. No cell has run.
            if "died before replying" not in str(error):
                raise
            if attempt + 1 == STARTS:
                raise NotebookError(f"no kernel came up in {STARTS} attempts: {error}") from error
    if reason := unfinished(done):
        raise NotebookError(reason)
    done.metadata.papermill.update(input_path=str(notebook), output_path=str(output))
    done.metadata.q0 = dict(stamp or {})
    files.write_text(Path(output), nbformat.writes(done) + "\n")
