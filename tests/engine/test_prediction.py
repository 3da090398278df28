"""Predicted output lengths against a slow obvious estimator, and what a user expects of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine import prediction
from jobrunner.engine.prediction import LengthPredictor
from jobrunner.engine.sequence import Sequence as Running
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import LetterText
from tests.properties import examples

STOP_IDS = frozenset({0})


def sampling(most: int, least: int = 0, stop_ids: frozenset[int] = STOP_IDS) -> Sampling:
    return Sampling(most, stop_ids=stop_ids, min_new_tokens=least)


def sequence(length: int, how: Sampling, index: int = 0, prompt: int = 1) -> Running:
    """A sequence with a prompt of so many tokens that has generated so many."""
    asked = Request(RowId("s", index), [1] * prompt, how, output=[5] * length)
    return Running(asked, Stopping(how, lambda: LetterText(str)), 0.0)


def taught(ended: Sequence[int], cut: Sequence[int] = (), running: Sequence[int] = (), margin=0.0):
    predictor = LengthPredictor(margin)
    counts = np.array(running, np.int64)
    predictor.observe_running(np.ones_like(counts), counts)
    for length in ended:
        predictor.observe(sequence(length, sampling(1_000_000)))
    for length in cut:
        predictor.observe(sequence(length, sampling(length)))
    # whatever has come since the tables were made
    predictor._build()
    return predictor


def taught_by_prompt(ended: Sequence[tuple[int, int]]) -> LengthPredictor:
    """What is known from rows of such prompts and outputs."""
    predictor = LengthPredictor(0.0)
    for prompt, length in ended:
        predictor.observe(sequence(length, sampling(1_000_000), prompt=prompt))
    predictor._build()
    return predictor


def survival(length: int, ended: Sequence[int], others: Sequence[int]) -> float:
    """P(L > length): of those that reach each length, the share that does not end there."""
    alive = 1.0
    for step in range(1, length + 1):
        reached = sum(value >= step for value in [*ended, *others])
        if reached:
            alive *= 1 - ended.count(step) / reached
    return alive


def slow_remaining(
    length: int, most: int, ended: Sequence[int], others: Sequence[int], margin: float
) -> float:
    """The mean of what is left and a share of its deviation, from the chance of each length."""
    now = survival(length, ended, others)
    if now == 0:
        return most - length
    left = [survival(further, ended, others) / now for further in range(length, most + 1)]
    chances = [left[k - 1] - left[k] for k in range(1, most - length)]
    # all who get further than that end at the limit
    chances.append(left[most - length - 1])
    mean = sum(chance * k for k, chance in enumerate(chances, 1))
    square = sum(chance * k * k for k, chance in enumerate(chances, 1))
    return mean + margin * math.sqrt(max(0.0, square - mean * mean))


lengths = st.lists(st.integers(1, 40), max_size=12)


@examples(200)
@given(
    ended=lengths,
    cut=lengths,
    running=lengths,
    length=st.integers(0, 45),
    more=st.integers(1, 60),
    margin=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_what_remains_is_the_conditional_mean_and_its_margin(
    ended, cut, running, length, more, margin
):
    most = length + more
    predictor = taught(ended, cut, running, margin)
    expected = slow_remaining(length, most, ended, [*cut, *running], margin)
    found = predictor.remaining(sequence(length, sampling(most)))
    assert expected - 1e-3 <= found <= expected + 1 + 1e-3 or found == more


@examples(50)
@given(
    ended=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    bounds=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 6000)), min_size=1
    ),
)
def test_a_prediction_keeps_the_bounds_of_its_row(ended, bounds):
    predictor = taught(ended, margin=0.5)
    for length, least, most in bounds:
        how = sampling(length + most, min(least, length + most))
        remaining = predictor.remaining(sequence(length, how))
        assert max(1, how.min_new_tokens - length) <= remaining <= most


@examples(200)
@given(
    ended=lengths,
    cut=lengths,
    rows=st.lists(
        st.tuples(
            st.integers(0, 45),
            st.integers(0, 60),
            st.integers(1, 60),
            st.integers(0, 99),
            st.sampled_from([1, 4, 100]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_a_drawn_length_is_the_first_that_so_many_do_not_outlive(ended, cut, rows):
    predictor = taught(ended, cut)
    sequences = []
    for length, least, more, index, prompt in rows:
        how = sampling(length + more, min(least, length + more))
        sequences.append(sequence(length, how, index, prompt))
    found = [predictor.draw_remaining(each) for each in sequences]
    for each, remaining in zip(sequences, found, strict=True):
        length, (least, most) = each.output_length, each.length_bounds
        now = survival(length, ended, cut)
        wanted = now * (1 - each.place)
        enough = (k for k in range(length + 1, 100) if survival(k, ended, cut) < wanted - 1e-9)
        total = next(enough, None)
        if total is None or now == 0:
            unknown = survival(100, ended, cut)
            first = min(max(length, 1, *ended, *cut), most)
            share = 1 - wanted / unknown if unknown > 1e-9 else each.place
            total = math.floor(first * (most / first) ** share + 1e-9) + 1
        assert remaining == max(min(total, most), least, length + 1) - length
    bounds = np.array([each.length_bounds for each in sequences])
    many = predictor.draw_remaining_of_many(
        np.array([each.prompt_length for each in sequences]),
        np.array([each.output_length for each in sequences]),
        *bounds.T,
        np.array([each.place for each in sequences]),
    )
    assert many.tolist() == found


def test_drawn_lengths_are_distributed_as_those_that_were_seen():
    draw = random.Random(3)
    seen = [max(1, round(draw.lognormvariate(4.5, 1.0))) for _ in range(3000)]
    predictor = taught(seen)
    drawn = [predictor.draw_remaining(sequence(0, sampling(9000), index)) for index in range(1000)]
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = sorted(seen)[round(share * len(seen))]
        assert sorted(drawn)[round(share * len(drawn))] == pytest.approx(expected, rel=0.12)


def test_before_anything_is_known_all_orders_of_magnitude_are_drawn_alike():
    predictor = LengthPredictor()
    drawn = [predictor.draw_remaining(sequence(0, sampling(1000), row)) for row in range(1000)]
    for edge, share in ((10, 1 / 3), (100, 2 / 3)):
        assert sum(length <= edge for length in drawn) / 1000 == pytest.approx(share, abs=0.02)


def test_before_anything_is_known_a_row_takes_its_limit():
    assert LengthPredictor().expect(Request(RowId("s", 0), [1], sampling(700))) == 700
    assert LengthPredictor().remaining(sequence(30, sampling(700))) == 670


@pytest.mark.parametrize("ended", [[], [20] * 5])
def test_a_huge_limit_says_no_more_than_a_usual_one(ended: list[int]):
    known = taught(ended, running=[20] * 95)
    usual, huge = (
        [known.draw_remaining(sequence(0, sampling(most), row)) for row in range(1000)]
        for most in (1024, 100_000)
    )
    assert huge == usual
    assert known.expect(Request(RowId("s", 0), [1], sampling(100_000))) <= 1024


@pytest.mark.parametrize("how_far", [[5000], [5000, 20, 30]])
def test_rows_that_ran_far_raise_what_others_are_expected_to_become(how_far: list[int]):
    predictor = LengthPredictor()
    predictor.observe_running(np.ones(len(how_far)), np.array(how_far))
    drawn = [predictor.draw_remaining(sequence(0, sampling(100_000), row)) for row in range(100)]
    assert max(drawn) > 20_000
    # and the row itself is not about to end
    assert predictor.remaining(sequence(5000, sampling(100_000))) > 20_000


def test_a_least_length_beyond_the_usual_ones_is_kept():
    how = sampling(100_000, least=30_000)
    assert LengthPredictor().remaining(sequence(0, how)) == 30_000
    assert LengthPredictor().draw_remaining(sequence(0, how)) == 30_000


def test_one_row_in_32_gets_beyond_the_longest():
    draw = random.Random(3)
    seen = [max(1, round(draw.lognormvariate(4.5, 1.0))) for _ in range(3200)]
    longest = taught(seen).longest(Request(RowId("s", 0), [1], sampling(9000)))
    assert longest == pytest.approx(sorted(seen)[3100], rel=0.07)


def test_the_longest_keeps_the_bounds_and_the_tokens_of_an_earlier_run():
    predictor = taught([10] * 100)
    assert predictor.longest(Request(RowId("s", 0), [1], sampling(7))) == 7
    assert predictor.longest(Request(RowId("s", 0), [1], sampling(99, stop_ids=frozenset()))) == 99
    assert predictor.longest(Request(RowId("s", 0), [1], sampling(99), output=[5] * 20)) > 20


def test_a_row_that_nothing_can_end_takes_its_limit():
    predictor = taught([3] * 100)
    endless = sampling(200, stop_ids=frozenset())
    assert predictor.remaining(sequence(0, sampling(200))) == 3
    assert predictor.remaining(sequence(0, endless)) == 200


def test_the_tokens_of_an_earlier_run_count_as_output():
    predictor = taught([10, 30])
    asked = Request(RowId("s", 0), [1], sampling(99), output=[5] * 20)
    assert predictor.expect(asked) == 30


def test_a_row_that_outlived_all_others_is_not_known_to_end():
    assert taught([10, 30]).remaining(sequence(30, sampling(99))) == 69


def test_rows_cut_at_their_limit_do_not_count_as_that_short():
    assert taught([], cut=[20] * 50).remaining(sequence(0, sampling(100))) == 100
    half = taught([10] * 50, cut=[20] * 50)
    assert half.remaining(sequence(0, sampling(100))) == 55


def test_the_short_rows_that_finish_first_do_not_deceive():
    # of 50 that began together 5 ended so far
    known = taught([8] * 5, running=[20] * 45)
    assert known.remaining(sequence(0, sampling(100))) == pytest.approx(0.1 * 8 + 0.9 * 100, abs=1)


@pytest.mark.parametrize("length", [1, 128, 129, 1000, 30_000])
def test_long_lengths_are_known_within_the_width_of_their_bins(length: int):
    expected = taught([length] * 40).remaining(sequence(0, sampling(100_000)))
    assert 0.93 * length - 1 <= expected <= 1.07 * length + 1


def test_skewed_lengths_are_learnt_within_a_few_percent():
    draw = random.Random(7)
    seen = [max(1, round(draw.lognormvariate(4.5, 1.0))) for _ in range(4000)]
    predictor = taught(seen)
    for length in (0, 50, 200, 600):
        longer = [min(each, 2000) - length for each in seen if each > length]
        found = predictor.remaining(sequence(length, sampling(2000)))
        assert found == pytest.approx(sum(longer) / len(longer), rel=0.05)


def test_lengths_that_change_within_a_job_are_followed():
    predictor = LengthPredictor(0.0)
    short, long = sequence(10, sampling(500)), sequence(100, sampling(500))
    for _ in range(9000):
        predictor.observe(short)
    for _ in range(30_000):
        predictor.observe(long)
    assert predictor.remaining(sequence(0, sampling(500))) >= 85


# prompts of different lengths


def test_rows_of_long_and_of_short_prompts_are_told_apart():
    predictor = taught_by_prompt([(10, 20), (1000, 300)] * 500)
    for prompt, own in ((9, 20), (15, 20), (600, 300), (1023, 300)):
        found = predictor.remaining(sequence(0, sampling(999), prompt=prompt))
        # 500 rows of its own and 16 of both lengths
        assert found == pytest.approx((500 * own + 16 * 160) / 516, rel=0.05)


def test_a_prompt_of_a_length_that_never_came_is_expected_as_all_rows():
    predictor = taught_by_prompt([(10, 20), (1000, 300)] * 500)
    assert predictor.remaining(sequence(0, sampling(999), prompt=100)) == pytest.approx(160, abs=8)
    asked = Request(RowId("s", 0), [1] * 100, sampling(999))
    assert predictor.expect(asked) == predictor.remaining(sequence(0, sampling(999), prompt=100))


def test_where_prompts_tell_nothing_it_makes_no_difference_of_which_length_they_are():
    draw = random.Random(5)
    rows = [(2 ** draw.randint(0, 9), draw.randint(1, 100)) for _ in range(4000)]
    predictor = taught_by_prompt(rows)
    for power in range(10):
        found = predictor.remaining(sequence(0, sampling(999), prompt=2**power))
        assert found == pytest.approx(50.5, rel=0.1)


def slow_class_survivals(
    most: int, ended: Sequence[tuple[int, int]], prompt: int, borrowed: int
) -> list[float]:
    """P(L > l) for l up to `most`, from the rows of a class and some of the rows of all."""
    lengths = [output for _, output in ended]
    own = [output for each, output in ended if each.bit_length() == prompt.bit_length()]
    alive = [1.0]
    for step in range(1, most + 1):
        # without rows that are cut, the share of all rows that is longer
        before, after = (sum(x > each for x in lengths) / len(lengths) for each in (step - 1, step))
        reached = sum(value >= step for value in own) + borrowed * before
        ending = own.count(step) + borrowed * (before - after)
        alive.append(alive[-1] * (1 - ending / reached) if reached else 0.0)
    return alive


@examples(100)
@given(
    ended=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 7, 8]), st.integers(1, 40)), min_size=1, max_size=30
    ),
    prompt=st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    length=st.integers(0, 30),
)
def test_a_class_of_few_rows_is_mostly_as_all_rows(ended, prompt, length):
    alive = slow_class_survivals(60, ended, prompt, 16)
    found = taught_by_prompt(ended).remaining(sequence(length, sampling(60), prompt=prompt))
    if alive[length] < 1e-9:
        assert found == 60 - length
        return
    mean = sum(alive[length:60]) / alive[length]
    assert mean - 1e-3 <= found <= mean + 1 + 1e-3


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 7, 8, 2**20, 2**22 - 1, 2**22, 2**23])
def test_one_and_many_are_of_the_same_class(prompt):
    [found] = prediction._classes(np.array([prompt]))
    assert found == prediction._class(prompt)


def test_running_rows_count_for_the_prompts_they_have():
    predictor = taught_by_prompt([(10, 20), (1000, 20)] * 100)
    # long prompts go on and on
    predictor.observe_running(np.full(400, 1000), np.full(400, 200))
    predictor._build()
    short, long = (
        predictor.remaining(sequence(0, sampling(300), prompt=prompt)) for prompt in (10, 1000)
    )
    assert long > 2 * short
