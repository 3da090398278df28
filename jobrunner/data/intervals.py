"""A set of row indices as sorted, disjoint ranges: small where rows are done nearly in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Intervals:
    """Row indices, kept as half-open ranges that neither touch nor overlap."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    @classmethod
    def of(cls, indices: Iterable[int]) -> Intervals:
        """Collect single indices."""
        return cls((index, index + 1) for index in indices)

    def add(self, start: int, stop: int) -> None:
        """Add every index from `start` up to, not including, `stop`."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def update(self, other: Iterable[tuple[int, int]]) -> None:
        """Add all ranges of another set."""
        for start, stop in other:
            self.add(start, stop)

    def count(self, start: int, stop: int) -> int:
        """Count the indices that lie from `start` up to, not including, `stop`."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        return sum(
            min(self._stops[i], stop) - max(self._starts[i], start) for i in range(first, last)
        )

    def complement(self, stop: int) -> Intervals:
        """The indices from 0 up to, not including, `stop` that are not here."""
        starts = [0, *self._stops]
        return Intervals(zip(starts, [*self._starts, stop], strict=True))

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int):
            return False
        place = bisect_right(self._starts, index)
        return place > 0 and index < self._stops[place - 1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Intervals({list(self)})"
