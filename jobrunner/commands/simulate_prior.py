"""Fit what steps cost, helped by what the machine could do at best. Knows no file.

What the steps tell apart, they decide. What they leave open is as far from the best that the
machine could do as what they tell: a workload of short prompts does not show what attention to
long ones costs, but how much of its rates the machine reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np

from jobrunner.console.least_squares import Vector
from jobrunner.console.machine import MachineLimits

# how far the distances from the best lie apart, as a share of what they are on the average: of
# what tokens cost; and of a step without any, of which the host and launches may be most
_SPREAD = 0.5
_SPREAD_OF_A_STEP = 10.0
# the error of an interval where there are too few of them to tell
_USUAL_ERROR = 0.1
# no error is smaller: below is that of the arithmetic
_LEAST_ERROR = 1e-6


def best_costs(limits: MachineLimits) -> Mapping[str, float]:
    """Seconds that one of each kind that metrics count would take at the rates of the machine.

    A step reads the weights, a token of context is read and attended to, whichever is slower.
    """
    gemm, read = limits.gemm_flops_per_s, limits.read_bytes_per_s
    return {
        "steps": limits.weight_bytes / read,
        "prefill_tokens": limits.flops_per_token / gemm,
        "decode_tokens": (limits.flops_per_token + limits.flops_per_output_token) / gemm,
        "context_tokens": max(limits.kv_bytes_per_token / read, limits.attention_flops / gemm),
        "attended_tokens": limits.attention_flops / gemm,
    }


class Prior:
    """Costs are to be found as multiples of the best ones, `[N]`, the first that of a step.

    They are r_k · best_k with r ≥ 0 and, for a mean e that is found with them, r_k − e of the
    order of `_SPREAD` · e. With errors of the order s, that is the least of
    Σ (error / s)² + Σ ((r_k − e) / (spread_k · e₀))², e₀ being the e found before.
    """

    def __init__(self, best: Vector) -> None:
        self._best = best
        self._spread = np.full(len(best), _SPREAD)
        self._spread[0] = _SPREAD_OF_A_STEP

    def start(self, counted: Vector, seconds: Vector) -> float:
        """A first e: how much longer all took than it might have."""
        return float(seconds.sum() / (counted @ self._best).sum())

    def fit(
        self, counted: Vector, seconds: Vector, weights: Vector, mean: float
    ) -> tuple[Vector, float]:
        """The costs `[N]` and e, from intervals `[I, N]`, their times and weights, and e₀."""
        x_IN = counted * self._best * weights[:, None]
        y_I = seconds * weights
        error = _error(x_IN, y_I)
        tie_N = 1.0 / (self._spread * mean)
        # the last column is e
        rows = np.column_stack([x_IN / error, np.zeros(len(y_I))])
        ties = np.column_stack([np.diag(tie_N), -tie_N])
        wanted = np.concatenate([y_I / error, np.zeros(len(tie_N))])
        found = _not_negative(np.concatenate([rows, ties]), wanted)
        return found[:-1] * self._best, float(found[-1])


def _error(x_IN: Vector, y_I: Vector) -> float:
    """The usual error that the best free fit leaves."""
    found, _, rank, _ = np.linalg.lstsq(x_IN, y_I, rcond=None)
    left = len(y_I) - int(rank)
    if left < 1:
        return _USUAL_ERROR
    return max(_LEAST_ERROR, math.sqrt(float(((y_I - x_IN @ found) ** 2).sum()) / left))


def _not_negative(x_IN: Vector, y_I: Vector) -> Vector:
    """The least squares with no coefficient below 0: of all choices of some, the others 0."""
    # the triangle says all that the rows say
    _, triangle = np.linalg.qr(np.column_stack([x_IN, y_I]))
    x_NN, y_N = triangle[:, :-1], triangle[:, -1]
    columns = x_IN.shape[1]
    best, least = np.zeros(columns), math.inf
    for count in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), count)):
            free = np.linalg.lstsq(x_NN[:, chosen], y_N, rcond=None)[0]
            error = float(((y_N - x_NN[:, chosen] @ free) ** 2).sum())
            if error < least and (free >= 0).all():
                best, least = np.zeros(columns), error
                best[chosen] = free
    return best
