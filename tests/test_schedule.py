"""Schedules against the paper's closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q0lib import schedule


def test_cycle_runs_from_peak_to_floor():
    values = [schedule.lr_multiplier(s, 4) for s in range(5)]
    assert values == pytest.approx([1.0, 0.77, 0.54, 0.31, 0.08])
    decays = [schedule.wd_multiplier(s, 4) for s in range(5)]
    assert decays == pytest.approx([0.7, 0.775, 0.85, 0.925, 1.0])


def test_other_shapes():
    assert schedule.lr_multiplier(1, 2, 0.0, "cosine") == pytest.approx(0.5)
    assert schedule.lr_multiplier(1, 4, 0.2, "cosine") == pytest.approx(
        0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2
    )
    assert schedule.wd_multiplier(3, 4, mode="flat") == 1.0
    in_phase = [schedule.wd_multiplier(s, 4, mode="in_phase") for s in range(5)]
    assert in_phase == pytest.approx([1.0, 0.925, 0.85, 0.775, 0.7])


@given(st.integers(1, 1000), st.floats(0, 0.9), st.floats(0, 1), st.data())
def test_learning_rate_and_weight_decay_are_anti_correlated(steps, lr_floor, wd_floor, data):
    step = data.draw(st.integers(0, steps))
    lr = schedule.lr_multiplier(step, steps, lr_floor)
    wd = schedule.wd_multiplier(step, steps, lr_floor, wd_floor)
    assert lr_floor - 1e-9 <= lr <= 1
    # (paper, eq. 4) a straight line from (1, wd_floor) to (lr_floor, 1)
    assert (1 - lr_floor) * (wd - wd_floor) == pytest.approx((1 - wd_floor) * (1 - lr), abs=1e-9)


def test_perturbation_falls_along_a_cosine_and_stays():
    assert schedule.perturbation(1, 63) == pytest.approx(0.25)
    assert schedule.perturbation(32, 63) == pytest.approx(0.15)
    assert schedule.perturbation(63, 63) == pytest.approx(0.05)
    assert schedule.perturbation(500, 63) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="boundary must be >= 1, got 0"):
        schedule.perturbation(0, 63)


def test_batch_is_small_in_the_outer_quarters():
    sizes = [schedule.batch_tokens(c, 64, 524_288, 393_216) for c in range(64)]
    assert sizes == [393_216] * 16 + [524_288] * 32 + [393_216] * 16
    assert {schedule.batch_tokens(c, 64, 2048) for c in range(80)} == {2048}


@given(
    st.integers(1, 40),
    st.floats(0.1, 5),
    st.integers(20, 300),
    st.lists(st.integers(1, 9), min_size=40, max_size=40),
)
def test_cycles_follow_on_each_other_and_keep_to_their_epochs(cycles, epochs, rows, sizes):
    ends = schedule.snapshot_epochs(cycles, epochs)
    planned = schedule.plan(ends, rows, sizes[:cycles])
    assert planned[0].first_row == 0
    for c, cycle in enumerate(planned):
        end = cycle.first_row + cycle.steps * cycle.rows_per_step
        assert cycle.steps >= 1
        assert cycle.rows_per_step == sizes[c]
        if c + 1 < cycles:
            assert planned[c + 1].first_row == end
        if all(each.steps > 1 for each in planned[: c + 1]):  # no cycle had to be stretched
            assert abs(end - (c + 1) * epochs * rows) <= sizes[c] / 2 + 1e-6
    half = cycles // 2
    assert planned[:half] == schedule.plan(ends[:half], rows, sizes[:half])


@pytest.mark.parametrize(
    ("cycles", "epochs", "tail", "ends"),
    [
        (3, 2.0, 0.0, [2, 4, 6]),
        (4, 1.0, 0.25, [3.25, 3.5, 3.75, 4]),  # table 3: three epochs, and four in the last
        (4, 0.25, 0.15, [0.8875, 0.925, 0.9625, 1]),  # table 3: four in the last 0.15 epoch
        (4, 1.0, 1.0, [1, 2, 3, 4]),
    ],
)
def test_snapshots_stand_where_table_3_has_them(cycles, epochs, tail, ends):
    assert schedule.snapshot_epochs(cycles, epochs, tail) == pytest.approx(ends)


def test_steps_out_of_a_cycle_are_an_error():
    assert schedule.plan([2, 4], 194, [8, 8]) == [(0, 48, 8), (384, 49, 8)]
    with pytest.raises(ValueError, match="got 5 of 4"):
        schedule.lr_multiplier(5, 4)


def test_weight_decay_opposes_a_cosine_too():
    for step in range(9):
        lr = schedule.lr_multiplier(step, 8, 0.08, "cosine")
        wd = schedule.wd_multiplier(step, 8, 0.08, 0.7, "anti", "cosine")
        assert 0.92 * (wd - 0.7) == pytest.approx(0.3 * (1 - lr))
