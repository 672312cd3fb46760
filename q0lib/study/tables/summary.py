"""The study in a few lines: `summary.csv`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from q0lib.study.tables import store


def table(folder: Path) -> pd.DataFrame:
    """The study in a few lines: every headline number with its interval, from the tables there.

    Columns: metric, value, low, high, seeds, split, reached (seeds that have a number; where not
    all do, the value is nan). Tables that are not there yet have no lines.
    """
    rows = []

    def line(metric: str, row: Any) -> None:
        rows.append(
            {"metric": metric, "value": row.multiplier, "low": row.low, "high": row.high,
             "seeds": int(row.seeds), "split": "test", "reached": int(row.reached)}
        )  # fmt: skip

    for name, more in (("epoch_multipliers", False), ("power_multipliers", True)):
        if (path := folder / f"{name}.csv").exists():
            for metric, row in _multipliers(store.read(path)):
                line(f"{metric}_{int(row.seeds)}_seeds" if more else metric, row)
    for name, more in (("data_efficiency", False), ("power_data_efficiency", True)):
        if (path := folder / f"{name}.csv").exists():
            for metric, row in _data_efficiency(store.read(path)):
                named = f"{metric}_{row.epochs:g}_epochs_{int(row.seeds)}_seeds"
                line(named if more else metric, row)
    return pd.DataFrame(rows)


def _multipliers(table: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """The lines of a table of `multipliers.against`; without a protocol it is the clean one."""
    if "protocol" not in table:
        table = table.assign(protocol="clean")
    sizes = (
        ("q0", "_best_k"), ("q0_k8", "_k8"), ("q0_greedy_k8", "_k8_greedy"),
        (f"q0_k{table.own_k.iloc[0]}", "_own_k"), ("q0_uniform", "_uniform"),
    )  # fmt: skip
    table = table.set_index(["protocol", "reference", "axis", "method"])
    references = {"ensemble": "", "distilled_ensemble": "_vs_distilled_ensemble"}
    for reference, versus in references.items():
        for axis in ("epochs", "flops"):
            for method, k in sizes:
                name = f"{axis.removesuffix('s')}_efficiency"
                name += versus if versus and k == "_best_k" else k + versus
                for protocol, ending in {"clean": "", "paper": "_paper_protocol"}.items():
                    key = (protocol, reference, axis, method)
                    if key in table.index and (protocol == "clean" or axis == "epochs"):
                        yield name + ending, table.loc[key]


def _data_efficiency(table: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """The lines of a table of `data_efficiency.table`, `reference` added if there are two."""
    names, known = {"ensemble": "baseline"}, set()
    for row in table.itertuples():
        metric = f"data_efficiency_{names.get(str(row.method), row.method)}"
        if getattr(row, "reference", "") == "tuned":
            metric += "_tuned_reference"
        if metric in known:  # the same method at another budget
            metric += f"_{row.epochs:g}_epochs"
        known.add(metric)
        yield metric, row
