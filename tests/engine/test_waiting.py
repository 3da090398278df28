"""Who is next of those who wait: bands, those who return, starvation; against a plain list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.order import order_named
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Stopping
from jobrunner.engine.waiting import Waiting
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import LetterText
from tests.properties import examples

LIMIT_S = 10.0


def row(index: int, priority: int = 0, *, resumed: bool = False, arrived_at: float = 0.0):
    request = Request(
        RowId("s", index), [1], Sampling(9), output=[2] if resumed else (), priority=priority
    )
    return Sequence(request, Stopping(request.sampling, lambda: LetterText(str)), arrived_at)


def admitted(sequence: Sequence, admission: int) -> Sequence:
    sequence.admission = admission
    return sequence


@dataclass
class Entry:
    sequence: Sequence
    came: int
    swapped: bool = False

    @property
    def kind(self) -> int:
        if self.sequence.admission >= 0:
            return 0 if self.swapped else 1
        return 2 if self.sequence.output_length else 3


class ListWaiting:
    """The same rules, slow and plain: sort everybody, every time."""

    def __init__(self, limit_s: float) -> None:
        self.entries: list[Entry] = []
        self.limit_s = limit_s

    def first(self, now: float, new: bool) -> Sequence | None:
        def rank(entry: Entry) -> tuple[float, ...]:
            sequence = entry.sequence
            if new and now - sequence.arrived_at > self.limit_s:
                return (-1, sequence.arrived_at, entry.came)
            among = sequence.admission if entry.kind < 2 else entry.came
            return (sequence.request.priority, entry.kind, among)

        seen = [entry for entry in self.entries if new or entry.kind < 2]
        return min(seen, key=rank).sequence if seen else None

    def remove(self, sequence: Sequence) -> Entry:
        (entry,) = [entry for entry in self.entries if entry.sequence is sequence]
        self.entries.remove(entry)
        return entry


operations = st.lists(
    st.tuples(st.sampled_from("add resumed take give_back swap drop".split()), st.integers(0, 3)),
    max_size=60,
)


@examples(200)
@given(operations=operations, limit_s=st.sampled_from([3.0, 12.0, 1000.0]))
def test_the_next_one_is_whom_a_sorted_list_names(operations, limit_s):
    waiting, plain = Waiting(starvation_limit_s=limit_s), ListWaiting(limit_s)
    running: list[Sequence] = []
    gone = 0
    for now, (operation, number) in enumerate(operations):
        if operation in ("add", "resumed"):
            come = row(now, number, resumed=operation == "resumed", arrived_at=now)
            waiting.add(come)
            plain.entries.append(Entry(come, now))
        elif operation == "take" and plain.entries:
            first = waiting.first(now)
            waiting.remove(first)
            gone += plain.remove(first).kind >= 2
            running.append(admitted(first, now))
        elif operation in ("give_back", "swap") and running:
            back = running.pop(number % len(running))
            waiting.give_back(back, swapped=operation == "swap")
            plain.entries.append(Entry(back, now, operation == "swap"))
        elif operation == "drop" and plain.entries:
            entry = plain.entries.pop(number % len(plain.entries))
            waiting.remove(entry.sequence)
            gone += entry.kind >= 2
        waiting.check()
        assert len(waiting) == len(plain.entries)
        assert waiting.gone == gone
        new = [entry.sequence for entry in plain.entries if entry.kind >= 2]
        assert (waiting.new, waiting.returning) == (len(new), len(plain.entries) - len(new))
        oldest_wait_s = max((now - sequence.arrived_at for sequence in new), default=0.0)
        assert waiting.oldest_wait_s(now) == oldest_wait_s
        for asked in (True, False):
            assert waiting.first(now, new=asked) is plain.first(now, asked)


def test_a_lower_band_goes_first_whenever_it_comes():
    waiting = Waiting()
    rows = [row(0, 2), row(1, 0), row(2, 1), row(3, 0)]
    for each in rows:
        waiting.add(each)
    assert drained(waiting) == [1, 3, 2, 0]


def test_in_a_band_swapped_rows_come_before_preempted_resumed_and_new_ones():
    waiting = Waiting()
    waiting.add(row(3))
    waiting.add(row(2, resumed=True))
    waiting.give_back(admitted(row(1), 0))
    waiting.give_back(admitted(row(0), 1), swapped=True)
    assert drained(waiting) == [0, 1, 2, 3]


def test_a_new_row_of_a_high_band_goes_before_one_that_returns_to_a_low_band():
    waiting = Waiting()
    waiting.give_back(admitted(row(1, 1), 0))
    waiting.add(row(0, 0))
    assert drained(waiting) == [0, 1]


def test_preempted_rows_return_in_the_order_of_their_admission():
    waiting = Waiting()
    for admission in (2, 0, 1):
        waiting.give_back(admitted(row(admission), admission))
    assert drained(waiting) == [0, 1, 2]


def by_output(index: int, output: int, priority: int = 0) -> Sequence:
    request = Request(RowId("s", index), [1], Sampling(output), priority=priority)
    return Sequence(request, Stopping(request.sampling, lambda: LetterText(str)), 0.0)


def test_the_last_rows_of_each_band_start_with_those_who_may_get_longest():
    waiting = Waiting(order_named("auto", block_size=4, chunk_size=8))
    for index, output in enumerate([10, 12, 11]):
        waiting.add(by_output(index, output, priority=1))
    waiting.expect_more(False)
    waiting.add(by_output(3, 5))
    waiting.add(by_output(4, 13, priority=1))
    assert drained(waiting) == [3, 4, 1, 2, 0]


def test_rows_stand_as_before_when_others_come_after_all():
    waiting = Waiting(order_named("auto", block_size=4, chunk_size=8))
    for index, output in enumerate([10, 12, 11]):
        waiting.add(by_output(index, output))
    waiting.expect_more(False)
    waiting.expect_more(True)
    waiting.add(by_output(3, 13))
    waiting.check()
    # all on one side, as they came
    assert drained(waiting) == [0, 1, 2, 3]


@pytest.mark.parametrize(("now", "first"), [(10.0, 1), (10.5, 0)])
def test_a_row_past_the_starvation_limit_goes_before_all_bands(now: float, first: int):
    waiting = Waiting(starvation_limit_s=LIMIT_S)
    waiting.add(row(0, 9, arrived_at=0.0))
    waiting.add(row(1, 0, arrived_at=5.0))
    next_one = waiting.first(now)
    assert next_one is not None
    assert next_one.request.id.index == first


def test_without_new_ones_only_those_who_return_are_first():
    waiting = Waiting()
    waiting.add(row(0))
    assert waiting.first(0.0, new=False) is None
    waiting.give_back(admitted(row(1, 5), 0))
    first = waiting.first(0.0, new=False)
    assert first is not None
    assert first.request.id.index == 1


def test_nobody_waits():
    waiting = Waiting()
    assert waiting.first(0.0) is None
    assert waiting.oldest_wait_s(7.0) == 0.0
    assert not waiting.starving(7.0)


def drained(waiting: Waiting) -> list[int]:
    found = []
    while (first := waiting.first(0.0)) is not None:
        waiting.remove(first)
        found.append(first.request.id.index)
    return found
