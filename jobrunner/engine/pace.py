"""Say how fast rows may start, so that they do not all grow and end at once. Knows no queue.

Rows of prompts of p and outputs of o tokens hold p + o/2 tokens on the average of their lives and
p + o at the end. Where they get equally long and start together, memory must do for all ends at
once; and when they end, the next start together again. Started one after the other,
C = capacity / (p + o/2) of them fit, and C / o of them end, and may start, in a step. Rows of
different lengths come apart by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

# of the rate C / o; the rest is for chance
_RATE = 0.95
# the share of C that may start at once
_BURST = 0.02
# lengths are equal where their deviation is less than such a share of their mean
_EQUAL = 0.25
# rows that must have ended before anything is said of the others
_FEWEST = 32
# waves: while fewer are left, breaking them costs more than they do
_FEW_WAVES = 2.0
# weight of the newest row
_NEWEST = 0.01


class Pace:
    """Lets rows start at the rate at which such rows end, where all get equally long.

    `capacity` in tokens; `slots` is how many may run: where they all fit, nobody is held back,
    nor where only few are `waiting`.
    """

    def __init__(self, capacity: int, slots: int, waiting: Callable[[], int]) -> None:
        self._capacity = capacity
        self._slots = slots
        self._waiting = waiting
        self._ended = 0
        self._prompt = self._output = self._square = 0.0
        # rows that may start, where there is a rate
        self._rows = 0.0
        self._rate: float | None = None

    @property
    def may_start(self) -> bool:
        if self._rate is None or self._rows >= 1.0:
            return True
        return self._waiting() < _FEW_WAVES * self._together

    def next_step(self) -> None:
        """Take note that a step begins."""
        if self._rate is not None:
            self._rows = min(max(1.0, _BURST * self._together), self._rows + self._rate)

    def started(self) -> None:
        """Take note of a row that starts."""
        if self._rate is not None:
            self._rows -= 1.0

    def observe(self, prompt: int, output: int) -> None:
        """Learn from a row that ended, of so many tokens."""
        self._ended += 1
        weight = max(_NEWEST, 1 / self._ended)
        self._prompt += weight * (prompt - self._prompt)
        self._output += weight * (output - self._output)
        self._square += weight * (output**2 - self._square)
        paced = self._ended >= _FEWEST and self._equal and self._together < self._slots
        self._rate = _RATE * self._together / self._output if paced else None

    @property
    def _equal(self) -> bool:
        return self._square - self._output**2 < (_EQUAL * self._output) ** 2

    @property
    def _together(self) -> float:
        """How many fit that have started one after the other."""
        return self._capacity / (self._prompt + self._output / 2)
