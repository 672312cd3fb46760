"""Where points run: on Ray the same things come of them as here, whatever is lost on the way."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from tiny import tiny_overrides

from q0lib import files, paths, population, train
from q0lib.study import plan, runs
from q0lib.sweeps import engines, sweep
from q0lib.sweeps import notebook as nb


def wait(happened, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# --- who owns a folder --------------------------------------------------------------------------


def test_a_second_driver_is_refused_while_the_first_is_alive(tmp_path):
    with engines._owned([tmp_path]) as (name, check):
        check()
        with pytest.raises(ValueError, match=f"belongs to the driver {name}"), \
                engines._owned([tmp_path]):  # fmt: skip
            pass
        with pytest.raises(ValueError, match=f"belongs to the driver {name}"), \
                engines.Local().opened([tmp_path], 1, 1):  # fmt: skip
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_silent_driver_is_taken_over_and_finds_out(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "BEAT", 0.05)
    beat = tmp_path / engines.OWNER
    first = engines._owned([tmp_path])
    name, check = first.__enter__()
    monkeypatch.setattr(engines, "STALE", -1.0)
    with engines._owned([tmp_path]) as (second, still):

        def lost() -> bool:
            try:
                check()
            except RuntimeError as error:
                return "another driver has taken over" in str(error)
            return False

        wait(lost)
        still()
        with pytest.raises(RuntimeError, match="another driver has taken over"):
            first.__exit__(None, None, None)
        assert json.loads(beat.read_text())["driver"] == second != name
    assert not beat.exists()


def test_a_heartbeat_keeps_a_folder_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "BEAT", 0.05)
    with engines._owned([tmp_path]):
        os.utime(tmp_path / engines.OWNER, (1, 1))
        wait(lambda: engines._beat_of(tmp_path)[1] < 10)


# --- what a node must have ----------------------------------------------------------------------


def test_a_node_that_differs_is_one_sentence(tmp_path):
    package, beacon = tmp_path / "q0lib", tmp_path / "data" / engines.OWNER
    files.write_text(package / "a.py", "1")
    files.write_text(package / "study/plans/cpu.toml", "1")
    files.write_text(beacon, '{"driver": "me"}')
    here = engines._facts(str(package))
    assert engines._differs(here, {str(beacon): "me"}) == ""
    assert "does not see" in engines._differs(here, {str(beacon): "another"})
    assert "does not see" in engines._differs(here, {str(tmp_path / "none"): "me"})
    torch = here | {"versions": here["versions"] | {"torch": "1.0"}}
    assert "the driver 1.0: all need the same" in engines._differs(torch, {})
    (package / "study/plans/cpu.toml").write_text("2")
    assert "another q0lib" in engines._differs(here, {})


def test_options_of_ray_need_ray():
    with pytest.raises(ValueError, match="need --engine ray"):
        engines.chosen({"engine": "local", "address": "auto", "cores": 1, "gpus": None})
    with pytest.raises(ValueError, match="cores must be > 0, got 0"):
        engines.chosen({"engine": "ray", "address": None, "cores": 0, "gpus": None})
    given = {"engine": "ray", "address": "auto", "cores": 2, "gpus": 0.5, "jobs": 3}
    assert engines.chosen(given) == engines.Ray("auto", 2, 0.5)
    assert given == {"jobs": 3}


@pytest.mark.parametrize(("address", "asked"), [(None, "local"), ("auto", "auto")])
def test_a_cluster_is_joined_only_when_it_is_named(monkeypatch, address, asked):
    """Ray itself would join whatever RAY_ADDRESS says, report its use and open a dashboard."""
    begun, ended = [], []
    fake = SimpleNamespace(is_initialized=bool, init=lambda **options: begun.append(options),
                           shutdown=lambda: None)  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(atexit, "register", lambda *given: ended.append(given))
    for name in ("RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "another")
    assert engines.Ray(address)._joined() is fake
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert begun[0]["address"] == asked
    assert (
        ("_temp_dir" in begun[0]) == (begun[0].get("include_dashboard") is False) == (not address)
    )
    for leave, *given in ended:
        leave(*given)
        assert not Path(begun[0]["_temp_dir"]).exists()


def test_without_ray_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(ValueError, match="pip install ray"):
        engines.Ray()._joined()


# --- two nodes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """A head without cores and two nodes for one run of two cores each, on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="q0-ray-")  # short: the names of sockets are limited
    small = {"include_dashboard": False, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_AUTH_MODE", "disabled")
        patched.setenv("RAY_TMPDIR", folder)
        patched.setenv("PYTHONPATH", nb.python_path())
        there = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        there.added = [there.add_node(num_cpus=2, **small) for _ in range(2)]
        yield there
        ray.shutdown()
        there.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


OVERRIDES = ["q0.trajectories=2", "q0.epochs_per_cycle=10", "q0.horizon=10", "runtime.threads=1",
             "runtime.checkpoint_seconds=0.2"]  # fmt: skip


def point(trajectory: int) -> psutil.Process | None:
    """The process that runs the point of a trajectory; a worker of Ray is its parent."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if f'"trajectory": {trajectory}' in words[-1] and process.status() != "zombie":
            return process
    return None


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def checksums(folder: Path) -> dict[str, str]:
    """Of the probabilities of every member; those of the run's weights are not kept."""
    members = sorted(folder.glob("t*/c????.safetensors"))
    return {str(path.relative_to(folder)): files.open_tensors(path)[1]["crc32"] for path in members}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A folder like the checkout, for this process and for those of the nodes."""
    (tmp_path / "notebooks").symlink_to(paths.NOTEBOOKS)
    monkeypatch.setenv("Q0_ROOT", str(tmp_path))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "data/runs")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "data/cache")
    return tmp_path


def test_what_a_lost_worker_and_a_lost_node_were_training_is_trained_to_the_same_bits(
    cluster, root, monkeypatch, capsys
):
    overrides = (*tiny_overrides(), *OVERRIDES)
    each = plan.Experiment("main", "two", "q0", 80, overrides)
    run = each.run("quick", 0)
    assert (run.trajectories, run.cycles) == (2, 4)
    train.train_population(run, directory=root / "here", progress=False)
    monkeypatch.delenv("OMP_NUM_THREADS")  # so that Ray has its say
    raised = []

    def driver() -> None:
        try:
            runs.train([each], "quick", [0], engine=engines.Ray(cluster.address, cores=2))
        except BaseException as error:
            raised.append(error)

    def member(trajectory: int, cycle: int) -> Path:
        return population.member_path(run.directory, trajectory, cycle)

    driving = threading.Thread(target=driver)
    driving.start()

    def begun() -> list[int]:
        """Trajectories with a checkpoint behind their first member."""
        places = {t: (member(t, 0), member(t, 0).with_name("checkpoint.pt")) for t in (0, 1)}
        there = {t: both for t, both in places.items() if all(path.exists() for path in both)}
        return [
            t for t, (first, now) in there.items() if now.stat().st_mtime > first.stat().st_mtime
        ]

    wait(lambda: begun() or raised)
    assert not raised
    one = begun()[0]
    point(one).parent().kill()  # a worker: what it started saves and leaves
    other = 1 - one
    wait(lambda: other in begun())
    kept = {t: member(t, 0).stat().st_ino for t in (0, 1)}
    lost = point(other)
    raylet = lost.parent().parent().pid
    node = next(n for n in cluster.added if n.all_processes["raylet"][0].process.pid == raylet)
    end([lost.parent(), lost, *lost.children(recursive=True)])  # as when the power fails
    cluster.remove_node(node, allow_graceful=False)
    assert not any(member(t, 3).exists() for t in (0, 1)), "there must be something to lose"
    driving.join()
    assert raised == []
    assert checksums(run.directory) == checksums(root / "here")
    assert {t: member(t, 0).stat().st_ino for t in (0, 1)} == kept, "from a checkpoint, not anew"
    assert population.is_complete(run)
    assert (run.directory / "mixture.json").exists()
    runtimes = {record["runtime"] for record in population.records(run.directory)}
    assert runtimes == {"device cpu, threads 1, micro_batch 0, compile False"}, "and not Ray's 2"
    assert "done in" in capsys.readouterr().out
    assert not list(root.rglob(engines.OWNER))
    cluster.added = [n for n in cluster.added if n is not node]


TELLING = """
import os, sys, time
if mode == "raises":
    raise ValueError("no such corpus")
if mode == "killed":
    os.kill(os.getpid(), 9)
"""


def test_statuses_reasons_and_exit_status_are_those_of_this_machine(cluster, tmp_path, capsys):
    """Those that `test_sweep` has for the same notebook."""
    parameters = new_code_cell("mode = 'works'", metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[parameters, new_code_cell(TELLING)]), tmp_path / "n.ipynb")
    command = [str(tmp_path / "n.ipynb"), "-g", "mode=works,raises,killed"]
    command += ["--out", str(tmp_path / "out"), "--engine", "ray", "--address", cluster.address]
    assert sweep.main(command) == 1
    table = pd.read_csv(tmp_path / "out/sweep.csv", keep_default_na=False)
    assert table.status.tolist() == ["done", "failed", "failed"]
    assert table.reason.tolist() == [
        "",
        "In [3]: ValueError: no such corpus",
        "the kernel died: killed, crashed, or left by a cell",
    ]
    assert (table.seconds > 0).all()
    assert "1 done, 2 failed, 0 skipped" in capsys.readouterr().out


def test_a_cluster_without_room_for_a_run_is_refused_before_anything_runs(cluster, tmp_path):
    for engine, words in {
        engines.Ray(cluster.address, cores=64): "no node of the Ray cluster has 64 cores and 0 GPU",
        engines.Ray(cluster.address, gpus=1): "no node of the Ray cluster has 1 cores and 1 GPUs",
    }.items():
        with pytest.raises(ValueError, match=words), engine.opened([tmp_path], None, 1):
            pass
    assert list(tmp_path.iterdir()) == []


DRIVEN = """
import signal, time
try:
    open(f"{where}/started", "a").write("x")
    while mode == "works" and not __import__("os").path.exists(f"{where}/go"):
        time.sleep(0.1)
except KeyboardInterrupt:
    open(f"{where}/saved", "w").close()
    raise
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_driver_may_stop_or_die_and_be_started_again(cluster, tmp_path, number):
    defaults = new_code_cell("mode = 'works'\nwhere = ''", metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[defaults, new_code_cell(DRIVEN)]), tmp_path / "n.ipynb")
    command = [sys.executable, "-m", "q0lib.sweeps", str(tmp_path / "n.ipynb"), "-p",
               f"where={tmp_path}", "--out", str(tmp_path / "out"), "--engine", "ray",
               "--address", cluster.address]  # fmt: skip
    first = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait((tmp_path / "started").exists)
    first.send_signal(number)
    said, errors = first.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert first.returncode == 130, errors
        assert "1 interrupted" in said
        assert (tmp_path / "saved").exists()
        return
    with pytest.raises(ValueError, match="belongs to the driver"):
        engines._refuse_owned(tmp_path / "out")
    os.utime(tmp_path / "out" / engines.OWNER, (1, 1))  # a minute later
    (tmp_path / "go").touch()
    assert sweep.main(command[3:]) == 0
    assert pd.read_csv(tmp_path / "out/sweep.csv").status.tolist() == ["done"]
