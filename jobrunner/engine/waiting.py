"""Hold sequences that have no slot, in the order in which they get one. Knows no blocks.

A lower band goes first. Within a band swapped sequences come before other preempted ones, these
before rows with tokens of an earlier run, and these before new ones, which stand in the order
that the job asks for. A row that has been in the window for longer than the starvation limit goes
before all bands, the oldest first. No operation walks the queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from jobrunner.engine.order import InputOrder, Line, Order
from jobrunner.engine.sequence import Sequence

_SWAPPED, _PREEMPTED, _RESUMED, _FRESH = range(4)


class Waiting:
    """Sequences without a slot. `new_order` makes the order of the new ones of one band.

    Returning sequences had a slot before; all others are new to the scheduler, those with tokens
    of an earlier run too.
    """

    def __init__(
        self,
        new_order: Callable[[], Order] = InputOrder,
        *,
        starvation_limit_s: float = math.inf,
    ) -> None:
        self._starvation_limit_s = starvation_limit_s
        self._returning = Line()
        self._resumed = Line()
        self._bands = _Bands(new_order)
        self._by_age = Line()
        self._new_by_age = Line()
        self._gone = 0
        # of those it was asked at
        self._latest = -math.inf

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_age)

    @property
    def returning(self) -> int:
        return len(self._returning)

    @property
    def new(self) -> int:
        return len(self._new_by_age)

    @property
    def gone(self) -> int:
        """How many new sequences have been removed so far."""
        return self._gone

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just come."""
        self._by_age.add(sequence, sequence.arrived_at)
        self._new_by_age.add(sequence, sequence.arrived_at)
        if sequence.output_length:
            self._resumed.add(sequence, sequence.request.priority)
        else:
            self._bands.add(sequence)

    def expect_more(self, more: bool) -> None:
        """Take note of whether others are known to come: the order of the last is another."""
        self._bands.expect_more(more)

    def give_back(self, sequence: Sequence, *, swapped: bool = False) -> None:
        """Queue a sequence that had to leave its slot, in the order of admission.

        `swapped`: its computed tokens are kept elsewhere, so that it goes before the others.
        """
        kind = _SWAPPED if swapped else _PREEMPTED
        self._by_age.add(sequence, sequence.arrived_at)
        self._returning.add(sequence, (sequence.request.priority, kind, sequence.admission))

    def first(self, now: float, *, new: bool = True) -> Sequence | None:
        """Return who is next, without removing it; None if nobody waits.

        Without `new` only those who return are looked at.
        """
        self._latest = now
        if not new:
            return self._returning.first()
        if self.starving(now):
            return self._by_age.first()
        fresh = self._bands.first()
        if not self._returning and not self._resumed:
            return fresh
        heads = (
            (self._returning.first(), _PREEMPTED),
            (self._resumed.first(), _RESUMED),
            (fresh, _FRESH),
        )
        ranked = [(head.request.priority, kind, head) for head, kind in heads if head is not None]
        return min(ranked)[2] if ranked else None

    def overdue(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence has been in the window for longer than the starvation limit."""
        return now - sequence.arrived_at > self._starvation_limit_s

    def lifted(self, sequence: Sequence) -> bool:
        """Whether a sequence, waiting or running, was overdue when the next one was last asked."""
        return self.overdue(sequence, self._latest)

    def starving(self, now: float) -> bool:
        """Whether somebody has been in the window for longer than the starvation limit."""
        oldest = self._by_age.first()
        return oldest is not None and self.overdue(oldest, now)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""
        self._by_age.remove(sequence)
        if sequence in self._returning:
            self._returning.remove(sequence)
            return
        self._gone += 1
        self._new_by_age.remove(sequence)
        if sequence in self._resumed:
            self._resumed.remove(sequence)
        else:
            self._bands.remove(sequence)

    def oldest_wait_s(self, now: float) -> float:
        """How long the longest waiting new sequence has waited; 0 if there is none."""
        oldest = self._new_by_age.first()
        return 0.0 if oldest is None else now - oldest.arrived_at

    def check(self) -> None:
        """Raise AssertionError unless every sequence stands in one place and is found by age."""
        new = [*self._resumed, *self._bands]
        places = [*self._returning, *new]
        assert len(set(places)) == len(places), "a sequence waits twice"
        assert set(places) == set(self._by_age), "a waiting sequence has no age"
        assert set(new) == set(self._new_by_age), "a new sequence has no age"
        assert all(sequence.admission >= 0 for sequence in self._returning), (
            "a sequence returns that was never admitted"
        )


class _Bands:
    """The new sequences of each priority, in an order of their own."""

    def __init__(self, new_order: Callable[[], Order]) -> None:
        self._new_order = new_order
        self._more = True
        self._orders: dict[int, Order] = {}
        self._priorities: list[int] = []

    def __iter__(self) -> Iterator[Sequence]:
        for order in self._orders.values():
            yield from order

    def expect_more(self, more: bool) -> None:
        if more == self._more:
            return
        self._more = more
        for priority, order in self._orders.items():
            self._orders[priority] = self._begun_anew(order) if more else order.last()

    def _begun_anew(self, order: Order) -> Order:
        new = self._new_order()
        for sequence in order:
            new.add(sequence)
        return new

    def add(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        if priority not in self._orders:
            self._orders[priority] = self._new_order()
            heapq.heappush(self._priorities, priority)
        self._orders[priority].add(sequence)

    def first(self) -> Sequence | None:
        while self._priorities:
            found = self._orders[self._priorities[0]].first()
            if found is not None:
                return found
            del self._orders[heapq.heappop(self._priorities)]
        return None

    def remove(self, sequence: Sequence) -> None:
        self._orders[sequence.request.priority].remove(sequence)
