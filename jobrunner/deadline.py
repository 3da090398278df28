"""Tell when a worker whose time runs out should start no more rows. Knows nothing of clusters."""

from __future__ import annotations

from collections.abc import Iterable

from jobrunner.records import Completion


class Deadline:
    """Watches how long rows take and compares that with the time that is left.

    A row that would be started now and not end in time is not lost: its tokens are saved. But
    its prompt is computed again, so a worker rather ends those it has. `most_s` bounds how long
    it goes on without new ones: a device must not idle for rows of many minutes.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._rows = 0
        self._total_s = 0.0

    def observe(self, completions: Iterable[Completion]) -> None:
        """Learn from rows that have ended."""
        for completion in completions:
            if completion.error is None:
                self._rows += 1
                self._total_s += completion.prefill_s + completion.decode_s

    def too_late(self, left_s: float | None) -> bool:
        """Whether a row that begins `left_s` before this worker leaves would hardly end."""
        if left_s is None or not self._rows:
            return False
        return left_s < min(self._most_s, self._total_s / self._rows)
