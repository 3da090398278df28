"""Intervals against a plain set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.intervals import Intervals

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)))


@given(RANGES, st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_the_set_of_their_indices(ranges, start, stop):
    intervals = Intervals(ranges)
    reference = {index for low, high in ranges for index in range(low, high)}
    assert {index for low, high in intervals for index in range(low, high)} == reference
    assert len(intervals) == len(reference)
    assert [index in intervals for index in range(61)] == [i in reference for i in range(61)]
    assert set(range(61)) - reference == {
        index for low, high in intervals.complement(61) for index in range(low, high)
    }
    low, high = sorted((start, stop))
    assert intervals.count(low, high) == len(reference & set(range(low, high)))


@given(RANGES)
def test_intervals_neither_touch_nor_overlap(ranges):
    kept = list(Intervals(ranges))
    assert all(low < high for low, high in kept)
    assert all(one[1] < other[0] for one, other in pairwise(kept))
