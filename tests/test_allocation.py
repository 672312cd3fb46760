"""Plans for an epoch budget, against the paper's recipe."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q0lib import allocation


def test_n_star_over_every_whole_budget():
    for epochs in range(1, 961):
        doublings = (epochs // 64).bit_length() - 1  # floor(log2(E / 64)), in whole numbers
        assert allocation.best_trajectories(epochs) == max(1, doublings)


def test_n_star_at_its_steps():
    found = {epochs: allocation.best_trajectories(epochs) for epochs in (255.9, 256, 511, 512, 960)}
    assert found == {255.9: 1, 256: 2, 511: 2, 512: 3, 960: 3}


@pytest.mark.parametrize(
    ("epochs", "trajectories", "cycles", "members", "unspent"),
    [
        (8, 1, 4, 4, 0),
        (16, 1, 8, 8, 0),
        (32, 1, 16, 16, 0),
        (64, 1, 32, 32, 0),
        (128, 1, 64, 64, 0),
        (256, 2, 64, 128, 0),  # table 1
        (512, 3, 85, 255, 2),
        (960, 3, 160, 480, 0),
        (9, 1, 4, 4, 1),
    ],
)
def test_budgets_with_cycles(epochs, trajectories, cycles, members, unspent):
    plan = allocation.plan(epochs)
    assert (plan.trajectories, plan.cycles, plan.epochs_per_cycle) == (trajectories, cycles, 2)
    assert plan.members == members
    assert plan.unspent == unspent
    assert plan.snapshots == tuple(2.0 * (cycle + 1) for cycle in range(cycles))


def test_small_budgets_as_in_table_3():
    one, four = allocation.plan(1), allocation.plan(4)
    assert one.snapshots == pytest.approx((0.8875, 0.925, 0.9625, 1.0))
    assert four.snapshots == (3.25, 3.5, 3.75, 4.0)
    for plan in (one, four):
        assert (plan.trajectories, plan.cycles, plan.members) == (1, 1, 4)
        assert plan.warnings == ()


def test_the_scaled_run_of_table_1():
    plan = allocation.plan(960, trajectories=5)
    assert (plan.cycles, plan.members) == (96, 480)
    assert not any("rule gives 3 trajectories" in warning for warning in plan.warnings)


@pytest.mark.parametrize("epochs", [1, 4, 32, 64, 128, 256])
def test_no_warning_where_the_paper_has_numbers(epochs):
    assert allocation.plan(epochs).warnings == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"epochs": 0.5}, "1 and 4 epochs only"),
        ({"epochs": 2}, "1 and 4 epochs only"),
        ({"epochs": 16}, "between 4 and 32"),
        ({"epochs": 512}, "end at 256"),
        ({"epochs": 960}, "5 trajectories where the rule gives 3"),
        ({"epochs": 2000}, "longer than 960"),
        ({"epochs": 256, "trajectories": 4}, "the rule gives 2 trajectories, not 4"),
        ({"epochs": 64, "epochs_per_cycle": 1}, "2 epochs a cycle were best"),
    ],
)
def test_what_the_paper_does_not_back_is_said(arguments, said):
    assert any(said in warning for warning in allocation.plan(**arguments).warnings)


def test_a_plan_explains_itself_in_one_line():
    assert allocation.plan(256).explanation == (
        "256 epochs: 2 trajectories x 64 cycles of 2 epochs = 128 snapshots, one after each cycle"
    )
    assert allocation.plan(1).explanation == (
        "1 epoch: 1 trajectory x 1 ordinary run of 1 epoch = 4 snapshots, "
        "0.0375 epochs apart up to its end"
    )
    assert allocation.plan(512).explanation.endswith("; 2 unspent")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be finite and > 0, got 0"),
        ({"epochs": -1}, "epochs must be finite and > 0"),
        ({"epochs": math.nan}, "epochs must be finite"),
        ({"epochs": math.inf}, "epochs must be finite"),
        ({"epochs": 64, "epochs_per_cycle": 0}, "epochs_per_cycle must be finite and > 0, got 0"),
        ({"epochs": 64, "epochs_per_cycle": 65}, "at most the 64 epochs of a trajectory, got 65"),
        ({"epochs": 64, "trajectories": 0}, "trajectories must be a whole number >= 1, got 0"),
        ({"epochs": 64, "trajectories": 1.5}, "whole number >= 1, got 1.5"),
        ({"epochs": 64, "trajectories": True}, "whole number >= 1, got True"),
    ],
)
def test_bad_budgets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        allocation.plan(**arguments)


@given(st.floats(0.01, 5000), st.integers(1, 8) | st.none())
def test_a_plan_spends_no_more_than_it_has(epochs, trajectories):
    plan = allocation.plan(epochs, trajectories)
    assert -1e-6 <= plan.unspent < plan.trajectories * plan.epochs_per_cycle
    assert plan.snapshots[0] > 0
    assert list(plan.snapshots) == sorted(set(plan.snapshots))
    assert plan.snapshots[-1] == pytest.approx(plan.cycles * plan.epochs_per_cycle)
    assert plan.members == plan.trajectories * len(plan.snapshots)
    assert plan.explanation.count("\n") == 0
