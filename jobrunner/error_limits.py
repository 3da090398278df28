"""Stop a job in which too many rows are errors. Knows nothing of what the rows are."""

from __future__ import annotations

from jobrunner.config import ErrorsTable
from jobrunner.data.results.samples import FinishedRow
from jobrunner.errors import TooManyErrorsError

# a rate says little of fewer rows
ROWS_BEFORE_RATE = 1000


class ErrorLimits:
    """Counts the finished rows of a job and its errors against `errors.max_rate` and `max_count`.

    `rows` and `errors` are those that earlier runs finished.
    """

    def __init__(self, limits: ErrorsTable, rows: int, errors: int) -> None:
        self._limits = limits
        self._rows = rows
        self._errors = errors

    def count(self, row: FinishedRow | None) -> None:
        """Take note of one more finished row, if there is one."""
        if row is not None:
            self._rows += 1
            self._errors += row.error is not None

    @property
    def passed(self) -> bool:
        """Whether the job has to stop."""
        return self._count_passed or self._rate_passed

    def raise_if_passed(self) -> None:
        """Raise TooManyErrorsError, with the limit, where the job has to stop."""
        if self._count_passed:
            raise TooManyErrorsError(
                f"{self._errors:,} rows are errors, limit `errors.max_count`"
                f" {self._limits.max_count:,}",
                hint=_hint("max_count"),
            )
        if self._rate_passed:
            raise TooManyErrorsError(
                f"{self._errors:,} of the first {self._rows:,} rows are errors"
                f" ({self._errors / self._rows:.0%}), limit `errors.max_rate`"
                f" {self._limits.max_rate:.0%}",
                hint=_hint("max_rate"),
            )

    @property
    def _count_passed(self) -> bool:
        limit = self._limits.max_count
        return limit is not None and self._errors > limit

    @property
    def _rate_passed(self) -> bool:
        return self._rows >= ROWS_BEFORE_RATE and self._errors > self._limits.max_rate * self._rows


def _hint(key: str) -> str:
    return (
        "the results so far are kept; `cbjob check --rows` lists what fails. Mend it and run again"
        f" with `--retry-errors`, or raise `errors.{key}` and run again"
    )
