"""Publishing: a notebook runs whole, loses what is volatile, and knows when it is stale."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from q0lib import paths
from q0lib.sweeps import notebook as nb
from q0lib.sweeps import refresh

STORY = """
import sys
import pandas as pd
import matplotlib.pyplot as plt
from q0lib import paths

table = pd.read_csv(paths.RESULTS / "quick" / "losses.csv")
print("read", paths.RESULTS / "quick" / "losses.csv", "see https://example.org/home/x")
print("10%\\r100%\\rtrained")
print("a bar", file=sys.stderr)
plt.plot(table["loss"])
plt.show()
object()
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with one table of results, which kernels take for theirs, too."""
    monkeypatch.setenv("Q0_ROOT", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "Agg")  # as many servers set it
    for name, folder in [("ROOT", "."), ("NOTEBOOKS", "notebooks"), ("RESULTS", "data/results")]:
        monkeypatch.setattr(paths, name, tmp_path / folder)
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path / "data/published")
    (tmp_path / "data/results/quick").mkdir(parents=True)
    (tmp_path / "data/results/quick/losses.csv").write_text("loss\n3\n2\n")
    (tmp_path / "data/results/quick/unread.csv").write_text("loss\n")
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def write(root: Path, name: str, *cells: str) -> Path:
    """A notebook with a `parameters` cell and these code cells."""
    node = new_notebook(cells=[new_markdown_cell("# A title")])
    node.cells.append(new_code_cell("preset = 'quick'", metadata={"tags": ["parameters"]}))
    node.cells += [new_code_cell(cell) for cell in cells]
    path = root / "notebooks" / f"{name}.ipynb"
    nbformat.write(node, path)
    return path


def edit(path: Path, change) -> None:
    """Apply `change` to the notebook's node, in place."""
    node = nbformat.read(path, as_version=4)
    change(node)
    nbformat.write(node, path)


def test_published_notebook_is_clean_and_tells_when_it_is_stale(root):
    notebook = write(root, "01_story", STORY, "'the end'")
    write(root, "train_population", "raise SystemError")
    assert refresh.main(["--check"]) == 1
    assert refresh.stale(notebook) == "it was never published"
    assert refresh.main([]) == 0, "the tool is not run"
    assert refresh.main(["--check"]) == 0

    text = notebook.read_text(encoding="utf-8")
    node = nbformat.reads(text, as_version=4)
    nbformat.validate(node)
    assert list(node.metadata.q0.results) == ["data/results/quick/losses.csv"]
    assert str(root) not in text
    assert "papermill" not in text
    assert node.cells[1].metadata == {"tags": ["parameters"]}
    printed, figure, value = node.cells[2].outputs
    assert printed.text == (
        "read ./data/results/quick/losses.csv see https://example.org/home/x\ntrained\n"
    )
    assert "image/png" in figure.data, "figures stay embedded whatever MPLBACKEND says"
    assert value.data["text/plain"] == "<object>"

    refresh.publish(notebook)
    assert notebook.read_text(encoding="utf-8") == text, "the same again, byte for byte"

    table = root / "data/results/quick/losses.csv"
    table.write_text("loss\n3\n1\n")
    assert refresh.stale(notebook) == "data/results/quick/losses.csv, which it read, changed"
    table.unlink()
    assert refresh.stale(notebook) == "data/results/quick/losses.csv, which it read, is gone"
    table.write_text("loss\n3\n2\n")
    assert refresh.stale(notebook) is None
    edit(notebook, lambda node: node.cells[0].update(source="# Another title"))
    assert refresh.stale(notebook) is None, "prose may change"
    edit(notebook, lambda node: node.cells[3].update(execution_count=7))
    assert refresh.stale(notebook) == "its cells did not run once each from top to bottom"
    edit(notebook, lambda node: node.cells[3].update(execution_count=None))
    assert refresh.stale(notebook) == "the cell \"'the end'\" did not run"
    error = new_output("error", ename="KeyError", evalue="'x'", traceback=[])
    edit(notebook, lambda node: node.cells[3].update(outputs=[error], execution_count=3))
    assert refresh.stale(notebook) == "In [3]: KeyError: 'x'"
    edit(notebook, lambda node: node.cells[3].update(source="'an end'"))
    assert refresh.stale(notebook) == "its code cells changed since it ran"


def test_a_notebook_that_fails_stays_as_it_was(root, capsys):
    notebook = write(root, "fails", "1 / 0")
    before = notebook.read_bytes()
    assert refresh.main(["fails.ipynb"]) == 1
    reason = "In [2]: ZeroDivisionError: division by zero"
    assert capsys.readouterr().out == f"fails: {reason}\n"
    assert notebook.read_bytes() == before


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("x" * 600_000, "more than 500,000"),
        ("in /home/someone/data", "a path of this machine: /home/someone/data"),
    ],
    ids=["large", "leaking"],
)
def test_a_notebook_not_fit_to_be_committed_is_refused(root, monkeypatch, printed, reason):
    def execute(notebook, output, *_, **__):
        edit(shutil.copy(notebook, output), lambda node: node.cells[2].update(outputs=[stream]))
        output.with_name("reads").touch()

    stream = new_output("stream", text=printed)
    notebook = write(root, "unfit", "print('it')")
    before = notebook.read_bytes()
    monkeypatch.setattr(nb, "execute", execute)
    with pytest.raises(ValueError, match=reason):
        refresh.publish(notebook)
    assert notebook.read_bytes() == before


def test_progress_widgets_and_timings_are_dropped():
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "bar"}
    cell = new_code_cell("x", outputs=[new_output("display_data", widget)])
    cell.metadata.execution = {"iopub.execute_input": "2020-01-01"}
    node = new_notebook(cells=[cell], metadata={"widgets": {}})
    node.metadata.language_info = {"name": "python", "version": "3.11.7"}
    refresh.clean(node)
    assert cell.outputs == []
    assert "execution" not in cell.metadata
    assert node.metadata == {"language_info": {"name": "python"}}


def test_unknown_names_and_broken_files_are_told_in_a_sentence(root, capsys):
    broken = root / "notebooks" / "broken.ipynb"
    broken.write_text(json.dumps({"cells": "none"}))
    assert "is not a notebook" in (refresh.stale(broken) or "")
    assert refresh.main(["nonsense"]) == 2
    assert capsys.readouterr().err == (
        "python -m q0lib.sweeps.refresh: no notebook 'nonsense'; there is broken\n"
    )
    with pytest.raises(ValueError, match="is not a notebook"):
        nb.read(broken)
