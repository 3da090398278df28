"""Fit a line to points in bounded memory, no coefficient below 0. Knows nothing of steps."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

# below this (of 1 for regressors at right angles) noise decides the coefficients, not the data
_LEAST_DETERMINANT = 1e-6

Vector = NDArray[np.float64]


class LeastSquares:
    """Least squares of y = c · x with c ≥ 0, kept as running normal equations.

    x has `size` entries; a constant is an entry that is always 1.
    """

    def __init__(self, size: int) -> None:
        self._gram = np.zeros((size, size))
        self._moments = np.zeros(size)

    def add(self, x: tuple[float, ...], y: float) -> None:
        """Take one point in."""
        row = np.array(x, dtype=np.float64)
        self._gram += np.outer(row, row)
        self._moments += row * y

    def solve(self) -> Vector | None:
        """The coefficients, None while the points leave them open.

        The least error with c ≥ 0 is a free least error over some of the entries, the others
        being 0; there are so few of them that all choices are tried.
        """
        scale = np.sqrt(np.diag(self._gram))
        if not scale.all():
            return None
        gram = self._gram / np.outer(scale, scale)
        if np.linalg.det(gram) < _LEAST_DETERMINANT:
            return None
        moments = self._moments / scale
        return min(_candidates(gram, moments), key=lambda c: _error(c, gram, moments)) / scale


def _candidates(gram: Vector, moments: Vector) -> list[Vector]:
    found = [np.zeros(len(moments))]
    for count in range(1, len(moments) + 1):
        for chosen in map(list, combinations(range(len(moments)), count)):
            free = np.linalg.solve(gram[np.ix_(chosen, chosen)], moments[chosen])
            if (free >= 0).all():
                found.append(np.zeros(len(moments)))
                found[-1][chosen] = free
    return found


def _error(coefficients: Vector, gram: Vector, moments: Vector) -> float:
    """The sum of squared errors, less Σ y², which is the same for all."""
    return float(coefficients @ gram @ coefficients - 2 * coefficients @ moments)
