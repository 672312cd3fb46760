"""What seeds and documents make of numbers that are known."""

import numpy as np
import pytest

from q0lib.study.tables import intervals


def test_the_place_of_a_crossing_is_spread_over_draws_and_its_open_ends_are_the_curves():
    """Two seeds and four draws: one inside, one never there, one there before, one inside."""
    costs = np.array([8.0, 16.0])
    losses = np.array([[5.0, 5.0, 5.0, 5.0], [4.0, 4.0, 4.0, 4.0]])
    goals = np.array([4.5, 3.9, 5.1, 4.25])
    other = np.array([4.5, 4.5, 4.5, 4.5])
    spread, clipped = intervals.crossing_spread([(costs, losses, goals), (costs, losses, other)])
    first = np.log([12.0, 16.0, 8.0, 14.0])
    assert spread == pytest.approx(np.std((first + np.log(12.0)) / 2))
    assert clipped == 2 / 8


def test_documents_are_drawn_alike_for_every_point():
    tokens, sums = np.array([10.0, 30.0, 5.0]), np.array([40.0, 90.0, 30.0])
    frame = intervals.document_frame(
        {intervals.TOKENS: tokens, ("q0", 0, 8.0): sums, ("q0", 1, 8.0): 2 * sums}
    )
    drawn = intervals.resampled_losses(frame)
    assert set(drawn) == {("q0", 0, 8.0), ("q0", 1, 8.0)}
    np.testing.assert_allclose(drawn["q0", 1, 8.0], 2 * drawn["q0", 0, 8.0])
    losses = drawn["q0", 0, 8.0]
    assert losses.min() == pytest.approx(3.0)  # the second document three times
    assert losses.max() == pytest.approx(6.0)  # the third
    assert losses.mean() == pytest.approx(sums.sum() / tokens.sum(), rel=0.1)
