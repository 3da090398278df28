"""Learn from a run's metrics what its steps cost. Knows no scheduler."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner.commands.simulate_prior import Prior, best_costs
from jobrunner.console.least_squares import LeastSquares, Vector
from jobrunner.console.machine import MachineLimits
from jobrunner.errors import ConfigError
from jobrunner.simulate.cost import StepCost

# what the lines of metrics count, and what one of each costs
_COUNTED = {
    "steps": "step_s",
    "prefill_tokens": "prefill_token_s",
    "decode_tokens": "decode_s",
    "context_tokens": "context_token_s",
    "attended_tokens": "attended_token_s",
}
_SECONDS, _SWAP_SECONDS, _SWAPPED = "busy_s", "swap_s", "swapped_blocks"
_NAMES = (*_COUNTED, _SECONDS, _SWAP_SECONDS, _SWAPPED)
_NO_FIT_HINT = "run the job with progress.metrics = true and a shorter progress.every"

# of the fit: weights settle within so many rounds, no interval counts for less than such a share of
# the longest, errors below those are of arithmetic
_ROUNDS = 8
_EXACT = 1e-12
_TINY = 1e-12
_LEAST_SHARE = 1e-3

Counts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a step costs, and in words where what the steps do not tell comes from."""

    cost: StepCost
    words: str


def fit_cost(path: Path) -> Fitted:
    """Fit what a step costs to the intervals between the lines of a metrics file.

    Seconds of the intervals are explained by their steps, prefill tokens, decodes, tokens of
    context and tokens attended to, no cost below 0. What they do not tell (a workload of short
    prompts does not show what long ones cost) is as far from the best that the machine could do
    as what they tell. Where the file does not say what the machine could do, it costs 0. A
    swapped block costs what it took on the average. Raises ConfigError where the file says too
    little.
    """
    lines = list(_lines(path))
    intervals = list(_intervals(lines))
    limits = next((line.machine for line in reversed(lines) if line.machine is not None), None)
    seconds = np.array([_computing_s(counts) for counts in intervals])
    if limits is not None and seconds.sum() > 0:
        kinds, costs = _fit_towards(limits, intervals, seconds)
        words = "what they leave open costs as much more than at the machine's rates as the rest"
    else:
        kinds, costs = _fit_alone(path, intervals, seconds)
        words = "they say nothing of the machine, so that what they leave open costs 0"
    return Fitted(
        StepCost(
            **{_COUNTED[kind]: cost for kind, cost in zip(kinds, costs.tolist(), strict=True)},
            swapped_block_s=_swapped_block_s(intervals),
        ),
        words,
    )


def _fit_towards(
    limits: MachineLimits, intervals: Sequence[Counts], seconds: Vector
) -> tuple[Sequence[str], Vector]:
    """The cost of every kind, see Prior; weights and scale are as in `_fit_some`."""
    best = best_costs(limits)
    kinds = list(_COUNTED)
    counted = _counted(kinds, intervals)
    prior = Prior(np.array([best[kind] for kind in kinds]))
    expected, mean = seconds, prior.start(counted, seconds)
    costs = np.zeros(len(kinds))
    for _ in range(_ROUNDS):
        costs, mean = prior.fit(counted, seconds, np.sqrt(_weights(expected)), mean)
        expected = counted @ costs
        scale = seconds.sum() / expected.sum()
        costs, mean, expected = scale * costs, scale * mean, scale * expected
    return kinds, costs


def _fit_alone(
    path: Path, intervals: Sequence[Counts], seconds: Vector
) -> tuple[Sequence[str], Vector]:
    """The costs of the kinds that there were, as far as the intervals tell them."""
    kinds = [kind for kind in _COUNTED if any(counts[kind] for counts in intervals)]
    costs = _fit(_counted(kinds, intervals), seconds) if intervals else None
    if costs is None:
        raise ConfigError(
            f"`{path}` does not tell what a step costs: {len(intervals):,} intervals with steps",
            hint=_NO_FIT_HINT,
        )
    return kinds, costs


def _counted(kinds: Sequence[str], intervals: Sequence[Counts]) -> Vector:
    return np.array([[counts[kind] for kind in kinds] for counts in intervals])


def _fit(counted: Vector, seconds: Vector) -> Vector | None:
    """The cost of each column, None if nothing can be told.

    Of all choices of columns the one with the least n ln(error) + columns ln(n) (Schwarz), the
    error being weighted by what the fullest of them makes of the intervals.
    """
    found = [each for chosen in _choices(counted) if (each := _fit_some(chosen, counted, seconds))]
    if not found:
        return None
    intervals, _ = counted.shape
    fullest = max(found, key=lambda each: each.columns)
    weights = _weights(counted @ fullest.costs)
    # below this there is nothing left to explain
    least = _EXACT * float(weights @ seconds**2)

    def criterion(fit: _Fit) -> float:
        error = max(least, _TINY, float(weights @ (seconds - counted @ fit.costs) ** 2))
        return float(intervals * math.log(error) + fit.columns * math.log(intervals))

    return min(found, key=criterion).costs


@dataclass(frozen=True, slots=True)
class _Fit:
    """What each column costs, and how many of them were left to find."""

    costs: Vector
    columns: int


def _fit_some(chosen: Sequence[int], counted: Vector, seconds: Vector) -> _Fit | None:
    """Fit some columns, the others cost nothing; None while the intervals leave them open.

    A machine that is busy with something else makes steps slower by a factor, so errors count by
    what an interval should take. Lines come on a clock: a slow interval has fewer steps, of all
    kinds, and counting seconds instead would take that for cheap steps. In the end all costs
    are scaled so that they tell the time that all intervals took together.
    """
    costs = np.zeros(counted.shape[1])
    expected = seconds
    for _ in range(_ROUNDS):
        weights = np.sqrt(_weights(expected))
        fit = LeastSquares(len(chosen))
        for row, weight, took_s in zip(counted[:, chosen], weights, seconds, strict=True):
            fit.add(tuple(weight * row), weight * took_s)
        coefficients = fit.solve()
        if coefficients is None:
            return None
        costs[list(chosen)] = coefficients
        expected = counted @ costs
        if not expected.any():
            break
        costs *= seconds.sum() / expected.sum()
    return _Fit(costs, len(chosen))


def _weights(expected_s: Vector) -> Vector:
    """1 / seconds², so that errors are relative."""
    least_s = max(_TINY, _LEAST_SHARE * float(expected_s.max()))
    return np.maximum(expected_s, least_s) ** -2.0


def _choices(counted: Vector) -> Iterator[tuple[int, ...]]:
    """The columns that may be told apart: with fewer intervals than costs nothing can."""
    intervals, columns = counted.shape
    for count in range(1, min(columns, intervals) + 1):
        yield from combinations(range(columns), count)


def _computing_s(counts: Counts) -> float:
    return counts[_SECONDS] - counts[_SWAP_SECONDS]


def _swapped_block_s(intervals: Sequence[Counts]) -> float:
    blocks = sum(counts[_SWAPPED] for counts in intervals)
    return sum(counts[_SWAP_SECONDS] for counts in intervals) / blocks if blocks else 0.0


@dataclass(frozen=True, slots=True)
class _Line:
    """What a line of metrics has counted, and what it says of the machine, if it does."""

    counts: Counts
    machine: MachineLimits | None


def _intervals(lines: Sequence[_Line]) -> Iterator[Counts]:
    """What was counted from line to line; a run that went on later counts from 0 again."""
    before: Counts = dict.fromkeys(_NAMES, 0.0)
    for counts in (line.counts for line in lines):
        if counts["steps"] < before["steps"]:
            before = dict.fromkeys(before, 0.0)
        if counts["steps"] > before["steps"]:
            yield {name: counts[name] - before[name] for name in counts}
        before = counts


def _lines(path: Path) -> Iterator[_Line]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the metrics `{path}`: {error.strerror}",
            hint="name the metrics.jsonl of a run with progress.metrics = true",
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            yield _line(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"line {number:,} of the metrics `{path}` cannot be used: {error!r}",
                hint=_NO_FIT_HINT,
            ) from error


def _line(said: Mapping[str, Any]) -> _Line:
    counts = {name: float(said[name]) for name in _NAMES}
    machine = said.get("machine")
    return _Line(counts, None if machine is None else _machine(machine))


def _machine(said: Mapping[str, Any]) -> MachineLimits:
    """What the machine gives; only with numbers above 0 does a cost follow from them."""
    numbers = {each.name: float(said[each.name]) for each in fields(MachineLimits)}
    if not all(0 < number < math.inf for number in numbers.values()):
        raise ValueError(f"machine: {numbers}")
    return MachineLimits(**numbers)
