"""Spell numbers for tables. Knows neither who ran nor how."""

from __future__ import annotations

from collections.abc import Sequence

from jobrunner.console.snapshot import BandLatency, Snapshot


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


def latency_lines(snapshots: Sequence[Snapshot]) -> dict[str, list[str]]:
    """Row latencies by priority: a label and a number for each snapshot; empty with one band."""
    found = [{each.priority: each for each in snap.latency_by_priority} for snap in snapshots]
    return {
        f"of priority {priority}, {percentile} s": [
            number(_at(bands.get(priority), percentile)) for bands in found
        ]
        for priority in sorted(set().union(*found))
        for percentile in ("p50", "p95", "p99")
    }


def _at(band: BandLatency | None, percentile: str) -> float | None:
    return None if band is None else getattr(band, f"{percentile}_s")
