"""Where a text ends: ids, strings over token borders, length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.stopping import Ending, Stopping
from jobrunner.records import Sampling
from tests.fakes import LetterText

SPELLING = {1: "ABC", 2: "DEF", 3: "D", 4: "E", 5: "x", 6: "", 7: "aXbY", 8: "", 9: "</s>"}


def stopping(max_new_tokens: int = 100, **sampling: object) -> Stopping:
    settings = Sampling(max_new_tokens, **sampling)  # type: ignore[arg-type]
    return Stopping(settings, lambda: LetterText(SPELLING.__getitem__))


def ending_of(tokens: list[int], stop: Stopping) -> tuple[int, Ending | None]:
    return stop.replay(tokens)


def test_case_S_stop_begins_in_one_token():
    assert ending_of([1, 2, 5], stopping(stop=("DE",))) == (2, Ending("stop", "DE"))


def test_case_S_stop_split_over_tokens():
    assert ending_of([1, 3, 4, 5], stopping(stop=("DE",))) == (3, Ending("stop", "DE"))


def test_case_S_stop_split_over_many_tokens_with_silent_ones_between():
    assert ending_of([5, 1, 6, 3, 6, 4], stopping(stop=("BCDE",))) == (6, Ending("stop", "BCDE"))


def test_text_that_only_resembles_a_stop_goes_on():
    assert ending_of([3, 5, 4], stopping(stop=("DE",))) == (3, None)


def test_the_stop_that_begins_first_is_named():
    assert ending_of([7], stopping(stop=("Y", "X"))) == (1, Ending("stop", "X"))


@pytest.mark.parametrize("end", [8, 9])
def test_case_U_any_end_id_stops_the_text(end: int):
    assert ending_of([1, end], stopping(stop_ids=frozenset({8, 9}))) == (2, Ending("stop"))


def test_length_ends_the_text():
    assert ending_of([1, 1, 1, 1], stopping(max_new_tokens=3)) == (3, Ending("length"))


def test_a_stop_at_the_last_token_counts_as_stop():
    assert ending_of([1, 2], stopping(max_new_tokens=2, stop=("F",))) == (2, Ending("stop", "F"))


def test_no_tokens_wanted_ends_before_the_first():
    assert ending_of([], stopping(max_new_tokens=0)) == (0, Ending("length"))


def test_a_stop_may_begin_in_replayed_output():
    stop = stopping(stop=("DE",))
    assert stop.replay([1, 3]) == (2, None)
    assert stop.after(4) == Ending("stop", "DE")


def test_no_text_is_opened_without_stop_strings():
    def open_text() -> LetterText:
        raise AssertionError("opened")

    assert Stopping(Sampling(2), open_text).replay([1]) == (1, None)


@pytest.mark.parametrize("end", [8, 9])
def test_no_end_id_ends_the_first_tokens(end: int):
    early = stopping(min_new_tokens=2, stop_ids=frozenset({8, 9}), max_new_tokens=9)
    assert ending_of([end, end], early) == (2, None)
    assert early.after(end) == Ending("stop")


def test_no_stop_string_ends_the_first_tokens():
    early = stopping(min_new_tokens=2, stop=("DE", "X"))
    # one is whole in the first token, one in the second: both are passed over for good
    assert early.replay([7, 2, 5, 5]) == (4, None)
    assert early.after(2) == Ending("stop", "DE")


def test_a_stop_string_that_begins_early_may_end_the_text_later():
    assert ending_of([5, 3, 4], stopping(min_new_tokens=2, stop=("DE",))) == (
        3,
        Ending("stop", "DE"),
    )


def test_a_short_stop_string_that_was_passed_over_is_not_found_again_in_what_is_kept():
    early = stopping(min_new_tokens=1, stop=("DE", "DEFxxxxx"))
    assert ending_of([2, 5, 5, 5], early) == (4, None)


def test_the_length_ends_a_text_before_its_least_length():
    assert ending_of([1, 1, 1], stopping(2, min_new_tokens=5)) == (2, Ending("length"))


def test_a_text_that_repeats_itself_ends_there():
    assert ending_of([1, 5, 5, 5, 5], stopping(stop_on_repetition=3)) == (
        4,
        Ending("repetition"),
    )


def test_repetition_is_off_by_default():
    assert ending_of([5] * 99, stopping()) == (99, None)


def test_repetition_does_not_end_the_first_tokens_but_counts_them():
    assert ending_of([5] * 9, stopping(min_new_tokens=5, stop_on_repetition=3)) == (
        6,
        Ending("repetition"),
    )


def test_a_stop_is_named_before_a_repetition_and_that_before_the_length():
    sampling = {"max_new_tokens": 3, "stop_on_repetition": 3}
    assert ending_of([5] * 3, stopping(**sampling, stop=("xxx",)))[1] == Ending("stop", "xxx")
    assert ending_of([5] * 3, stopping(**sampling))[1] == Ending("repetition")


@given(
    tokens=st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), max_size=30),
    resumed=st.integers(0, 30),
    min_new_tokens=st.integers(0, 10),
    repetition=st.integers(0, 9),
)
def test_replayed_tokens_end_a_text_where_they_would_have_ended_it(
    tokens, resumed, min_new_tokens, repetition
):
    sampling = {
        "max_new_tokens": 25,
        "min_new_tokens": min_new_tokens,
        "stop": ("DEx", "xx"),
        "stop_ids": frozenset({8}),
        "stop_on_repetition": repetition,
    }
    whole = stopping(**sampling)
    expected = next(
        ((place, end) for place, token in enumerate(tokens, 1) if (end := whole.after(token))),
        (len(tokens), None),
    )
    parted = stopping(**sampling)
    count, ending = parted.replay(tokens[:resumed])
    for token in () if ending else tokens[resumed:]:
        count, ending = count + 1, parted.after(token)
        if ending:
            break
    assert (count, ending) == expected
