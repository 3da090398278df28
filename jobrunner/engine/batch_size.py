"""Decide how many sequences may run, now and then. Knows no queue, no memory and no clock."""

from __future__ import annotations

# of the most that may run: the least change that is made at once
_LEAST_CHANGE = 1 / 16


class BatchSize:
    """B_t = min(B_max, Q_t + B_{t−1} − D_t), decided every so many steps.

    B_max is the most that may run, Q_t wait, D_t are done. Between two decisions the last one
    holds, whoever comes or goes. With more than a step between them, a change of less than a
    sixteenth of B_max is not made; so that nobody waits for ever, a rise is if the next decision
    wants one too. An empty batch is decided at once.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._size = 0
        self._steps_left = 0
        self._rise_wanted = False

    def next(self, *, most: int, waiting: int, occupied: int) -> int:
        """Return how many may run in the next step, where `occupied` slots still are."""
        if occupied == 0 or self._steps_left == 0:
            self._decide(most, waiting + occupied, empty=occupied == 0)
            self._steps_left = self._every
        self._steps_left -= 1
        return min(self._size, most)

    def _decide(self, most: int, present: int, *, empty: bool) -> None:
        wanted = min(most, present)
        change = wanted - self._size
        least = 1 if self._every == 1 else max(1, int(most * _LEAST_CHANGE))
        rise_again = change > 0 and self._rise_wanted
        self._rise_wanted = change > 0
        if abs(change) >= least or rise_again or empty:
            self._size = wanted
            self._rise_wanted = False
