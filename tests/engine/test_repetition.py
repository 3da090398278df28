"""Texts that run in circles: noticed as a slow, obvious reference notices them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.repetition import Repetition
from tests.properties import examples


def repeats(tokens: Sequence[int], length: int) -> bool:
    """Whether the last `length` tokens are one block, repeated at least three times."""
    last = list(tokens[-length:])
    return len(last) == length and any(
        all(last[place] == last[place % period] for place in range(length))
        for period in range(1, min(64, length // 3) + 1)
    )


def shown(tokens: Sequence[int], length: int) -> list[bool]:
    repetition = Repetition(length)
    return [repetition.after(token) for token in tokens]


@examples(200)
@given(
    pieces=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 8)),
        max_size=6,
    ),
    length=st.integers(1, 25),
)
def test_repetition_is_noticed_when_a_slow_reference_notices_it(pieces, length):
    tokens = [token for block, times in pieces for token in block * times]
    expected = [repeats(tokens[: place + 1], length) for place in range(len(tokens))]
    assert shown(tokens, length) == expected


@pytest.mark.parametrize(("period", "noticed"), [(63, True), (64, True), (65, False)])
def test_the_longest_period_is_64(period: int, noticed: bool):
    assert any(shown(list(range(period)) * 5, 200)) == noticed


def test_the_last_block_may_be_cut():
    assert shown([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], 11) == [False] * 10 + [True]


def test_two_blocks_are_no_repetition():
    assert not any(shown([1, 2, 3, 4, 1, 2, 3, 4], 8))


def test_a_length_under_three_never_repeats():
    assert not any(shown([1] * 9, 2))
