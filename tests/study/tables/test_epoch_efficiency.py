"""Losses by budget and K, and their curves, from populations whose numbers are known."""

import numpy as np
import pandas as pd
import pytest
from tiny import made, tiny_study

from q0lib import presets
from q0lib.study.tables import epoch_efficiency, intervals

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")

METHODS = presets.load("quick").methods


def test_budgets_are_prefixes():
    q0 = made(tiny_study().run("q0", 16), 8)
    table = epoch_efficiency.rows(q0, [2, 3, 8, 16, 32], [1, 4])
    assert sorted(table.epochs.unique()) == [2, 8, 16], "what the run does not contain is left out"
    part = table[(table.epochs == 8) & (table.choice == "uniform")].iloc[0]
    assert part.k == 4
    assert part.test == pytest.approx(-np.log(q0.P["test"][:4].mean(0)).mean(), abs=1e-6)
    assert table.groupby("epochs").best_k.sum().tolist() == [1, 1, 1]
    for k in (0, 9, True, 2.5):
        with pytest.raises(ValueError, match=rf"K must be in 1\.\.8, got {k}"):
            epoch_efficiency.table([q0], [8], [k])
    assert table[(table.epochs == 16) & (table.choice == "truncate")].k.tolist() == [1, 2, 4, 8]
    base = made(tiny_study().run("ensemble", 8), 4)
    table = epoch_efficiency.rows(base, [2, 4, 8])
    assert table[table.choice == "uniform"].k.tolist() == [1, 2, 4]
    with pytest.raises(ValueError, match=r"no budget of \[3\] is part of q0 at 16 epochs"):
        epoch_efficiency.table([q0], [3], [1])


def test_every_number_of_trajectories_is_read_off_its_prefix():
    q0 = made(tiny_study(0, "q0.trajectories=2").run("q0", 16), 8)  # 2 x 4 cycles of 2 epochs
    longer = made(tiny_study().run("q0", 16), 8)  # 1 x 8
    assert epoch_efficiency.table([q0], [6], [1]).trajectories.unique().tolist() == [1]
    table = epoch_efficiency.table([q0, longer], [4, 8, 16], [1])
    held = table[table.choice == "uniform"][["trajectories", "epochs", "k"]]
    assert held.to_numpy().tolist() == [
        [1, 4, 2], [1, 8, 4], [2, 4, 2], [2, 8, 4], [2, 16, 8], [1, 16, 8],
    ]  # fmt: skip
    wide = table[(table.trajectories == 2) & (table.epochs == 8) & (table.choice == "uniform")]
    mixed = q0.P["test"][[0, 1, 4, 5]].mean(0)
    assert wide.test.item() == pytest.approx(-np.log(mixed).mean(), abs=1e-6)


def test_trajectories_are_chosen_on_validation_over_seeds_and_by_the_paper_on_test():
    rows = pd.DataFrame(
        [
            {"method": "q0", "seed": seed, "epochs": 8, "trajectories": n, "choice": "truncate",
             "k": k, "best_k": k == 4, "flops": 1.0, "validation": validation, "test": test}
            for seed in (0, 1)
            for n, k, validation, test in [
                (1, 4, 4.0, 4.5), (1, 2, 4.2, 4.6), (2, 4, 4.1, 4.3), (2, 2, 4.3, 4.2),
            ]
        ]
    )  # fmt: skip
    alone = rows.iloc[:1].assign(trajectories=3, k=2, validation=3.0, test=3.0)  # of one seed
    cuts = pd.concat([rows, alone], ignore_index=True)
    table = pd.concat([cuts, cuts.assign(choice="greedy", best_k=False)], ignore_index=True)
    clean = epoch_efficiency.curves(table, METHODS, [2]).set_index(["method", "seed"])
    assert clean.trajectories.unique().tolist() == [1]
    assert clean.loss["q0", 0] == 4.5
    assert clean.loss["q0_k2", 1] == 4.6
    paper = epoch_efficiency.curves(table, METHODS, [2], "paper").set_index(["method", "seed"])
    assert paper.loss["q0", 1] == 4.2
    assert paper.k["q0", 1] == 2
    assert paper.trajectories["q0_k2", 0] == 2
    with pytest.raises(ValueError, match=r"no greedy choice of K = 2 at 8 epochs, seed 0; run"):
        epoch_efficiency.curves(cuts, METHODS, [2])
    with pytest.raises(ValueError, match="no cut of K = 3 at 8 epochs"):
        epoch_efficiency.curves(table, METHODS, [3])
    # What a method's curves are, its mixture says, and not its name.
    renamed = table.assign(method="other")
    learned = epoch_efficiency.curves(renamed, {"other": METHODS["q0"]}, [2])
    names = ["other", "other_greedy_k2", "other_k2"]
    assert sorted(learned.method.unique()) == names
    assert set(learned.base) == {"other"}
    with pytest.raises(ValueError, match="the table has a method 'other', known: q0, ensemble"):
        epoch_efficiency.curves(renamed, METHODS, [2])


def test_curves_and_intervals():
    run = tiny_study().run("q0", 16)
    with pytest.warns(UserWarning, match="tokens"):
        table = epoch_efficiency.rows(made(run, 8), [4, 16], [1, 4])
    curves = epoch_efficiency.curves(table, METHODS, [1, 4])
    assert sorted(curves.method.unique()) == [
        "q0", "q0_greedy_k1", "q0_greedy_k4", "q0_k1", "q0_k4", "q0_uniform",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"K must be in 1\.\.8, got 9"):
        epoch_efficiency.curves(table, METHODS, [9])
    assert table.run.unique().tolist() == [f"quick/{run.directory.name}"]
    assert curves[curves.method == "q0_k4"].epochs.tolist() == [16], "4 epochs hold 2 snapshots"
    summary = intervals.over_seeds(curves)
    assert summary.seeds.tolist() == [1] * len(summary)
    assert summary.low.isna().all()
