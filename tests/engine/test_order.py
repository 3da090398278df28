"""The order in which new rows start: what is promised, against sorting a list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.order import (
    AutoOrder,
    InputOrder,
    LastOrder,
    Line,
    MostTokens,
    Order,
    PrefixOrder,
    order_named,
)
from jobrunner.engine.sequence import Sequence as Row
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import LetterText
from tests.properties import examples

NAMES = ("auto", "input", "longest", "shortest", "prefix")
BLOCK = 4


def row(index: int, prompt: Sequence[int] = (1,), output: int = 1) -> Row:
    request = Request(RowId("s", index), prompt, Sampling(output))
    return Row(request, Stopping(request.sampling, lambda: LetterText(str)), 0.0)


def index_of(sequence: Row | None) -> int:
    assert sequence is not None
    return sequence.request.id.index


def drained(order: Order) -> list[int]:
    """Take out everybody, the first first."""
    found = []
    while (first := order.first()) is not None:
        order.remove(first)
        found.append(index_of(first))
    assert len(order) == 0
    return found


def made(name, predictor=None) -> Order:
    return order_named(name, block_size=BLOCK, chunk_size=8, predictor=predictor)()


rows_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=13), st.integers(1, 40)),
    max_size=20,
)


@given(name=st.sampled_from(NAMES), rows=rows_strategy, choices=st.lists(st.integers(0, 99)))
def test_everybody_comes_up_once_whoever_else_is_removed(name, rows, choices):
    order = made(name)
    waiting: dict[int, Row] = {}
    rest = [row(index, *each) for index, each in enumerate(rows)]
    for choice in [*choices, *[0] * len(rest)]:
        if rest and choice % 2 == 0:
            came = rest.pop(0)
            order.add(came)
            waiting[index_of(came)] = came
        elif waiting and choice % 3 == 0:
            order.remove(waiting.pop(sorted(waiting)[choice % len(waiting)]))
        elif waiting:
            first = order.first()
            order.remove(first)
            assert waiting.pop(index_of(first)) is first
        assert len(order) == len(waiting)
        assert {index_of(each) for each in order} == waiting.keys()
        assert (order.first() is None) == (not waiting)
    assert sorted(drained(order)) == sorted(waiting)


@given(rows=rows_strategy)
def test_longest_and_shortest_go_by_all_tokens_and_equal_ones_by_the_input(rows):
    work = [len(prompt) + output for prompt, output in rows]
    for name, sign in (("longest", -1), ("shortest", 1)):
        order = made(name)
        for index, each in enumerate(rows):
            order.add(row(index, *each))
        expected = sorted(range(len(rows)), key=lambda index: sign * work[index])
        assert drained(order) == expected


def test_the_expected_output_is_what_a_predictor_says():
    class Backwards:
        def expect(self, request: Request) -> float:
            return -request.id.index

    order = made("longest", Backwards())
    for index in range(3):
        order.add(row(index, output=index + 1))
    assert drained(order) == [0, 1, 2]


def test_input_order_is_that_of_arrival():
    order = InputOrder()
    for index in (3, 1, 2):
        order.add(row(index))
    assert drained(order) == [3, 1, 2]


@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=25))
def test_rows_of_one_prefix_stand_together_at_every_depth(prompts):
    order = PrefixOrder(BLOCK)
    for index, prompt in enumerate(prompts):
        order.add(row(index, prompt))
    walk = [prompts[index] for index in drained(order)]
    for depth in (1, 2, 3):
        leading = [tuple(p[: depth * BLOCK]) for p in walk if len(p) >= depth * BLOCK]
        changes = sum(one != other for one, other in pairwise(leading))
        assert changes == max(0, len(set(leading)) - 1)


def test_a_row_that_comes_while_its_prefix_runs_joins_it():
    order = PrefixOrder(BLOCK)
    for index in range(8):
        order.add(row(index, [index % 4] * BLOCK + [index]))
    first = order.first()
    order.remove(first)
    order.add(row(8, [*list(first.request.prompt)[:BLOCK], 99]))
    assert set(drained(order)[:2]) == {8, (index_of(first) + 4) % 8}


def test_a_row_equal_to_the_one_that_just_started_is_next():
    order = PrefixOrder(BLOCK)
    for index in range(4):
        order.add(row(index, [index] * BLOCK))
    first = order.first()
    order.remove(first)
    order.add(row(4, first.request.prompt))
    assert index_of(order.first()) == 4


@pytest.mark.parametrize("name", ["prefix", "auto"])
def test_no_row_waits_for_more_than_two_rounds_of_the_window(name):
    order = made(name)
    window = [row(index, [index] * BLOCK) for index in range(8)]
    for each in window:
        order.add(each)
    came, waited = dict.fromkeys(range(8), 0), 0
    for step in range(1, 200):
        first = order.first()
        order.remove(first)
        waited = max(waited, step - came[index_of(first)])
        order.add(row(7 + step, [step % 8] * BLOCK))
        came[7 + step] = step
    assert waited <= 2 * 8


def test_auto_starts_long_rows_at_once_the_longest_first():
    order = made("auto")
    for index, output in enumerate([10] * 6 + [100, 10, 200, 10]):
        order.add(row(index, output=output))
    assert drained(order)[:2] == [8, 6]


def test_auto_with_nothing_known_takes_no_row_for_long():
    class Same:
        def expect(self, request: Request) -> float:
            return 256.0

        def longest(self, request: Request) -> float:
            return 256.0

    order = AutoOrder(BLOCK, 8, Same())
    plain = PrefixOrder(BLOCK)
    for index in range(20):
        order.add(row(index, [index] * BLOCK))
        plain.add(row(index, [index] * BLOCK))
    assert drained(order) == drained(plain)


def test_auto_takes_prompts_and_outputs_in_turn():
    order = AutoOrder(BLOCK, 8, MostTokens())
    kinds = {True: (40, 2), False: (4, 6)}
    for index in range(40):
        prompt, output = kinds[index % 2 == 0]
        order.add(row(index, [index] * prompt, output))
    taken = [index % 2 == 0 for index in drained(order)]
    heavy_beyond_half = [sum(taken[:place]) - place / 2 for place in range(41)]
    assert max(map(abs, heavy_beyond_half)) <= 3


def test_auto_goes_on_mixing_when_the_expected_output_changes():
    class Learning:
        expected = 2000.0

        def expect(self, request: Request) -> float:
            return self.expected

        def longest(self, request: Request) -> float:
            return self.expected

    predictor = Learning()
    order = AutoOrder(BLOCK, 8, predictor)
    for index in range(40):
        order.add(row(index, [index] * (40 if index % 2 else 4)))
    predictor.expected = 100.0
    taken = [index % 2 for index in drained(order)]
    assert max(abs(sum(taken[:place]) - place / 2) for place in range(41)) <= 3


class ByPrompt:
    """Expects the same of all, and knows from the prompt which may get long."""

    def expect(self, request: Request) -> float:
        return 10.0

    def longest(self, request: Request) -> float:
        return request.prompt[-1]


def test_of_the_last_those_who_may_get_long_go_first():
    order = made("auto", ByPrompt())
    for index, longest in enumerate([5, 90, 5, 40, 90, 7]):
        order.add(row(index, [longest]))
    last = order.last()
    assert drained(last) == [1, 4, 3, 5, 0, 2]


def test_who_comes_to_the_last_after_all_stands_among_them():
    order = made("auto", ByPrompt())
    for index, longest in enumerate([5, 90]):
        order.add(row(index, [longest]))
    last = order.last()
    last.add(row(2, [40]))
    assert drained(last) == [1, 2, 0]


@examples(100)
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=25))
def test_rows_of_one_prefix_stand_together_among_the_last_the_longest_first(prompts):
    rows = [row(index, prompt, 1 + (7 * index) % 5) for index, prompt in enumerate(prompts)]
    last = LastOrder(rows, BLOCK, MostTokens())
    walk = drained(last)
    assert sorted(walk) == list(range(len(prompts)))
    for depth in (0, 1, 2, 3):
        stem = depth * BLOCK
        groups = [tuple(prompts[i][:stem]) for i in walk if len(prompts[i]) >= stem]
        changes = sum(one != other for one, other in pairwise(groups))
        assert changes == max(0, len(set(groups)) - 1)
        for group in set(groups):
            inside = [i for i in walk if tuple(prompts[i][:stem]) == group]
            # of those who have no more in common with others, and of the others by their longest
            longest: dict[tuple[int, ...], int] = {}
            for i in inside:
                further = tuple(prompts[i][: stem + BLOCK])
                branch = further if len(further) == stem + BLOCK else (*further, -1 - i)
                output = rows[i].request.sampling.max_new_tokens
                longest[branch] = max(longest.get(branch, 0), output)
            assert list(longest.values()) == sorted(longest.values(), reverse=True)


@pytest.mark.parametrize("name", ["input", "longest", "shortest", "prefix"])
def test_an_order_that_was_asked_for_holds_to_the_last(name):
    order = made(name)
    for index, output in enumerate([3, 9, 1]):
        order.add(row(index, output=output))
    assert order.last() is order


@pytest.mark.parametrize("name", NAMES)
def test_an_order_without_rows_has_no_first(name):
    assert made(name).first() is None
    assert made(name).last().first() is None


def test_a_line_forgets_whom_it_lost():
    line = Line()
    rows = [row(index) for index in range(1_000)]
    for each in rows:
        line.add(each, 0)
    for each in rows[1:]:
        line.remove(each)
    assert list(line) == [rows[0]]
    # what it still holds of those that were removed is bounded
    assert len(line._queue) + len(line._heap) < 100


@given(st.lists(st.integers(-1, 6), max_size=200), st.randoms(use_true_random=False))
def test_a_line_is_sorted_whoever_comes_and_goes(keys, chance):
    # -1 removes one of those who are there
    line, present, came = Line(), dict[Row, tuple[int, int]](), 0
    for key in keys:
        if key < 0 and present:
            gone = line.first() if chance.random() < 0.5 else chance.choice(list(present))
            line.remove(gone)
            del present[gone]
        elif key >= 0:
            each = row(came)
            line.add(each, key)
            present[each] = (key, came)
            came += 1
        assert line.first() is min(present, key=present.__getitem__, default=None)
        assert list(line) == list(present)


def test_a_row_that_comes_again_stands_where_its_new_key_says():
    line = Line()
    one, two = row(1), row(2)
    line.add(one, 0)
    line.add(two, 1)
    line.remove(one)
    line.add(one, 2)
    assert line.first() is two


def test_rows_without_a_common_prefix_start_as_they_came():
    order = PrefixOrder(BLOCK)
    for index in (3, 1, 4, 0, 2):
        order.add(row(index, [index] * BLOCK))
    started = []
    while (first := order.first()) is not None:
        started.append(index_of(first))
        order.remove(first)
    assert started == [3, 1, 4, 0, 2]
