"""Make the narrative notebooks that are committed: run whole in a fresh kernel, cleaned, stamped.

A published notebook carries in its metadata `q0 = {"code": ..., "results": {...}}`: the SHA-256 of
its code cells, and of every file under data/results and data/published that it read. A notebook
declares nothing for that: the kernel notes what Python opens. `stale` compares.

    python -m q0lib.sweeps.refresh                    # all but the tools
    python -m q0lib.sweeps.refresh 04_epoch_efficiency
    python -m q0lib.sweeps.refresh --check            # run nothing; tell which are stale, and why
"""

import hashlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

from q0lib import command, files, paths
from q0lib.sweeps import notebook

TOOLS = {"own_text", "train_population"}  # for the reader to run: committed without outputs
LIMIT = 500_000  # bytes: a committed notebook is there to be read
WIDGETS = "application/vnd.jupyter.widget-"
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:home|Users|root|tmp|var|private)/[^\s'\"<]*")


def narratives() -> list[Path]:
    """The notebooks that tell the story, in the order of their names."""
    return [path for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")) if path.stem not in TOOLS]


def publish(path: Path) -> None:
    """Run a notebook with its defaults from top to bottom, and replace it by its clean output.

    Raises:
        notebook.NotebookError: if it did not run whole.
        ValueError: if it has no `parameters` cell, shows a path of this machine, or is too large.
            In either case the notebook stays as it was.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output, reads = Path(scratch, path.name), Path(scratch, "reads")
        folders = tuple(f"{folder}{os.sep}" for folder in (paths.RESULTS, paths.PUBLISHED))
        note = f"{inspect.getsource(note_reads)}\nnote_reads({str(reads)!r}, {folders!r})"
        notebook.execute(
            path,
            output,
            {},
            progress=True,
            kernel_arguments=[f"--IPKernelApp.exec_lines={note}"],
        )
        node = notebook.read(output)
        read = {Path(line) for line in reads.read_text(encoding="utf-8").splitlines()}
    clean(node)
    node.metadata.q0 = {
        "code": notebook.code_hash(node),
        "results": {
            table.relative_to(paths.ROOT).as_posix(): _digest(table)
            for table in sorted(read)
            if table.is_file()
        },
    }
    text = nbformat.writes(node) + "\n"
    if (size := len(text.encode())) > LIMIT:
        raise ValueError(f"{path.name} would be {size:,} bytes, more than {LIMIT:,}")
    files.write_text(path, text)


def note_reads(log: str, folders: tuple[str, ...]) -> None:
    """In a kernel, given as source: note in `log` what Python opens for reading under `folders`."""
    import os
    import sys

    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str) and "r" in (arguments[1] or ""):
            path = os.path.abspath(arguments[0])
            if path.startswith(folders):
                os.write(file, f"{path}\n".encode())

    sys.addaudithook(hook)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def clean(node: Any) -> None:
    """Drop from an executed notebook, in place, what differs from run to run or tells of a machine.

    That is: times and versions, stderr and widgets (progress bars), addresses in memory. Paths
    become relative to the repository.

    Raises:
        ValueError: if a path of this machine is left in an output.
    """
    for volatile in ("papermill", "widgets", "q0"):
        node.metadata.pop(volatile, None)
    node.metadata.get("language_info", {}).pop("version", None)
    for cell in node.cells:
        for volatile in ("papermill", "execution"):
            cell.metadata.pop(volatile, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]  # papermill gives every cell an empty list of them
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_noise(output)]
            for output in cell.outputs:
                _clean_output(output)


def _is_noise(output: Any) -> bool:
    widget = any(kind.startswith(WIDGETS) for kind in output.get("data", {}))
    return widget or output.get("name") == "stderr"


def _clean_output(output: Any) -> None:
    output.get("metadata", {}).pop("papermill", None)
    if "text" in output:
        output["text"] = _clean_text(output["text"])
    for kind, content in output.get("data", {}).items():
        if isinstance(content, str) and (kind.startswith("text/") or kind == "image/svg+xml"):
            output["data"][kind] = _clean_text(content)


def _clean_text(text: str) -> str:
    for root in {str(paths.ROOT), os.path.realpath(paths.ROOT)}:
        text = re.sub(rf"(?<![\w.-]){re.escape(root)}(?![\w-])", ".", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    if found := MACHINE_PATH.search(text):
        raise ValueError(f"an output shows a path of this machine: {found.group()}")
    return text


def stale(path: Path) -> str | None:
    """Why a committed notebook is not what publishing it would give, or None if it seems so."""
    try:
        node = notebook.read(path)
    except (ValueError, OSError) as error:
        return str(error)
    stamp = node.metadata.get("q0", {})
    if "code" not in stamp:
        return "it was never published"
    if stamp["code"] != notebook.code_hash(node):
        return "its code cells changed since it ran"
    if reason := notebook.unfinished(node):
        return reason
    cells = [cell for cell in node.cells if cell.cell_type == "code" and cell.source.strip()]
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        return "its cells did not run once each from top to bottom"
    for name, digest in stamp.get("results", {}).items():
        table = paths.ROOT / name
        if not table.is_file():
            return f"{name}, which it read, is gone"
        if _digest(table) != digest:
            return f"{name}, which it read, changed"
    if path.stat().st_size > LIMIT:
        return f"it is larger than {LIMIT:,} bytes"
    return None


def _attempt(path: Path) -> str | None:
    """Publish it; why that failed, or None."""
    try:
        publish(path)
    except (notebook.NotebookError, ValueError, OSError) as error:
        return str(error)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status: 1 if a notebook failed, or is stale."""
    parser = command.parser("q0lib.sweeps.refresh", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks (default: all)")
    parser.add_argument("--check", action="store_true", help="only tell which are stale, and why")
    given = parser.parse_args(argv)

    def work() -> int:
        known = {path.stem: path for path in narratives()}
        names = [Path(name).name.removesuffix(".ipynb") for name in given.names] or list(known)
        if unknown := [name for name in names if name not in known]:
            have = ", ".join(known) or "none"
            raise ValueError(f"no notebook {unknown[0]!r}; there is {have}")
        failed = 0
        for name in names:
            reason = stale(known[name]) if given.check else _attempt(known[name])
            print(f"{name}: {reason or ('up to date' if given.check else 'published')}")
            failed += reason is not None
        return int(failed > 0)

    return command.status(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
