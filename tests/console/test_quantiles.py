"""Percentiles against a sorted list."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.console.quantiles import FLOOR_S, GROWTH, Quantiles


def filled(durations: list[float]) -> Quantiles:
    quantiles = Quantiles()
    for seconds in durations:
        quantiles.add(seconds)
    return quantiles


@given(
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1),
    st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]),
)
def test_percentile_is_never_too_low_and_at_most_one_bucket_too_high(
    durations: list[float], fraction: float
) -> None:
    exact = sorted(durations)[max(1, math.ceil(fraction * len(durations))) - 1]
    found = filled(durations).at(fraction)
    assert found is not None
    assert exact * (1 - 1e-9) <= found <= max(exact * GROWTH * (1 + 1e-9), FLOOR_S)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_mean_is_exact(durations: list[float]) -> None:
    assert filled(durations).mean() == pytest.approx(sum(durations) / len(durations))


def test_nothing_is_known_without_durations() -> None:
    assert Quantiles().mean() is None
    assert Quantiles().at(0.5) is None


@given(st.lists(st.floats(0, 1e300)))
def test_memory_does_not_grow_with_durations(durations: list[float]) -> None:
    assert all(0 <= bucket <= 520 for bucket in filled(durations)._buckets)
