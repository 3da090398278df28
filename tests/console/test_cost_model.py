"""Fits against lines that are known, the split of passes, and the law of Amdahl by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.console.cost_model import Amdahl, Cost, CostModel, SpeedUp
from jobrunner.console.least_squares import LeastSquares
from jobrunner.records import Step


def passed(prefill: int, decode: int, seconds: float) -> Step:
    return Step(prefill_tokens=prefill, decode_tokens=decode, batch_size=1, forward_s=seconds)


def decoded(batch_size: int, seconds: float) -> Step:
    return Step(decode_tokens=batch_size, batch_size=batch_size, step_s=seconds)


seconds = st.floats(0, 1)


@given(seconds, seconds, seconds)
def test_cost_of_exact_steps_is_found_again(fixed: float, prefill: float, decode: float) -> None:
    model = CostModel()
    for tokens, sequences in [(0, 1), (0, 8), (100, 4), (50, 0), (256, 8)]:
        exact = fixed + prefill * tokens + decode * sequences
        model.add(passed(tokens, sequences, exact))
    cost = model.cost()
    assert cost is not None
    found = (cost.fixed_s, cost.prefill_s, cost.decode_s)
    assert found == pytest.approx((fixed, prefill, decode), abs=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.floats(0, 5)), min_size=4, max_size=20
    )
)
def test_no_other_cost_without_negative_parts_fits_better(
    points: list[tuple[int, int, float]],
) -> None:
    fit = LeastSquares(3)
    for prefill, decode, y in points:
        fit.add((1.0, prefill, decode), y)
    found = fit.solve()
    if found is None:
        return
    x = np.array([(1.0, prefill, decode) for prefill, decode, _ in points])
    y = np.array([point[2] for point in points])

    def error(coefficients: np.ndarray) -> float:
        return float(((x @ coefficients - y) ** 2).sum())

    assert (found >= 0).all()
    # the problem is convex: who is best among close neighbours is best
    for step in itertools.product((-1e-3, 0.0, 1e-3), repeat=3):
        other = np.maximum(found + step, 0.0)
        assert error(found) <= error(other) + 1e-6


def test_cost_is_unknown_while_steps_are_alike() -> None:
    model = CostModel()
    for _ in range(100):
        model.add(passed(256, 8, 0.5))
        model.add(passed(0, 8, 0.1))
    assert model.cost() is None


def test_a_part_of_the_cost_is_never_negative() -> None:
    model = CostModel()
    # noise: the more is decoded the quicker it is
    for prefill, decode, took in [(0, 1, 0.3), (0, 8, 0.1), (100, 4, 1.0), (50, 8, 0.5)]:
        model.add(passed(prefill, decode, took))
    cost = model.cost()
    assert cost is not None
    assert cost.decode_s == 0.0
    assert min(cost.fixed_s, cost.prefill_s) > 0.0


def test_passes_of_one_kind_are_its_time_whatever_the_cost() -> None:
    model = CostModel()
    model.add(passed(100, 0, 2.0))
    model.add(passed(0, 4, 0.5))
    model.add(passed(0, 4, 0.25))
    assert model.split(None) == (2.0, 0.75)


def test_passes_of_both_kinds_are_split_by_the_cost_of_their_tokens() -> None:
    model = CostModel()
    model.add(passed(100, 0, 2.0))
    model.add(passed(60, 10, 3.0))
    model.add(passed(40, 10, 1.0))
    # 100 prefill tokens at 0.03 s and 20 decode tokens at 0.05 s: 3 parts to 1 of the 4 s
    assert model.split(Cost(1.0, 0.03, 0.05)) == pytest.approx((2.0 + 3.0, 1.0))


@pytest.mark.parametrize("cost", [None, Cost(1.0, 0.0, 0.0)])
def test_passes_of_both_kinds_stay_unsplit_without_a_cost(cost: Cost | None) -> None:
    model = CostModel()
    model.add(passed(60, 10, 3.0))
    assert model.split(cost) is None


def test_law_of_amdahl_is_found_from_decode_steps() -> None:
    speed_up = SpeedUp()
    # t_B = 0.9 + 0.1 B: alone 1 s, nine tenths of it shared, at most ten times as fast
    for batch_size in (1, 1, 4, 11):
        speed_up.add(decoded(batch_size, 0.9 + 0.1 * batch_size))
    law = speed_up.law()
    assert law is not None
    assert (law.single_s, law.parallel_fraction, law.ceiling) == pytest.approx((1.0, 0.9, 10.0))
    # 17 tokens one by one take 17 s; they took 1 + 1 + 1.3 + 2
    assert speed_up.gained(law) == pytest.approx(17 / 5.3)


def test_steps_with_prefill_say_nothing_of_the_speed_up() -> None:
    speed_up = SpeedUp()
    speed_up.add(decoded(4, 1.0))
    speed_up.add(Step(prefill_tokens=64, decode_tokens=7, batch_size=8, step_s=9.0))
    assert speed_up.law() is None


def test_law_is_unknown_while_all_batches_are_of_one_size() -> None:
    speed_up = SpeedUp()
    for took in (0.5, 0.6, 0.7):
        speed_up.add(decoded(8, took))
    assert speed_up.law() is None


def test_speed_up_without_a_serial_part_has_no_ceiling() -> None:
    assert Amdahl(1.0, parallel_fraction=1.0).ceiling is None


def test_steps_that_took_no_time_have_no_law() -> None:
    speed_up = SpeedUp()
    for batch_size in (1, 2):
        speed_up.add(decoded(batch_size, 0.0))
    assert speed_up.law() is None
