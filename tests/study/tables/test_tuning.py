"""Trials, from populations whose numbers are known."""

import numpy as np
import pytest

from q0lib import population
from q0lib.study.plan import Experiment
from q0lib.study.tables import tuning

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens")


def test_trials_are_read_on_validation_at_every_budget_that_has_a_trial(found):
    shorter = (Experiment("tuning", "x", "q0", 16), found[0][1])
    whole = (Experiment("tuning", "x", "q0", 32), found[0][1])
    table = tuning.table([whole, shorter]).iloc[:2].set_index("epochs")
    assert table.index.tolist() == [16, 32]
    half = population.load(found[0][1]).prefix(1, 8)
    assert table.members[16] == 8
    assert table.uniform[16] == pytest.approx(
        -np.log(half.P["validation"].mean(0)).mean(), abs=1e-6
    )
    assert table.learned[32] < table.snapshot[32]
