"""Fixtures that the tests share, on the tiny study of `tiny`."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test workers share the cores

import pytest
from tiny import tiny_study

from q0lib import corpus, paths


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> corpus.Text:
    """The tiny study's corpus; prepared once in a folder of the test session."""
    return corpus.load(tiny_study().corpus, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs that belongs to one test."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def data_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of runs and corpora that belong to the tests of one module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUNS", "CACHE"):
            patch.setattr(paths, name, tmp_path_factory.mktemp(name.lower()))
        yield
