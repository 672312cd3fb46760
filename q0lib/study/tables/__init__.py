"""Populations in, tables out: a module a table, or a family of tables.

`mixtures` says what a population's mixtures lose, `intervals` has what seeds and documents make
of it; every other module writes the tables that it is named after, and `store` keeps them.
"""

from q0lib.study.tables import (
    ablations,
    budgets,
    data_efficiency,
    downstream,
    epoch_efficiency,
    intervals,
    learned_prior,
    mixtures,
    multipliers,
    power,
    store,
    students,
    summary,
    tuning,
)

__all__ = [
    "ablations",
    "budgets",
    "data_efficiency",
    "downstream",
    "epoch_efficiency",
    "intervals",
    "learned_prior",
    "mixtures",
    "multipliers",
    "power",
    "store",
    "students",
    "summary",
    "tuning",
]
