"""The paper's tables and figures as typed data frames.

Source: "q0: Primitives for Hyper-Epoch Pretraining" (arXiv 2606.03938v2) and its reference code
(qlabs-eng/slowrun, commit a200723). Tables are exact; figures were read off their images, and how
far such a reading may be off stands beside it. Losses are nats per token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from q0lib import paths

TEXT, WHOLE, REAL = "string", "Int64", "float64"


@dataclass(frozen=True)
class Table:
    """What one CSV file holds.

    `columns` maps a name to its (type, meaning); `reading_error` is the largest error of a value
    read off a figure, in that value's unit: 0 for a printed table, nan where no bound is known.
    """

    title: str
    source: str
    columns: Mapping[str, tuple[str, str]] = field(repr=False)
    reading_error: float = 0.0


EPOCHS = (WHOLE, "epochs over the training corpus, all members together")
TOKENS = (WHOLE, "fresh training tokens, seen once")
LOSS = (REAL, "validation loss, nats per token")
ACCURACY = (REAL, "zero-shot accuracy, a fraction")
RATIO = (REAL, "reference tokens for the same score / training tokens, as printed")
COUNT = (WHOLE, "how many")
NAME = (TEXT, "a name")

TABLES: Mapping[str, Table] = {
    "figure2_epoch_curves": Table(
        "Loss against total epochs: ensemble, single model, q0",
        "paper, figure 2",
        {
            "total_epochs": EPOCHS,
            "baseline_ensemble": LOSS,
            "q0_k8": LOSS,
            "q0_best_k": LOSS,
            "baseline_single": LOSS,
        },
        reading_error=0.0005,
    ),
    "figure3_trajectories": Table(
        "Loss of q0 with one to five trajectories",
        "paper, figure 3",
        {
            "total_epochs": EPOCHS,
            **{f"n{n}": LOSS for n in range(1, 6)},
            "extrapolated": (TEXT, "the column whose value the authors extrapolated, if any"),
        },
        reading_error=0.002,
    ),
    "figure4_prior_by_k": Table(
        "Learned weights against the K lowest fitness losses",
        "paper, figure 4, left",
        {"k": COUNT, "learned_top_k": LOSS, "lowest_fitness_loss_uniform": LOSS},
        reading_error=0.0005,
    ),
    "figure4_weights_at_k8": Table(
        "Weight and fitness loss of members at K = 8",
        "paper, figure 4, right",
        {
            "fitness_loss": (REAL, "loss on the fitness set, nats per token"),
            "weight": (REAL, "learned weight, 0 where dropped"),
            "group": (TEXT, "low or high fitness loss, kept or dropped"),
        },
        reading_error=math.nan,
    ),
    "table1_main": Table(
        "Main results",
        "paper, table 1",
        {
            "approach": NAME,
            "total_epochs": EPOCHS,
            "trajectories": COUNT,
            "cycles": COUNT,
            "snapshots": COUNT,
            "val_loss": LOSS,
            "data_efficiency": RATIO,
        },
    ),
    "table2_downstream": Table(
        "Downstream accuracy",
        "paper, table 2",
        {"approach": NAME, "task": NAME, "accuracy": ACCURACY, "data_efficiency": RATIO},
    ),
    "table3_small_budgets": Table(
        "Budgets of one and four epochs",
        "paper, table 3",
        {
            "total_epochs": EPOCHS,
            "configuration": NAME,
            "trajectories": COUNT,
            "snapshots": COUNT,
            "val_loss": LOSS,
        },
    ),
    "table4_ablation": Table(
        "q0 with and without chain distillation, 256 epochs",
        "paper, the distillation ablation",
        {"configuration": NAME, "val_loss": LOSS},
    ),
    "table5_reference_loss": Table(
        "Reference loss by fresh tokens, best of three model sizes",
        "paper, table 5",
        {"tokens": TOKENS, "val_loss": LOSS},
    ),
    "table6_reference_accuracy": Table(
        "Reference accuracy by fresh tokens",
        "paper, table 6",
        {
            "tokens": TOKENS,
            "piqa": ACCURACY,
            "arc_easy": ACCURACY,
            "sciq": ACCURACY,
            "average": ACCURACY,
        },
    ),
    "repo_reference_loss_by_size": Table(
        "Reference loss by fresh tokens for depths 12, 20 and 26",
        "reference code, unlimited/",
        {"tokens": TOKENS, "d12": LOSS, "d20": LOSS, "d26": LOSS},
    ),
    "slowrun_unlimited_records": Table(
        "Record losses of the reference code's unlimited track",
        "reference code, unlimited/",
        {
            "record": (WHOLE, "its number"),
            "date": ("datetime64[ns]", "day it was set"),
            "val_loss": LOSS,
            "what": (TEXT, "what was new"),
        },
    ),
}


def load(name: str) -> pd.DataFrame:
    """Return the published table `name`, one of `TABLES`, with the types given there.

    `frame.attrs` holds its title, source and reading_error.

    Raises:
        ValueError: for a name that is not in `TABLES`, or a file whose columns are not the
            documented ones.
        FileNotFoundError: where data/published lacks the file.
    """
    if name not in TABLES:
        raise ValueError(f"no published table {name!r}; there are {', '.join(TABLES)}")
    table = TABLES[name]
    types = {column: kind for column, (kind, _) in table.columns.items()}
    dates = [column for column, kind in types.items() if kind.startswith("datetime")]
    path = paths.PUBLISHED / f"{name}.csv"
    frame = pd.read_csv(
        path, dtype={c: k for c, k in types.items() if c not in dates}, parse_dates=dates
    )
    if list(frame.columns) != list(types):
        raise ValueError(f"{path}: columns must be {list(types)}, got {list(frame.columns)}")
    frame.attrs = {
        "title": table.title,
        "source": table.source,
        "reading_error": table.reading_error,
    }
    return frame.astype(types)


def figure2_curves() -> pd.DataFrame:
    """Return figure 2 in the long form that `figures.epoch_curves` draws.

    Columns: method (ensemble, q0_k8, q0, single), epochs, loss, and low and high, which enclose
    the loss by the reading error. Points that the figure lacks are left out.
    """
    wide = load("figure2_epoch_curves").rename(
        columns={
            "total_epochs": "epochs",
            "baseline_ensemble": "ensemble",
            "baseline_single": "single",
            "q0_best_k": "q0",
        }
    )
    error = wide.attrs["reading_error"]
    long = wide.melt("epochs", var_name="method", value_name="loss").dropna(ignore_index=True)
    return long.assign(low=long["loss"] - error, high=long["loss"] + error)[
        ["method", "epochs", "loss", "low", "high"]
    ]
