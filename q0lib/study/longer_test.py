"""Populations on more test text than they were trained with, where their weights were kept.

A study's test text is as short as its training can afford, and an interval counts its documents.
More of the same pool, read afterwards, trains nothing anew and chooses nothing.
"""

import dataclasses

import numpy as np
from tqdm import tqdm

from q0lib import corpus, ensemble, evaluate, files, population, rows, runtime
from q0lib.population import Population


def read(whole: Population, tokens: int, *, progress: bool = True) -> Population:
    """The population with its test split taken from the first `tokens` of the test pool.

    Each member's weights are evaluated once; what they say is kept in `longer_test/` of the run's
    directory. All else stays, the fitness text that weighs the members among it.

    Raises:
        FileNotFoundError: weights were not kept.
        ValueError: the pool holds fewer tokens; the corpus is streamed, so that what follows the
            test text was trained on; or what was kept is of another text.
    """
    run = whole.run
    if run.corpus.streamed:
        raise ValueError(
            f"of a streamed corpus ({run.corpus.source!r}) the splits follow one another: a longer "
            "test text would hold what was trained on"
        )
    text = corpus.load(dataclasses.replace(run.corpus, test_tokens=tokens))
    split = text["test"]
    beside = whole.directory / "longer_test" / str(tokens)
    dtype, device = runtime.DTYPES[run.precision], str(runtime.device(run.runtime.device))
    places = []
    with (
        runtime.threads(run.runtime.threads),
        tqdm(range(len(whole)), desc=f"{run.name} seed {run.seed}", unit="member",
             disable=not progress) as bar,
    ):  # fmt: skip
        for member in bar:
            at = whole.members.iloc[member]
            path = population.member_path(beside, int(at.trajectory), int(at.cycle))
            if not path.exists():
                log_p = evaluate.held_out_log_probs(whole.model(member, device), split, dtype)
                files.save_tensors(path, {"test": log_p}, text=split.fingerprint)
            place, about = files.open_tensors(path)
            if about["text"] != split.fingerprint:
                raise ValueError(f"{path} is of another test text: delete {beside}")
            places.append(place["test"])
    P = {**whole.P, "test": rows.probabilities(places)}
    documents = {**whole.documents, "test": split.document_ids(run.model.context)}
    losses = [ensemble.mixture_nll(np.ones(1), P["test"][[i]]) for i in range(len(whole))]
    members = whole.members.assign(test_loss=losses)
    return dataclasses.replace(whole, P=P, documents=documents, members=members)
