"""The main curves at more seeds, on more test text: `power*.csv`."""

from collections.abc import Mapping, Sequence

import pandas as pd

from q0lib import config, population
from q0lib.study import longer_test, plan
from q0lib.study.tables import data_efficiency, downstream, epoch_efficiency


def tables(
    found: plan.Trained,
    test_tokens: int,
    budgets: Sequence[float],
    ks: Sequence[int],
    methods: Mapping[str, config.Method],
    tokens: int,
    *,
    progress: bool = True,
) -> dict[str, pd.DataFrame]:
    """The tables of the part "power", whose members are read on `test_tokens` of test text.

    power: as `epoch_efficiency.table`; power_documents: its clean curves by document;
    power_reference, power_reference_documents: as `data_efficiency.reference_tables`, in multiples
    of `tokens`.

    Raises:
        FileNotFoundError: weights were not kept.
    """
    populations, reference = [], []
    for each, run in found:
        if downstream.is_reference(each):
            reference.append((each, run))
        else:
            whole = population.load(run)
            populations.append(longer_test.read(whole, test_tokens, progress=progress))
    table = epoch_efficiency.table(populations, budgets, ks)
    curves = epoch_efficiency.curves(table, methods, ks)
    theirs = data_efficiency.reference_tables(reference, tokens, test_tokens)
    return {
        "power": table,
        "power_documents": epoch_efficiency.document_losses(populations, curves),
        **{f"power_{name}": each for name, each in theirs.items()},
    }
