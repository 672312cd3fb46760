"""Where the points of a sweep run: processes of this machine, or of every node of a Ray cluster.

An engine starts a program in a process of its own, which is told to stop by SIGTERM and by the end
of its stdin. On Ray a task of a core (or GPU) does the same on its node: what it starts, and what
comes of it, are the same. A task whose worker or node is lost runs again, elsewhere, and what it
trains goes on from its checkpoint. File locks may not reach other nodes, so on Ray the driver owns
the folders that it has written to, by a heartbeat in each; two processes that do train the same
thing write the same bits, whole files, by rename.
"""

import argparse
import atexit
import hashlib
import importlib.metadata
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from q0lib import files
from q0lib.provenance import PACKAGES
from q0lib.sweeps.notebook import GRACE, PACKAGE, python_path

SOURCES = {".py", ".toml", ".csv", ".mplstyle"}  # what the package is made of
OWNER = ".driver"  # the heartbeat's name in a folder
BEAT, STALE = 5.0, 60.0  # seconds between heartbeats, and after how many their driver is gone
RETRIES = 3  # of a task whose worker or node is lost
LIMITS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"


class Process(Protocol):
    """A process that was started somewhere."""

    seconds: float  # that it ran, once it has ended

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs or waits to."""

    def terminate(self) -> None:
        """Let it save and leave."""

    def kill(self) -> None:
        """End it; of one that has gone, do nothing."""


@dataclass(frozen=True)
class Session:
    """An engine at work: how many processes at a time, how to start one (Python source, its
    argument, its log), and a check that nobody else has taken over."""

    room: int
    start: Callable[[str, str, Path], Process]
    check: Callable[[], None]


class Engine(Protocol):
    """Somewhere to run processes."""

    locks: bool  # whether file locks hold between its processes

    def opened(self, folders: Sequence[Path], jobs: int | None, count: int) -> Any:
        """A context with the `Session` in which `count` processes, at most `jobs` at a time, write
        to `folders`.

        Raises:
            ValueError: another driver owns one of the folders, or the nodes do not fit; says why.
            RuntimeError: at its check or end, when another driver has taken over.
        """


# --- this machine ------------------------------------------------------------------------------


class _Child:
    """A process of this machine that a Ctrl-C at the terminal does not reach.

    Its stdin is a pipe that nothing is written to: it ends when this process does.
    """

    def __init__(
        self, program: str, argument: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.seconds, self.began = 0.0, time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, argument], env=environment,
                stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        if (code := self.process.poll()) is not None and not self.seconds:
            self.process.communicate()
            self.seconds = time.monotonic() - self.began
        return code

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Local:
    """Processes of this machine, one at a time unless `jobs` says otherwise."""

    locks = True

    @contextmanager
    def opened(self, folders: Sequence[Path], jobs: int | None, count: int) -> Iterator[Session]:
        for folder in folders:
            _refuse_owned(folder)
        room = max(1, min(jobs or 1, count))
        threads = str(max(1, (os.cpu_count() or 1) // room))
        limits = dict.fromkeys(LIMITS, threads) if room > 1 else {}
        environment = {**limits, **os.environ, "PYTHONPATH": python_path()}

        def start(program: str, argument: str, log: Path) -> Process:
            return _Child(program, argument, log, environment)

        yield Session(room, start, lambda: None)


THIS_MACHINE = Local()


# --- Ray ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster: the one at `address`, or one that is made of this machine.

    Each takes `cores` and `gpus` of a node; without a number of GPUs, one where the cluster has
    any. `jobs` limits how many run at a time, else the cluster's size does.
    """

    address: str | None = None
    cores: int = 1
    gpus: float | None = None
    locks = False

    @contextmanager
    def opened(self, folders: Sequence[Path], jobs: int | None, count: int) -> Iterator[Session]:
        with _owned(folders) as (name, check):
            ray = self._joined()
            gpus = self.gpus
            if gpus is None:
                gpus = float(ray.cluster_resources().get("GPU", 0) > 0)
            here = _facts(str(PACKAGE))
            beacons = {str(folder / OWNER): name for folder in folders}
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            self._check_nodes(ray, gpus, here, beacons)
            task = ray.remote(_supervise).options(
                num_cpus=self.cores, num_gpus=gpus, max_retries=RETRIES
            )
            limits = {each: os.environ.get(each, str(self.cores)) for each in LIMITS}
            rooted = {"Q0_ROOT": os.environ["Q0_ROOT"]} if os.environ.get("Q0_ROOT") else {}
            environment = {**limits, **rooted}

            def start(program: str, argument: str, log: Path) -> Process:
                ref = task.remote(program, argument, str(log), environment, here, beacons)
                return _Task(ray, ref, log)

            yield Session(jobs or max(1, count), start, check)

    def _joined(self) -> Any:
        """The module `ray`, in a cluster: as long as this process lives, the same one."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            import ray
        except ImportError as error:
            raise ValueError("the engine ray needs the package ray: pip install ray") from error
        if ray.is_initialized():
            return ray
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if not self.address:
            # else Ray would keep a token in the user's home
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            options |= {"include_dashboard": False, "object_store_memory": 100 << 20}
            options |= {"_temp_dir": (scratch := tempfile.mkdtemp(prefix="q0-ray-"))}
            atexit.register(_leave, ray, scratch)
        before = signal.getsignal(signal.SIGTERM)
        try:
            # Said outright, or RAY_ADDRESS would have a say.
            ray.init(address=self.address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = self.address or "this machine"
            raise ValueError(
                f"no Ray cluster at {where}: {' '.join(str(error).split())}"
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's own would let nothing save
        return ray

    def _check_nodes(
        self, ray: Any, gpus: float, here: Mapping[str, Any], beacons: Mapping[str, str]
    ) -> None:
        """ValueError if no node has room for a task, or one that has does not fit."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        able = [
            node for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= self.cores
            and node["Resources"].get("GPU", 0) >= gpus
        ]  # fmt: skip
        if not able:
            raise ValueError(
                f"no node of the Ray cluster has {self.cores} cores and {gpus:g} GPUs for a run"
            )
        looked = ray.remote(_differs)
        refs = [
            looked.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(here, beacons)
            for node in able
        ]
        try:
            found = [sentence for sentence in ray.get(refs, timeout=120) if sentence]
        except ray.exceptions.RayError as error:
            raise ValueError(f"a node of the Ray cluster does not answer: {error}") from error
        if found:
            raise ValueError(found[0])


def _leave(ray: Any, scratch: str) -> None:
    ray.shutdown()
    shutil.rmtree(scratch, ignore_errors=True)


class _Task:
    """A process on some node, supervised by a task of Ray."""

    def __init__(self, ray: Any, ref: Any, log: Path) -> None:
        self.ray, self.ref, self.log = ray, ref, log
        self.code: int | None = None
        self.seconds = 0.0

    def poll(self) -> int | None:
        if self.code is None and self.ray.wait([self.ref], timeout=0)[0]:
            errors = self.ray.exceptions
            try:
                self.code, self.seconds = self.ray.get(self.ref)
            except (errors.RayError, RuntimeError) as error:
                self.code = 1
                said = str(getattr(error, "cause", None) or error)
                if isinstance(error, errors.WorkerCrashedError | errors.NodeDiedError):
                    said = f"its worker or node was lost {RETRIES + 1} times"
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(f"{' '.join(said.split())}\n")
        return self.code

    def terminate(self) -> None:
        self.ray.cancel(self.ref)

    def kill(self) -> None:
        self.ray.cancel(self.ref, force=True)


# What follows up to the next line is sent to the nodes as it is, for they may have no q0lib, or
# another: it uses the standard library alone.


def _facts(package: str) -> dict[str, Any]:
    """Which q0lib lies in a folder, by the SHA-256 of its source, and beside which packages."""
    whole = hashlib.sha256()
    for path in sorted(Path(package).rglob("*")):
        if path.suffix in SOURCES:
            whole.update(f"{path.relative_to(package).as_posix()}\0".encode())
            whole.update(path.read_bytes())
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"package": package, "source": whole.hexdigest(), "versions": versions}


def _differs(here: Mapping[str, Any], beacons: Mapping[str, str]) -> str:
    """In one sentence, why a node is not as its driver is; "" if it is."""
    node = socket.gethostname()
    for path, name in beacons.items():
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))["driver"]
        except (OSError, ValueError, LookupError):
            held = None
        if held != name:
            return f"node {node} does not see {Path(path).parent} as the driver does: all need it"
    there = _facts(here["package"])
    if there["source"] != here["source"]:
        return f"node {node} has another q0lib in {here['package']}: all need the same"
    for package, version in here["versions"].items():
        if (held := there["versions"].get(package)) != version:
            return f"node {node} has {package} {held}, the driver {version}: all need the same"
    return ""


def _supervise(
    program: str,
    argument: str,
    log: str,
    environment: Mapping[str, str],
    here: Mapping[str, Any],
    beacons: Mapping[str, str],
) -> tuple[int, float]:
    """On a node: run the program; its exit status and seconds. RuntimeError if the node differs."""
    if sentence := _differs(here, beacons):
        raise RuntimeError(sentence)
    # The environment is the driver's last, or Ray's OMP_NUM_THREADS would win.
    path = [str(Path(here["package"]).parent), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    # A cluster that was begun in the background ignores what Ray cancels by.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = _Child(program, argument, Path(log), environment)
    deadline = math.inf
    while True:
        try:
            if child.poll() is not None:
                break
            time.sleep(0.05)  # a wait in the kernel would not hear that it is cancelled
            if time.monotonic() > deadline:
                child.kill()
        except KeyboardInterrupt:  # Ray says it again every few seconds
            if deadline == math.inf:
                child.terminate()
                deadline = time.monotonic() + GRACE + 10
    return child.poll() or 0, child.seconds


# --- who owns a folder --------------------------------------------------------------------------


def _beat_of(folder: Path) -> tuple[dict[str, Any], float]:
    """What a folder's heartbeat says, and how long ago it was written, in seconds.

    By the clock of whoever keeps the files: machines may disagree about the time.
    """
    with (folder / OWNER).open(encoding="utf-8") as file:
        said, written = json.load(file), os.fstat(file.fileno()).st_mtime
    with tempfile.NamedTemporaryFile(dir=folder, prefix=OWNER) as now:
        return said, os.fstat(now.fileno()).st_mtime - written


def _refuse_owned(folder: Path) -> None:
    try:
        said, age = _beat_of(folder)
    except (OSError, ValueError):
        return
    if age < STALE:
        raise ValueError(
            f"{folder} belongs to the driver {said['driver']}, which was alive {age:.0f} s ago: "
            f"wait for it, or until it has been silent for {STALE:.0f} s"
        )


@contextmanager
def _owned(folders: Sequence[Path]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Own folders: yields this driver's name, and a check that it still owns them.

    Of two drivers that take over at the same moment one finds out within a heartbeat.
    """
    name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    ended, lost = threading.Event(), list[Path]()

    def write(folder: Path) -> None:
        files.write_text(folder / OWNER, json.dumps({"driver": name}))

    def beat() -> None:
        while not ended.wait(BEAT):
            for folder in folders:
                with suppress(OSError):  # a full disk, a server away: the next one may be written
                    if _holder(folder) not in (None, name):
                        lost.append(folder)
                        return
                    write(folder)

    def check() -> None:
        if lost:
            raise RuntimeError(f"another driver has taken over {lost[0]}: this one stops")

    beating = threading.Thread(target=beat, daemon=True)
    mine = list[Path]()
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_owned(folder)
            write(folder)
            mine.append(folder)
        beating.start()
        yield name, check
    finally:
        ended.set()
        if beating.is_alive():
            beating.join()
        for folder in mine:
            if _holder(folder) == name:
                (folder / OWNER).unlink(missing_ok=True)
    check()


def _holder(folder: Path) -> str | None:
    try:
        return json.loads((folder / OWNER).read_text(encoding="utf-8"))["driver"]
    except (OSError, ValueError, LookupError):
        return None


# --- the command line ---------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose an engine."""
    add = parser.add_argument
    add("--engine", choices=["local", "ray"], default="local",
        help="this machine (default), or a Ray cluster")  # fmt: skip
    add("--address", metavar="A", help="of the Ray cluster, such as auto; else this machine is one")
    add("--cores", type=int, default=1, metavar="N", help="of a node, for each run on Ray: 1")
    add("--gpus", type=float, metavar="N",
        help="of a node, for each run on Ray (default: one, if the cluster has any)")  # fmt: skip


def chosen(given: dict[str, Any]) -> Engine:
    """The engine that parsed arguments ask for; takes what is about it out of `given`.

    Raises:
        ValueError: an option of Ray's without it, or a number below what it may be.
    """
    engine, address, cores, gpus = (
        given.pop(name) for name in ("engine", "address", "cores", "gpus")
    )
    if engine == "local":
        if address or cores != 1 or gpus is not None:
            raise ValueError("--address, --cores and --gpus need --engine ray")
        return THIS_MACHINE
    if cores < 1:
        raise ValueError(f"cores must be > 0, got {cores}")
    if gpus is not None and gpus < 0:
        raise ValueError(f"gpus must be >= 0, got {gpus:g}")
    return Ray(address, cores, gpus)
