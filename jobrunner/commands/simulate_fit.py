"""Learn from a run's metrics what its steps cost. Knows no scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from jobrunner.console.least_squares import LeastSquares
from jobrunner.errors import ConfigError
from jobrunner.simulate.cost import StepCost

# what the lines of metrics count, and what one of each costs; a fit drops the last ones first
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

Counts = Mapping[str, float]


def fit_cost(path: Path) -> StepCost:
    """Fit what a step costs to the intervals between the lines of a metrics file.

    Seconds of the intervals are explained by their steps, prefill tokens, decodes, tokens of
    context and tokens attended to, no cost below 0. What never happened, or always in the same
    proportion as the rest, costs 0. A swapped block costs what it took on the average. Raises
    ConfigError where the file says too little.
    """
    intervals = list(_intervals(path))
    for kinds in _choices(intervals):
        fit = LeastSquares(len(kinds))
        for counts in intervals:
            # Lines come on a clock: where steps were slow an interval has fewer of them, of all
            # kinds. By the step, what an interval counts does not depend on how fast it went.
            weight = counts["steps"] ** -0.5
            fit.add(tuple(weight * counts[kind] for kind in kinds), weight * _computing_s(counts))
        coefficients = fit.solve()
        if coefficients is not None:
            costs = zip(kinds, coefficients.tolist(), strict=True)
            return StepCost(
                **{_COUNTED[kind]: cost for kind, cost in costs},
                swapped_block_s=_swapped_block_s(intervals),
            )
    raise ConfigError(
        f"`{path}` does not tell what a step costs: {len(intervals):,} intervals with steps",
        hint=_NO_FIT_HINT,
    )


def _computing_s(counts: Counts) -> float:
    return counts[_SECONDS] - counts[_SWAP_SECONDS]


def _swapped_block_s(intervals: Sequence[Counts]) -> float:
    blocks = sum(counts[_SWAPPED] for counts in intervals)
    return sum(counts[_SWAP_SECONDS] for counts in intervals) / blocks if blocks else 0.0


def _choices(intervals: Sequence[Counts]) -> Iterator[tuple[str, ...]]:
    """What may be told apart, most first: with fewer intervals than costs nothing can."""
    happened = [kind for kind in _COUNTED if any(counts[kind] for counts in intervals)]
    for count in range(min(len(happened), len(intervals)), 0, -1):
        yield from combinations(happened, count)


def _intervals(path: Path) -> Iterator[Counts]:
    """What was counted from line to line; a run that went on later counts from 0 again."""
    before = dict.fromkeys(_NAMES, 0.0)
    for number, line in enumerate(_lines(path), 1):
        counts = _counts(path, number, line)
        if counts["steps"] < before["steps"]:
            before = dict.fromkeys(before, 0.0)
        if counts["steps"] > before["steps"]:
            yield {name: counts[name] - before[name] for name in counts}
        before = counts


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the metrics `{path}`: {error.strerror}",
            hint="name the metrics.jsonl of a run with progress.metrics = true",
        ) from error


def _counts(path: Path, number: int, line: str) -> dict[str, float]:
    try:
        said = json.loads(line)
        return {name: float(said[name]) for name in _NAMES}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"line {number:,} of the metrics `{path}` cannot be used: {error!r}", hint=_NO_FIT_HINT
        ) from error
