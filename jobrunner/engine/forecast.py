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
_FIRST_SLOTS = 16


class Slots:
    """Columns of numbers by slot; slots are given up by swap-remove."""

    def __init__(self, columns: int) -> None:
        self._numbers = np.zeros((columns, _FIRST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, *numbers: float) -> None:
        """Fill the next slot."""
        if self._count == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._numbers[:, self._count] = numbers
        self._count += 1

    def remove(self, slot: int) -> Numbers:
        """Empty a slot and return its numbers; the last slot moves into it."""
        self._count -= 1
        removed = self._numbers[:, slot].copy()
        self._numbers[:, slot] = self._numbers[:, self._count]
        return removed

    def column(self, index: int) -> Numbers:
        """One column, not to be changed."""
        column: Numbers = self._numbers[index, : self._count]
        return column

    def replace(self, index: int, numbers: Numbers) -> None:
        """Write one column anew."""
        self._numbers[index, : self._count] = numbers


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
        use = self._use[: last + 1]
        use += self._grown[: last + 1] + (offset / self._block_size + fixed)

    def leave(self, slot: int) -> None:
        """Remove a sequence; the one in the last slot moves into its slot."""
        offset, fixed, last = self._lines.remove(slot).tolist()
        use = self._use[: int(last) + 1]
        use -= self._grown[: int(last) + 1] + (offset / self._block_size + fixed)

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

    def peak(self, used: int, tokens: int, remaining: int, shared: int) -> float:
        """The most blocks in use during the life of one more sequence that would enter now.

        `used` blocks are in use now, those that it shares included.
        """
        now, end = bisect_left(self._steps, self._step), self._last(remaining) + 1
        beyond = max(0.0, used - float(self._use[now]))
        own = (tokens - self._step) / self._block_size + self._rounding - shared
        return beyond + own + float(np.maximum.reduce(self._use[now:end] + self._grown[now:end]))

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
