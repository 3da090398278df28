"""Where a text ends: ids, strings over token borders, length."""

from __future__ import annotations

import pytest

from jobrunner.engine.stopping import Ending, Stopping
from jobrunner.records import Sampling
from tests.fakes import LetterText

SPELLING = {1: "ABC", 2: "DEF", 3: "D", 4: "E", 5: "x", 6: "", 7: "aXbY", 9: "</s>"}


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
