"""Tables on disk: small CSV files that notebooks read in seconds."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from q0lib import files

WRITTEN_BY = {
    **dict.fromkeys(("ablations", "snapshots"), "01_cycles"),
    **dict.fromkeys(("epoch_efficiency", "test_documents"), "04_epoch_efficiency"),
    **dict.fromkeys(("reference", "reference_documents", "data_efficiency"), "05_data_efficiency"),
    **dict.fromkeys(("small_budgets", "splits"), "06_allocation"),
    **dict.fromkeys(("runs", "tuning", "summary"), "measured_study"),
    **dict.fromkeys(("students", "student_documents", "student_tuning"), "08_student"),
    **dict.fromkeys(("downstream", "downstream_items", "downstream_public"), "07_downstream"),
    **dict.fromkeys(
        ("power", "power_documents", "power_reference", "power_reference_documents"), "10_power"
    ),
    "epoch_multipliers": "04_epoch_efficiency",
}


def write(table: pd.DataFrame, path: Path) -> None:
    """Save a table as CSV, six significant digits, whole or not at all."""
    files.write_text(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def read(path: Path, **asked: Sequence[object]) -> pd.DataFrame:
    """Read a table back, or the rows of it whose columns hold the values asked for.

    Raises:
        FileNotFoundError: it is not there; says how it is made.
        ValueError: a value asked for is nowhere in its column.
    """
    if not path.exists():
        of_prior = path.stem.startswith("prior_")
        notebook = "03_learned_prior" if of_prior else WRITTEN_BY.get(path.stem, "the notebook")
        raise FileNotFoundError(
            f"{path} is not there; run {notebook} with recompute=True to train and write it"
        )
    table = pd.read_csv(path)
    for column, values in asked.items():
        held = set(table[column])
        if missing := [value for value in values if value not in held]:
            raise ValueError(
                f"{path.name} has no {column} {missing[0]!r}, it has {sorted(held)}; run the "
                "notebook with recompute=True to train what is missing"
            )
        table = table[table[column].isin(values)]
    return table.reset_index(drop=True)
