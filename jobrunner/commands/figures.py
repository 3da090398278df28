"""Spell numbers for tables. Knows nothing of what they count."""

from __future__ import annotations


def number(value: float | None, digits: int = 3) -> str:
    """A number with at least so many digits that tell something, and commas."""
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{value:.1%}"
