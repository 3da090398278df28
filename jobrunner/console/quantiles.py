"""Percentiles of durations in bounded memory. Knows nothing of rows or steps."""

from __future__ import annotations

import math
from collections import Counter

FLOOR_S = 1e-4  # shorter durations are not told apart
CEILING_S = 1e7
GROWTH = 1.05  # a bucket ends 5% above where it begins: the relative error of a percentile


class Quantiles:
    """A histogram with log-spaced buckets: at most some 520 of them, however many durations.

    Bucket k > 0 holds durations in (FLOOR_S · GROWTH^(k-1), FLOOR_S · GROWTH^k], bucket 0 those
    up to FLOOR_S.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._sum_s = 0.0
        self._largest_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._buckets[_bucket(seconds)] += 1
        self._count += 1
        self._sum_s += seconds
        self._largest_s = max(self._largest_s, seconds)

    @property
    def count(self) -> int:
        return self._count

    def mean(self) -> float | None:
        """The exact mean, None without durations."""
        return self._sum_s / self._count if self._count else None

    def at(self, fraction: float) -> float | None:
        """The duration that `fraction` of all do not exceed, None without durations.

        Nearest rank, rounded up to the end of its bucket: never too low, at most 5% (or
        FLOOR_S) too high.
        """
        rank = max(1, math.ceil(fraction * self._count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(FLOOR_S * GROWTH**bucket, self._largest_s)
        return None


def _bucket(seconds: float) -> int:
    if seconds <= FLOOR_S:
        return 0
    return math.ceil(math.log(min(seconds, CEILING_S) / FLOOR_S, GROWTH))
