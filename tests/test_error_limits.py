"""When a job stops because of its error rows."""

from __future__ import annotations

import pytest

from jobrunner.config import ErrorsTable
from jobrunner.data.results.samples import Answer, FinishedRow
from jobrunner.error_limits import ErrorLimits
from jobrunner.errors import ExitCode, TooManyErrorsError
from jobrunner.records import Completion, RowError, RowId

ID = RowId("a", 0)
OK = FinishedRow((Answer(Completion(ID), "yes"),))
FAILED = FinishedRow((Answer(Completion(ID, error=RowError("null_prompt", "is null")), None),))


def counted(limits: ErrorLimits, ok: int = 0, failed: int = 0) -> ErrorLimits:
    for row, times in ((OK, ok), (FAILED, failed)):
        for _ in range(times):
            limits.count(row)
    return limits


def test_by_default_more_than_half_of_the_first_thousand_rows_may_not_fail() -> None:
    assert not counted(ErrorLimits(ErrorsTable(), 0, 0), failed=999).passed
    assert not counted(ErrorLimits(ErrorsTable(), 0, 0), ok=500, failed=500).passed
    limits = counted(ErrorLimits(ErrorsTable(), 0, 0), ok=499, failed=501)
    with pytest.raises(TooManyErrorsError) as raised:
        limits.raise_if_passed()
    assert raised.value.exit_code == ExitCode.TOO_MANY_ERRORS == 4
    assert str(raised.value) == (
        "501 of the first 1,000 rows are errors (50%), limit `errors.max_rate` 50%"
    )


def test_a_count_holds_from_the_first_row_on() -> None:
    limits = ErrorLimits(ErrorsTable(max_count=2), 0, 0)
    assert not counted(limits, failed=2).passed
    with pytest.raises(TooManyErrorsError, match=r"3 rows are errors, limit `errors.max_count` 2"):
        counted(limits, failed=1).raise_if_passed()


def test_rows_of_earlier_runs_count_too() -> None:
    assert ErrorLimits(ErrorsTable(), 1000, 501).passed
    assert not ErrorLimits(ErrorsTable(max_rate=1.0), 1000, 1000).passed


def test_a_row_with_samples_in_flight_does_not_count() -> None:
    limits = ErrorLimits(ErrorsTable(max_count=0), 0, 0)
    limits.count(None)
    limits.raise_if_passed()
    assert counted(limits, failed=1).passed
