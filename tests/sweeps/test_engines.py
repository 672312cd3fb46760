"""Where points run: on Ray the same things come of them as here, whatever is lost on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from tiny import tiny_overrides, tiny_study

from q0lib import files, paths, population
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
    with pytest.raises(RuntimeError, match="another driver has taken over"), \
            engines._owned([tmp_path]) as (first, check):  # fmt: skip
        monkeypatch.setattr(engines, "STALE", -1.0)
        with engines._owned([tmp_path]) as (second, still):
            assert second != first

            def lost() -> bool:
                try:
                    check()
                except RuntimeError:
                    return True
                return False

            wait(lost)
            still()
            assert json.loads(beat.read_text())["driver"] == second
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


# --- two nodes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """A head without cores and two nodes of one core each, on this machine."""
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
        there.added = [there.add_node(num_cpus=1, **small) for _ in range(2)]
        yield there
        ray.shutdown()
        there.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def children_of(name: str) -> list[psutil.Process]:
    """Processes whose command line has `name` in it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(name in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def tiny_ensemble():
    return tiny_study(0, *OVERRIDES).run("ensemble", 120)


OVERRIDES = ["ensemble.epochs_per_cycle=40", "runtime.threads=2", "runtime.checkpoint_seconds=0.2"]


def rows(run, folder: Path) -> dict:
    """The checksum of every member's probabilities, and under what runtime they came to be."""
    found = {}
    for path in sorted(folder.glob("t*/c*.safetensors")):
        _, about = files.open_tensors(path)
        found[f"{path.parent.name}/{path.name}"] = about["crc32"], json.loads(about["record"])
    return found
