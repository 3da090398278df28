"""When a row comes and how much it matters, from its own columns. Knows nothing of prompts."""

from __future__ import annotations

import math

from jobrunner.config import MOST
from jobrunner.data.prompts.faults import RowFault, shown
from jobrunner.records import Row


def priority_of(row: Row, column: str | None) -> int:
    """The priority of a row, 0 where it sets none. Raises RowFault."""
    value = _number(row, column, "a priority")
    if value is None:
        return 0
    if not value.is_integer() or not 0 <= value <= MOST:
        raise _fault(row, column, f"a priority is a whole number from 0 to {MOST:,}")
    return int(value)


def arrival_of(row: Row, column: str | None) -> float:
    """The seconds after which a row is there, 0 where it says nothing. Raises RowFault."""
    value = _number(row, column, "an arrival")
    if value is None:
        return 0.0
    if value < 0:
        raise _fault(row, column, "an arrival is a number of seconds, at least 0")
    return value


def _number(row: Row, column: str | None, what: str) -> float | None:
    if column is None:
        return None
    # the column of prompts is not among the others
    value = row.others.get(column, row.value)
    if value is None or value == "":
        return None
    try:
        # a file that has only text, as CSV, has numbers as text
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise _fault(row, column, f"{what} is a number")
    return number


def _fault(row: Row, column: str | None, wanted: str) -> RowFault:
    value = row.others.get(column or "", row.value)
    return RowFault("bad_params", f"has {shown(value)} in `{column}`: {wanted}")
