"""Where a number was made: versions, commit, machine, and the code that decides it."""

import ast
import functools
import hashlib
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from q0lib import paths

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors")
# The modules whose code decides what a config trains to, and what is recorded of it.
TRAINING = (
    "corpus", "distill", "evaluate", "lessons", "model", "optim", "ranks", "schedule", "student",
    "train", "trajectory",
)  # fmt: skip


@functools.cache
def provenance() -> dict[str, Any]:
    """Versions, commit and machine."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "platform": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
    }


@functools.cache
def code() -> dict[str, str]:
    """Eight hex digits for each module of `TRAINING`: of what it does, not of what it says.

    Comments, docstrings and layout do not count, so that explaining a line leaves runs valid.
    """
    here = Path(__file__).parent
    return {name: _code_hash((here / f"{name}.py").read_text("utf-8")) for name in TRAINING}


def _code_hash(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]


def _commit() -> str:
    """The checkout's commit, with a + when files differ from it; "unknown" outside a checkout."""
    git = ["git", "-C", str(paths.ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "q0lib"], capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
