"""Foresee the KV blocks of the running sequences. Knows no queue, no sequences and no tensors.

A sequence that decodes takes one token a step, so what it will use is a line over the steps to
come: (offset + step) / block_size blocks up to its last step. A block is half empty on average.
What several sequences share is counted once: it is what is in use beyond all these lines.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

Numbers = np.ndarray

# steps that are looked at, from the last correction on: each of these, then ever fewer
_EACH_STEP = 128
_GROWTH = 1.06
_FARTHEST = 1 << 21


class Slots:
    """Columns of numbers by slot; slots are given up by swap-remove."""

    def __init__(self, columns: int) -> None:
        # lists, because numbers come and go one by one
        self._columns: list[list[float]] = [[] for _ in range(columns)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, *numbers: float) -> None:
        """Fill the next slot."""
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)

    def remove(self, slot: int) -> list[float]:
        """Empty a slot and return its numbers; the last slot moves into it."""
        removed: list[float] = []
        for column in self._columns:
            removed.append(column[slot])
            column[slot] = column[-1]
            column.pop()
        return removed

    def column(self, index: int) -> Numbers:
        """A copy of one column."""
        return np.array(self._columns[index])

    def replace(self, index: int, numbers: Numbers) -> None:
        """Write one column anew."""
        self._columns[index] = numbers.tolist()


class Forecast:
    """Blocks in use at each of the steps to come, kept up to date as sequences come and go.

    Tokens are those known; the last one is never stored, so a sequence with one remaining token
    is in its last step. One that outlives what was expected counts as it is until `correct`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rounding = (block_size - 1) / (2 * block_size)
        self._step = 0
        # of each sequence: tokens less the step, blocks that do not grow, index of its last step
        self._lines = Slots(3)
        self._steps = _steps()
        self._grown = np.array(self._steps) / block_size
        self._use = np.zeros(len(self._steps))

    def __len__(self) -> int:
        return len(self._lines)

    def next_step(self) -> None:
        """Every sequence has grown by a token."""
        self._step += 1

    def enter(self, tokens: int, remaining: int, shared: int) -> None:
        """Add a sequence in the next slot; `shared` of its blocks are another's as well."""
        offset, last = tokens - self._step, self._last(remaining)
        fixed = self._rounding - shared
        self._lines.add(offset, fixed, last)
        self._use[: last + 1] += self._grown[: last + 1] + (offset / self._block_size + fixed)

    def leave(self, slot: int) -> None:
        """Remove a sequence; the one in the last slot moves into its slot."""
        offset, fixed, last = self._lines.remove(slot)
        end = int(last) + 1
        self._use[:end] -= self._grown[:end] + (offset / self._block_size + fixed)

    def correct(self, tokens: Numbers, remaining: Numbers) -> None:
        """Replace what was expected of all sequences, by slot; what they share stays."""
        self._step = 0
        last = np.searchsorted(self._steps, np.minimum(remaining, _FARTHEST) - 1)
        self._lines.replace(0, tokens)
        self._lines.replace(2, last)
        count = len(self._steps)
        fixed = tokens / self._block_size + self._lines.column(1)
        own = np.bincount(last, fixed, minlength=count)
        alive = np.bincount(last, minlength=count)
        self._use = _from_behind(own) + _from_behind(alive) * self._grown

    @property
    def now(self) -> float:
        """Blocks in use now, as far as foreseen."""
        return float(self._use[self._place()])

    def fits_for(
        self, used: int, tokens: int, remaining: int, shared: int, capacity: float
    ) -> int | None:
        """For how many steps one more sequence that enters now has its blocks; None: for all.

        `used` blocks are in use now, those that it shares included.
        """
        use = self._with_one_more(used, tokens, remaining, shared)
        over = int((use > capacity).argmax())
        if not use[over] > capacity:
            return None
        return max(0, self._steps[self._place() + over] - self._step)

    def peak(self, used: int, tokens: int, remaining: int, shared: int) -> float:
        """The most blocks in use during the life of one more sequence that would enter now."""
        return float(self._with_one_more(used, tokens, remaining, shared).max())

    def _with_one_more(self, used: int, tokens: int, remaining: int, shared: int) -> Numbers:
        """Blocks in use at each step of the life of one more sequence."""
        now, end = self._place(), self._last(remaining) + 1
        beyond = max(0.0, used - float(self._use[now]))
        own = (tokens - self._step) / self._block_size + self._rounding - shared
        return self._use[now:end] + self._grown[now:end] + (beyond + own)

    def _place(self) -> int:
        return bisect_left(self._steps, self._step)

    def _last(self, remaining: int) -> int:
        return bisect_left(self._steps, min(self._step + remaining - 1, _FARTHEST))


def _steps() -> list[int]:
    steps = list(range(_EACH_STEP))
    while steps[-1] < _FARTHEST:
        steps.append(int(steps[-1] * _GROWTH) + 1)
    steps[-1] = _FARTHEST
    return steps


def _from_behind(numbers: Numbers) -> Numbers:
    """Of each place the sum of itself and all behind it."""
    return np.cumsum(numbers[::-1])[::-1]
