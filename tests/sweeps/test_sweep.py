"""Sweeps: only what ran to its last cell counts, whatever notebook, values or kernel do."""

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import nbformat
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from q0lib import files, paths
from q0lib.sweeps import notebook as nb
from q0lib.sweeps import sweep

DEFAULTS = "mode = 'works'\nseed: int = 0\nvalues = [\n    1,  # of several lines\n]\nwhere = None"
MODES = """
import os, sys, time

print("mode", mode, "seed", seed)
if mode == "raises":
    raise ValueError("no such corpus\\n(second line)")
if mode == "killed":
    os.kill(os.getpid(), 9)
if mode == "exits":
    sys.exit(0)
if mode == "leaves":
    exit()
if mode == "hangs":
    time.sleep(600)
"""
COUNT = "with open(f'{where}/ran', 'a') as file:\n    file.write(f'{mode}{seed} ')"


def write(path: Path, *cells: str, kernel: str = "conda-env-x-py") -> Path:
    """A notebook with parameters, these cells, and a kernel that does not exist here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = {"name": kernel, "display_name": kernel, "language": "python"}
    node = new_notebook(metadata={"kernelspec": spec}, cells=[new_markdown_cell("# A title")])
    node.cells.append(new_code_cell(DEFAULTS, metadata={"tags": ["parameters"]}))
    node.cells += [new_code_cell(cell) for cell in cells]
    nbformat.write(node, path)
    return path


def ran(folder: Path) -> list[str]:
    """What the notebooks' COUNT cells noted, one entry for each run."""
    return sorted((folder / "ran").read_text().split()) if (folder / "ran").exists() else []


def test_kernel_is_this_python_values_arrive_as_they_are_and_paths_may_be_odd(tmp_path):
    folder = tmp_path / "papér mill {x}" / "ñ"
    notebook = write(
        folder / "in put α.ipynb",
        "import json, os, sys, q0lib",
        "seen = [mode, seed, values, where, sys.executable, os.getcwd()]",
        "json.dump([seen, repr(seen[:4]), q0lib.__file__], open('seen.json', 'w'))",
    )
    output = tmp_path / "ö u t" / "out α.ipynb"
    given = {
        "mode": Path("a dir/ñ"),
        "seed": np.int64(3),
        "values": (np.float32(0.5), np.bool_(True), np.arange(2), [None, ("a\n'\"\\", -1e-4)]),
        "where": True,
    }
    nb.execute(notebook, output, given)
    seen, literally, package = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    sent = ["a dir/ñ", 3, [0.5, True, [0, 1], [None, ["a\n'\"\\", -0.0001]]], True]
    assert seen == [*sent, sys.executable, str(folder)]
    assert literally == repr(sent)
    assert Path(package).parent == nb.PACKAGE
    done = nbformat.read(output, as_version=4)
    nbformat.validate(done)
    assert done.metadata.kernelspec.name == "python3"
    assert done.metadata.papermill.input_path == str(notebook)
    assert sorted(p.name for p in output.parent.iterdir()) == [output.name]


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.inf,
        np.float32("inf"),
        {"a": 1},
        {1},
        b"x",
        1j,
        object(),
        np.datetime64(1, "D"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_a_notebook_cannot_be_given_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"parameter lr\[1\]"):
        nb.plain("lr", [0.1, value])


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3),
)  # fmt: skip


@given(literals)
def test_literals_pass_unchanged_and_the_command_line_reads_them_back(value):
    assert nb.plain("x", value) == value
    assert sweep._value(json.dumps(value)) == value
    assert sweep._value(repr(value)) == value
    assert sweep._values(json.dumps(value)) == [value]


def test_values_as_typed():
    assert sweep._values("16,1e-4,true,True,None,q0,[1, 2],'a,b',007, c d ") == [
        *(16, 1e-4, True, True, None, "q0", [1, 2], "a,b", "007", "c d")
    ]
    assert sweep._value("[q0, ensemble]") == ["q0", "ensemble"]
    assert sweep._values("[1,2],[3]") == [[1, 2], [3]]
    assert isinstance(sweep._value("1e-4"), float)


def test_bad_arguments_are_one_sentence_and_run_nothing(tmp_path, capsys):
    notebook = write(tmp_path / "n.ipynb", COUNT)
    bare = tmp_path / "bare.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("seed = 0")]), bare)
    (tmp_path / "text.ipynb").write_text("not JSON")
    for arguments, sentence in {
        (
            notebook,
            "-p",
            "epoch=1",
        ): "no parameter 'epoch'; its parameters: mode, seed, values, where",
        (notebook, "-g", "epoch=1,2"): "no parameter 'epoch'",
        (notebook, "-p", "seed"): "expected name=value, each name once, got 'seed'",
        (notebook, "-p", "seed=1", "-p", "seed=2"): "each name once, got 'seed=2'",
        (notebook, "-p", "seed=1", "-g", "seed=2"): "seed is both fixed and in the grid",
        (notebook, "-p", "seed=NaN"): "parameter seed cannot be nan",
        (notebook, "-g", "seed="): "the grid of seed must be a list of values, at least one",
        (notebook, "--jobs", "0"): "jobs must be > 0, got 0",
        (notebook, "--timeout", "-1"): "timeout must be > 0 seconds, got -1.0",
        (notebook, "--input", "missing.csv"): "No such file or directory",
        (bare, "-p", "seed=1"): "has no code cell tagged 'parameters'",
        (tmp_path / "text.ipynb",): "is not a notebook",
        (tmp_path / "none.ipynb",): "there is no notebook",
    }.items():
        assert sweep.main([*map(str, arguments), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    for values in ("12", [], [object()]):
        with pytest.raises(ValueError, match="seed"):
            sweep.sweep(notebook, {}, {"seed": values}, out=tmp_path / "out")
    with pytest.raises(ValueError, match="seed is both listed and not"):
        sweep.sweep(notebook, {}, {"seed": [1]}, listed=[{"seed": 2}], out=tmp_path / "out")
    with pytest.raises(ValueError, match="no parameter 'epoch'"):
        nb.execute(notebook, tmp_path / "out.ipynb", {"epoch": 1})
    assert ran(tmp_path) == []
    assert not list(tmp_path.glob("out/*.ipynb"))


def test_listed_points_are_combined_with_the_grid_and_none_runs_twice(tmp_path):
    listed = [{"mode": "a", "values": [1]}, {"mode": "b"}, {"mode": "b"}]
    points = sweep._points("n", {"where": ""}, {"seed": [1, 2]}, tmp_path, listed)
    assert [point.parameters for point in points] == [
        {"where": "", **one, "seed": seed} for one in listed[:2] for seed in (1, 2)
    ]
    assert len({point.output for point in points}) == 4
    assert points[0].output.name.startswith("mode=a,values=-1-,seed=1-")


def test_a_point_that_fails_is_told_with_its_reason_and_alone_redone(tmp_path, capsys):
    notebook = write(tmp_path / "n.ipynb", MODES, COUNT)
    out = tmp_path / "out"
    command = [str(notebook), "-p", f"where={tmp_path}", "-g", "mode=works,raises,killed,exits"]
    command += ["--jobs", "2", "--out", str(out)]
    assert sweep.main(command) == 1
    assert "1 done, 3 failed, 0 skipped" in capsys.readouterr().out
    table = pd.read_csv(out / "sweep.csv", keep_default_na=False).set_index("mode")
    assert list(table["status"]) == ["done", "failed", "failed", "failed"]
    assert list(table["reason"]) == [
        "",
        "In [3]: ValueError: no such corpus (second line)",
        "the kernel died: killed, crashed, or left by a cell",
        "In [3]: SystemExit: 0",
    ]
    outputs = [Path(path) for path in table["output"]]
    assert [path.exists() for path in outputs] == [True, False, False, False]
    assert "mode works seed 0" in outputs[0].with_suffix(".log").read_text()
    assert ran(tmp_path) == ["works0"]

    command[4] = "mode=works,raises"
    assert sweep.main(command) == 1
    assert "0 done, 1 failed, 1 skipped" in capsys.readouterr().out
    assert ran(tmp_path) == ["works0"]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("leaves", r"In \[3\]: SystemExit: "), ("hangs", "a cell ran for more than 1 s")],
)
def test_an_earlier_output_survives_a_run_that_fails(tmp_path, mode, reason):
    notebook = write(tmp_path / "n.ipynb", MODES, "'the end'")
    output = tmp_path / "out" / "n.ipynb"
    files.write_text(output, "earlier")
    with pytest.raises(nb.NotebookError, match=reason):
        nb.execute(notebook, output, {"mode": mode}, timeout=1)
    assert output.read_text() == "earlier"
    assert list(output.parent.iterdir()) == [output]


def test_a_kernel_that_loses_the_race_for_its_ports_is_started_again(tmp_path, monkeypatch):
    notebook = write(tmp_path / "n.ipynb", COUNT)
    calls, lucky, really = [], nb.STARTS, nb.papermill.execute_notebook

    def unlucky(*given, **options):
        calls.append(given)
        if len(calls) < lucky:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return really(*given, **options)

    monkeypatch.setattr(nb.papermill, "execute_notebook", unlucky)
    nb.execute(notebook, tmp_path / "out.ipynb", {"where": str(tmp_path)})
    assert len(calls) == lucky
    assert len(ran(tmp_path)) == 1
    calls.clear()
    lucky += 1
    with pytest.raises(nb.NotebookError, match="no kernel came up in 3 attempts: Kernel died"):
        nb.execute(notebook, tmp_path / "other.ipynb", {"where": str(tmp_path)})


def test_points_run_once_until_something_they_depend_on_changes(tmp_path, monkeypatch):
    notebook = write(tmp_path / "n.ipynb", COUNT, "import os\nprint(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)

    def statuses(seeds, **options):
        grid = {"seed": seeds}
        return list(sweep.sweep(notebook, {"where": tmp_path}, grid, jobs=2, **options)["status"])

    assert statuses([1, np.int64(1), 2, 1]) == ["done", "done"], "duplicates are one point"
    outputs = sorted((tmp_path / "runs/sweeps/n").glob("*.ipynb"))
    assert [path.name.split("-")[0] for path in outputs] == ["seed=1", "seed=2"]
    assert nbformat.read(outputs[0], as_version=4).cells[-1].outputs[0].text == "3\n"
    assert statuses([2, 1]) == ["skipped", "skipped"]
    assert statuses([1, 2], force=True) == ["done", "done"]
    assert ran(tmp_path) == ["works1", "works1", "works2", "works2"]

    corpus = tmp_path / "corpus.bin"
    corpus.write_bytes(b"old")
    node = nb.read(notebook)
    key = sweep.point_key(node, {"seed": 1}, [corpus])
    assert sweep.point_key(node, {"seed": 2}, [corpus]) != key
    corpus.write_bytes(b"new")
    new = sweep.point_key(node, {"seed": 1}, [corpus])
    assert new != key
    node.cells[0].source = "# Another title"
    assert sweep.point_key(node, {"seed": 1}, [corpus]) == new
    node.cells[2].source += "\n"
    assert sweep.point_key(node, {"seed": 1}, [corpus]) != new
    assert sweep._stamped(outputs[0])[0] is not None
    outputs[0].write_text(outputs[0].read_text()[:100])
    assert sweep._stamped(outputs[0]) == (None, 0), "half an output is none"


def test_a_point_that_is_skipped_keeps_the_seconds_that_it_took(tmp_path):
    notebook = write(tmp_path / "n.ipynb", "import time\ntime.sleep(0.5)")

    def swept(seeds):
        table = sweep.sweep(notebook, {}, {"seed": seeds}, out=tmp_path / "out")
        assert pd.read_csv(tmp_path / "out/sweep.csv").seconds.tolist() == table.seconds.tolist()
        return table.set_index("seed").seconds

    took = swept([1])[1]
    assert took > 0.5
    assert swept([1, 2])[1] == took


@pytest.mark.parametrize("name", ["a.py", "study/plans/cpu.toml", "trials.csv", "q0.mplstyle"])
def test_whatever_the_package_is_made_of_decides_the_key(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sweep, "PACKAGE", tmp_path)
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("1")
    key = sweep.point_key(new_notebook(), {}, [])
    (tmp_path / "cached.pyc").write_text("1")
    assert sweep.point_key(new_notebook(), {}, []) == key
    file.write_text("2")
    assert sweep.point_key(new_notebook(), {}, []) != key


def test_two_sweeps_that_race_run_a_point_once(tmp_path):
    notebook = write(tmp_path / "n.ipynb", "import time; time.sleep(1)", COUNT)
    tables = []

    def run():
        fixed = {"where": tmp_path}
        tables.append(sweep.sweep(notebook, fixed, {"seed": [1]}, out=tmp_path / "out"))

    threads = [Thread(target=run), Thread(target=run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran(tmp_path) == ["works1"]
    assert sorted(table["status"][0] for table in tables) == ["done", "skipped"]


SAVING = """
import os, time
open(f"{where}/started", "w").write(f"{os.getpid()} {os.getppid()}")
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.5)
    open(f"{where}/saved", "w").close()
    raise
"""
BUSY = """
import os
open(f"{where}/started", "w").write(f"{os.getpid()} {os.getppid()}")
while True:
    try:
        while True:
            sum(range(10**6))
    except KeyboardInterrupt:
        pass
"""


def started(tmp_path: Path, cell: str, **options) -> subprocess.Popen:
    """A sweep of two points in a process of its own, the first of them in its cell."""
    notebook = write(tmp_path / "n.ipynb", cell)
    command = [sys.executable, "-m", "q0lib.sweeps", str(notebook), "-p", f"where={tmp_path}"]
    command += ["-g", "seed=1,2", "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": nb.python_path()}
    process = subprocess.Popen(command, env=environment, text=True, **options)
    wait(lambda: len(pids(tmp_path)) == 2)
    return process


def pids(tmp_path: Path) -> list[int]:
    """Of the kernel that is in its cell, and of the sweep's child that started it."""
    started = tmp_path / "started"
    return [int(pid) for pid in started.read_text().split()] if started.exists() else []


def runs(pid: int) -> bool:
    """Whether a process is there, and not merely waiting to be collected."""
    if shutil.which("ps") is None:
        pytest.skip("needs ps")
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def wait(happened, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_a_stopped_sweep_lets_its_points_save_and_leaves_none_behind(tmp_path, number):
    process = started(tmp_path, SAVING, stdout=subprocess.PIPE)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "0 done, 0 failed, 0 skipped, 2 interrupted" in printed
    assert (tmp_path / "saved").exists()
    assert not any(map(runs, pids(tmp_path)))
    assert not list((tmp_path / "out").glob("*.ipynb"))


def test_a_sweep_whose_terminal_goes_lets_its_points_save(tmp_path):
    ours, terminal = os.openpty()
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = started(tmp_path, SAVING, start_new_session=True, **ends)
    os.close(terminal)
    os.close(ours)  # writing to it is an error from here on
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    process.send_signal(signal.SIGHUP)  # by the terminal, and by the shell that ran in it
    assert process.wait(timeout=60) == 130
    assert (tmp_path / "saved").exists()
    table = pd.read_csv(tmp_path / "out/sweep.csv")
    assert table.status.tolist() == ["interrupted", "interrupted"]


def test_points_of_a_sweep_that_is_killed_save_and_end_with_their_kernels(tmp_path):
    process = started(tmp_path, SAVING)
    process.kill()
    process.wait()
    wait(lambda: not any(map(runs, pids(tmp_path))))
    assert (tmp_path / "saved").exists()
    assert not list((tmp_path / "out").glob("*.ipynb"))


def test_a_busy_kernel_ends_with_the_point_that_is_killed(tmp_path):
    process = started(tmp_path, BUSY)
    kernel, child = pids(tmp_path)
    os.kill(child, signal.SIGKILL)
    wait(lambda: not runs(kernel))
    process.kill()
    process.wait()


def test_a_kernel_that_comes_up_after_its_parent_has_gone_ends():
    environment = os.environ | {"JPY_PARENT_PID": "1"}
    program = f"{nb.ORPHAN}\nprint('still here')"
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert (result.returncode, result.stdout) == (1, b"")


def test_what_a_log_cannot_hold_ends_no_run(tmp_path):
    talks = "print('Zürich 漢字', chr(0xDC80))\n'ö'"
    notebook = write(tmp_path / "n.ipynb", talks, COUNT)
    command = [sys.executable, "-m", "q0lib.sweeps", str(notebook), "-p", f"where={tmp_path}"]
    command += ["-p", "mode=é", "--out", str(tmp_path / "out")]
    ascii_only = {"PYTHONPATH": nb.python_path(), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    environment = os.environ | ascii_only
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 done, 0 failed, 0 skipped" in result.stdout
    assert "\\xe9" in result.stdout
    assert ran(tmp_path) == ["é0"]
    (log,) = (tmp_path / "out").glob("*.log")
    assert "Zürich 漢字" in log.read_text(encoding="utf-8")

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    for file in (io.TextIOWrapper(io.BytesIO(), encoding="ascii"), Full()):
        log = nb._Log(file)
        log.write("Zürich\n")
        log.close()


def test_progress_frames_leave_their_last_state_in_notebook_and_log(tmp_path):
    frames = """
import sys
for i in range(10_001):
    print(f"\\r{i / 100:.2f}%|" + "#" * 50, end="", file=sys.stderr)
    if i % 100 == 0:
        sys.stderr.flush()
print()
print("one\\r\\ntwo", end="")
display("shown")
print("three")
"""
    output, log = tmp_path / "out.ipynb", io.StringIO()
    nb.execute(write(tmp_path / "n.ipynb", frames), output, {}, log=log)
    bar = f"100.00%|{'#' * 50}"
    outputs = [out.get("text") for out in nbformat.read(output, as_version=4).cells[-1].outputs]
    assert sorted(outputs, key=str) == sorted([bar, "\none\ntwo", None, "three\n"], key=str)
    assert sorted(log.getvalue().splitlines()) == ["", bar, "one", "twothree"]


@given(st.lists(st.text("ab\r\n", max_size=6), max_size=6))
def test_a_log_in_pieces_is_the_whole_as_a_terminal_leaves_it(pieces):
    file = io.StringIO()
    log = nb._Log(file)
    for piece in pieces:
        log.write(piece)
    log.close()
    whole = "".join(pieces)
    expected = "\n".join(line.rstrip("\r").split("\r")[-1] for line in whole.split("\n"))
    assert file.getvalue().rstrip("\n") == expected.rstrip("\n")


def test_output_that_does_not_arrive_is_told_as_that(tmp_path, monkeypatch):
    blocked = """
import sys, time
sys.stdout.flush_timeout = sys.stderr.flush_timeout = 0.1
get_ipython().kernel.iopub_thread.schedule(lambda: time.sleep(5))
"""
    notebook = write(tmp_path / "n.ipynb", blocked)
    monkeypatch.setattr(nb, "DRAIN", 1)
    for timeout in (None, 3600):
        with pytest.raises(nb.NotebookError, match="its output had not all arrived 1 s later"):
            nb.execute(notebook, tmp_path / "out.ipynb", {}, timeout=timeout)
