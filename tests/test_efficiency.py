"""Crossings, data efficiency, compute and intervals, against the paper and against properties."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q0lib import efficiency, model, presets
from q0lib.study import paper

BUDGET = 100_000_000
DOWNSTREAM = paper.load("table2_downstream")


def published_curve(name: str) -> tuple[pd.Series, pd.Series]:
    wide = paper.load("figure2_epoch_curves")
    return wide["total_epochs"], wide[name]


def loss_efficiency(value):
    table = paper.load("table5_reference_loss")
    return efficiency.data_efficiency(value, table["tokens"], table["val_loss"], BUDGET)


def task_curve(task: str) -> tuple[pd.Series, pd.Series]:
    table = paper.load("table6_reference_accuracy")
    return table["tokens"], table[task]


# Published values


def test_epochs_to_match_the_ensemble_at_the_best_k():
    matched = efficiency.matched_epochs(*published_curve("q0_best_k"), 3.0476)
    assert matched == pytest.approx(55.5, abs=0.05)
    assert efficiency.multiplier(256, matched) == pytest.approx(4.61, abs=0.005)


def test_epochs_to_match_the_ensemble_at_k_8():
    matched = efficiency.matched_epochs(*published_curve("q0_k8"), 3.0476)
    assert 66 <= matched <= 67
    found = efficiency.crossings(paper.figure2_curves()).set_index("method").loc["q0_k8"]
    assert 256 / found["latest"] < 3.8 < 256 / found["earliest"]  # the paper's, as the figure reads


@pytest.mark.parametrize(
    ("loss", "ratio"), [(3.0476, 9.965), (3.0034, 11.963), (2.9870, 12.872), (3.0283, 10.821)]
)
def test_data_efficiency_on_loss(loss, ratio):
    assert loss_efficiency(loss) == pytest.approx(ratio, abs=0.001)


def test_table_1_prints_what_we_compute():
    for row in paper.load("table1_main").to_dict("records"):
        assert loss_efficiency(row["val_loss"]) == pytest.approx(row["data_efficiency"], abs=0.001)


@pytest.mark.parametrize(
    "row", DOWNSTREAM.to_dict("records"), ids=lambda row: f"{row['approach']}-{row['task']}"
)
def test_the_twelve_multipliers_of_table_2(row):
    curve = task_curve(row["task"])
    ratio = efficiency.data_efficiency(row["accuracy"], *curve, BUDGET, higher_is_better=True)
    assert round(ratio, 1) == row["data_efficiency"]


def test_the_multipliers_of_table_2_are_the_ones_printed():
    assert DOWNSTREAM["data_efficiency"].tolist() == [
        *(7.9, 8.0, 13.4, 12.2),
        *(12.7, 17.0, 18.8, 14.2),
        *(13.2, 14.7, 19.9, 16.0),
    ]


def test_the_reference_codes_coarser_curve_gives_its_ratios():
    table = paper.load("repo_reference_loss_by_size")
    best = table[["d12", "d20", "d26"]].min(axis=1)
    for loss, ratio in ((3.003, 12.8), (2.987, 13.8)):
        found = efficiency.data_efficiency(loss, table["tokens"], best, BUDGET)
        assert found == pytest.approx(ratio, abs=0.05)


def test_layer_pass_units_an_epoch():
    gpt = presets.load("paper").model
    passes = len(model.layer_passes(gpt))
    half_looped = (passes + gpt.layers) / 2
    assert efficiency.epoch_cost(half_looped) == 150
    assert efficiency.epoch_cost(passes) == 210
    assert efficiency.epoch_cost(passes, teacher=passes) == 280


def test_the_lead_at_equal_compute():
    def lead(epochs, distilling):
        return 256 * 150 / efficiency.budget_cost(epochs, 210, distilling, plain_epochs=16)

    assert lead(55.48, 280) == pytest.approx(2.66, abs=0.01)
    assert lead(66.29, 280) == pytest.approx(2.20, abs=0.01)
    assert lead(55.48, 210) == pytest.approx(3.30, abs=0.01)


# Crossings


def test_a_curve_that_never_gets_there():
    curve = [32, 64, 256], [3.2, 3.1, 3.0512]
    assert efficiency.matched_epochs(*curve, 3.05) == math.inf
    assert math.isnan(efficiency.multiplier(256, math.inf))
    said = efficiency.describe_crossing(*curve, 3.05, 256)
    assert said == "never reached (best 3.0512 at 256)"


def test_a_curve_that_was_past_the_target_before_its_first_point():
    curve = [32, 64], [3.04, 3.0]
    assert math.isnan(efficiency.matched_epochs(*curve, 3.05))
    assert math.isnan(efficiency.multiplier(256, math.nan))
    said = efficiency.describe_crossing(*curve, 3.05, 256)
    assert said == "before 32 epochs (more than 8.0x)"


def test_a_first_loss_equal_to_the_target_is_a_crossing_there():
    assert efficiency.matched_epochs([32, 64], [3.05, 3.0], 3.05) == 32
    assert efficiency.matched_epochs([32], [3.05], 3.05) == 32


def test_the_first_of_several_crossings_counts():
    assert efficiency.matched_epochs([1, 2, 3, 4], [5.0, 3.0, 5.0, 3.0], 4.0) == 1.5


def test_a_crossing_in_words():
    said = efficiency.describe_crossing(*published_curve("q0_best_k"), 3.0476, 256)
    assert said == "55.5 epochs (4.61x)"
    said = efficiency.describe_crossing([1, 3], [2.0, 1.0], 1.5, 8, unit="units")
    assert said == "2.0 units (4.00x)"


def test_crossings_of_a_frame():
    found = efficiency.crossings(paper.figure2_curves()).set_index("method")
    assert list(found.index) == ["q0_k8", "q0", "single"]
    assert set(found["target"]) == {3.0476}
    assert set(found["reference_cost"]) == {256}
    assert found.loc["single", "matched"] == math.inf
    q0 = found.loc["q0"]
    assert q0["earliest"] < q0["matched"] < q0["latest"]
    assert q0["label"] == "55.5 epochs (4.61x)"


def test_crossings_take_rows_in_any_order_and_no_error_columns():
    frame = paper.figure2_curves().drop(columns=["low", "high"])
    found = efficiency.crossings(frame.sample(frac=1, random_state=1)).set_index("method")
    for name in ("matched", "earliest", "latest"):
        assert found[name]["q0"] == pytest.approx(55.4815, abs=1e-4)


def test_crossings_without_their_reference_are_refused():
    frame = pd.DataFrame({"method": ["q0"], "epochs": [1], "loss": [1.0]})
    with pytest.raises(ValueError, match=r"reference 'ensemble' .* \['q0'\]"):
        efficiency.crossings(frame)


@pytest.mark.parametrize(
    ("epochs", "losses", "message"),
    [
        ([], [], "equally long and not empty"),
        ([1, 2], [1.0], "equally long"),
        ([2, 1], [1.0, 2.0], "epochs must rise"),
        ([1, 1], [1.0, 2.0], "epochs must rise"),
        ([1, 2], [1.0, math.nan], "losses must be finite, got nan at position 1"),
        ([1, math.inf], [1.0, 2.0], "epochs must be finite"),
    ],
)
def test_a_broken_curve_is_refused(epochs, losses, message):
    with pytest.raises(ValueError, match=message):
        efficiency.matched_epochs(epochs, losses, 1.0)


def test_other_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="target must be finite"):
        efficiency.matched_epochs([1], [1.0], math.nan)
    with pytest.raises(ValueError, match="reference_epochs must be finite and > 0, got 0"):
        efficiency.multiplier(0, 1)
    with pytest.raises(ValueError, match="matched must be > 0"):
        efficiency.multiplier(1, 0)


# Data efficiency


@pytest.mark.parametrize("task", ["piqa", "arc_easy", "sciq", "average"])
def test_every_new_best_of_the_reference_is_found_at_its_own_tokens(task):
    tokens, reference = task_curve(task)
    best = reference.cummax() == reference
    for count, value in zip(tokens[best], reference[best], strict=True):
        ratio = efficiency.data_efficiency(value, tokens, reference, BUDGET, higher_is_better=True)
        assert ratio == pytest.approx(count / BUDGET)


def test_where_the_reference_falls_back_the_two_crossings_differ():
    first, last = (
        efficiency.data_efficiency(0.4781, *task_curve("arc_easy"), BUDGET, crossing, True)
        for crossing in ("first", "last")
    )
    assert first == pytest.approx(7.925)
    assert last == pytest.approx(12.03, abs=0.01)


def test_the_last_crossing_of_a_curve_that_ends_worse_is_never():
    curve = [1, 2, 3], [1.0, 3.0, 2.0]
    assert efficiency.data_efficiency(2.5, *curve, 1, "first", True) == 1.75
    assert efficiency.data_efficiency(2.5, *curve, 1, "last", True) == math.inf


@pytest.mark.parametrize("crossing", ["first", "last"])
def test_which_way_is_better_is_said_and_not_guessed_from_the_ends(crossing):
    flat = [100, 200], [3.0, 3.0]
    assert efficiency.data_efficiency(3.0, *flat, 100, crossing) == 1
    assert efficiency.data_efficiency(2.9, *flat, 100, crossing) == math.inf
    assert math.isnan(efficiency.data_efficiency(3.1, *flat, 100, crossing))
    assert math.isnan(efficiency.data_efficiency(2.9, *flat, 100, crossing, True))
    worse_in_the_end = [100, 200, 300], [3.0, 2.0, 3.5]
    found = efficiency.data_efficiency(2.5, *worse_in_the_end, 100, crossing)
    assert found == (1.5 if crossing == "first" else math.inf)


@pytest.mark.parametrize("crossing", ["first", "last"])
@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_and_below_the_curve(sign, crossing):
    curve, higher = ([100, 2000], [sign * 1.0, sign * 2.0]), sign > 0
    assert efficiency.data_efficiency(sign * 2.1, *curve, 100, crossing, higher) == math.inf
    assert math.isnan(efficiency.data_efficiency(sign * 0.9, *curve, 100, crossing, higher))
    assert efficiency.describe_efficiency(sign * 2.1, *curve, 100, higher) == "beyond 20.0x"
    assert efficiency.describe_efficiency(sign * 0.9, *curve, 100, higher) == "below 1.0x"
    assert efficiency.data_efficiency(sign * 1.0, *curve, 100, crossing, higher) == 1
    assert efficiency.data_efficiency(sign * 2.0, *curve, 100, crossing, higher) == 20


def test_data_efficiency_in_words():
    assert efficiency.describe_efficiency(1.5, [100, 200], [2.0, 1.0], 100) == "1.50x"


def test_bad_arguments_of_data_efficiency_are_refused():
    curve = [1, 2], [1.0, 2.0]
    with pytest.raises(ValueError, match="budget_tokens must be finite and > 0, got 0"):
        efficiency.data_efficiency(1.5, *curve, 0)
    with pytest.raises(ValueError, match="value must be finite"):
        efficiency.data_efficiency(math.nan, *curve, 1)
    with pytest.raises(ValueError, match="crossing must be"):
        efficiency.data_efficiency(1.5, *curve, 1, crossing="any")


# Properties

numbers = st.floats(-1e3, 1e3)
curves = st.lists(st.tuples(st.floats(0.01, 100), numbers), min_size=1, max_size=12).map(
    lambda pairs: (np.cumsum([step for step, _ in pairs]), np.array([y for _, y in pairs]))
)


@given(curves, numbers)
def test_a_crossing_lies_on_the_curve_and_is_the_first(curve, target):
    x, y = curve
    at = efficiency.matched_epochs(x, y, target)
    if math.isinf(at):
        assert y.min() > target
    elif math.isnan(at):
        assert y[0] < target
    else:
        assert x[0] <= at <= x[-1]
        assert np.interp(at, x, y) == pytest.approx(target, abs=1e-6)
        assert (y[x < at - 1e-9 * x[-1]] > target).all()


@given(curves, numbers, st.floats(0, 100))
def test_a_lower_target_is_reached_no_sooner(curve, target, lower_by):
    x, y = curve
    sooner = efficiency.matched_epochs(x, y, target)
    later = efficiency.matched_epochs(x, y, target - lower_by)
    if not math.isnan(sooner):
        assert later >= sooner - 1e-9


@given(curves, numbers, st.floats(0.1, 10))
def test_matched_cost_scales_with_its_unit(curve, target, factor):
    x, y = curve
    once = efficiency.matched_epochs(x, y, target)
    scaled = efficiency.matched_epochs(x * factor, y, target)
    assert scaled == pytest.approx(once * factor, nan_ok=True)


@given(curves, numbers)
def test_an_accuracy_curve_is_a_loss_curve_turned_over(curve, value):
    x, y = curve
    for crossing in ("first", "last"):
        up = efficiency.data_efficiency(value, x, y, 1, crossing, higher_is_better=True)
        down = efficiency.data_efficiency(-value, x, -y, 1, crossing)
        assert up == pytest.approx(down, nan_ok=True)


@given(curves, numbers)
def test_the_last_crossing_is_not_before_the_first(curve, value):
    x, y = curve
    first, last = (
        efficiency.data_efficiency(value, x, y, 1, crossing) for crossing in ("first", "last")
    )
    if not math.isnan(first):
        assert last >= first


# Compute and intervals


def test_a_budget_shorter_than_the_start_of_distillation_is_all_plain():
    assert efficiency.budget_cost(10, 210, 280, plain_epochs=16) == 2100
    assert efficiency.budget_cost(20, 210, 280, plain_epochs=16) == 16 * 210 + 4 * 280
    assert efficiency.budget_cost(20, 150) == 3000


def test_an_interval_over_three_seeds():
    mean, low, high = efficiency.interval([1.0, 2.0, 3.0])
    half = 4.302653 * 1.0 / math.sqrt(3)  # t(0.975, 2) s / sqrt(n)
    assert (mean, low, high) == pytest.approx((2, 2 - half, 2 + half), abs=1e-5)
    wider = efficiency.interval([1.0, 2.0, 3.0], spread=0.5)
    assert wider[2] - 2 == pytest.approx(math.hypot(half, 1.96 * 0.5), abs=1e-5)
    assert wider[2] - 2 == pytest.approx(2 - wider[1])


def test_one_seed_has_no_interval_and_a_missing_crossing_no_mean():
    mean, low, high = efficiency.interval([4.6])
    assert mean == 4.6
    assert math.isnan(low)
    assert math.isnan(high)
    assert efficiency.interval([4.6], spread=0.1) == pytest.approx((4.6, 4.404, 4.796))
    assert all(math.isnan(value) for value in efficiency.interval([4.6, math.nan]))
    assert all(math.isnan(value) for value in efficiency.interval([4.6, math.inf]))


def test_a_ratio_has_the_same_interval_either_way_up():
    values = [4.0, 5.0, 6.5]
    mean, low, high = efficiency.ratio_interval(values, spread=0.1)
    assert mean == pytest.approx(np.prod(values) ** (1 / 3))
    turned = efficiency.ratio_interval([1 / value for value in values], spread=0.1)
    assert turned == pytest.approx((1 / mean, 1 / high, 1 / low))
    seeds = 4.302653 * np.std(np.log(values), ddof=1) / np.sqrt(3)
    assert np.log(high / mean) == pytest.approx(np.hypot(seeds, 0.196), rel=1e-6)
    assert efficiency.ratio_interval([4.0], 0.1)[2] == pytest.approx(4 * np.exp(0.196))
    assert math.isnan(efficiency.ratio_interval([4.0])[1])
    for missing in (math.nan, math.inf):
        assert all(math.isnan(value) for value in efficiency.ratio_interval([4.0, missing]))


def test_bad_intervals_are_refused():
    with pytest.raises(ValueError, match="non-empty"):
        efficiency.interval([])


def test_masked_values_are_refused_and_not_unmasked():
    masked = np.ma.array([3.0, 2.0, 1.0], mask=[False, True, False])
    for refused in (
        lambda: efficiency.interval(masked),
        lambda: efficiency.ratio_interval(masked),
        lambda: efficiency.matched_epochs([1, 2, 3], masked, 1.5),
        lambda: efficiency.matched_epochs(masked[::-1], [3.0, 2.0, 1.0], 1.5),
        lambda: efficiency.data_efficiency(1.5, [1, 2, 3], masked, 1),
    ):
        with pytest.raises(ValueError, match="must not be masked, got 1 masked; leave them out"):
            refused()
    assert efficiency.matched_epochs([1, 2], np.ma.array([3.0, 1.0]), 2.0) == 1.5
