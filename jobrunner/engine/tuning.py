"""Choose the limits of a step by how long steps take. Knows no queue, no device and no clock.

Deterministic: the same steps with the same times lead to the same limits.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from jobrunner.engine.scheduler import Limits
from jobrunner.records import Step

log = logging.getLogger("cbjob")

# no batch grows beyond it by itself
MOST_BATCH_SIZE = 1024

# steps from one decision to the next; each looks at as many
_WINDOW = 64
# the first steps of a process, and of a batch that has just grown, are unlike the later ones
_SETTLING = 16
# tokens/s must grow by so much with each doubling of the batch
_LEAST_GAIN = 1.05
# steps until a doubling that did not pay is tried again; twice as many after each failure
_TRY_AGAIN = 1024
# a batch is full with so much of it running
_FULL = 0.9
# a budget at the knee reaches so much of the best tokens/s: nobody waits for a shorter step, so
# little of the throughput is given for memory and for prompts that share their steps sooner
_KNEE = 0.97
# there, if t = w + a n, twice the tokens are so much faster
_GAIN_AT_KNEE = 2 / (1 + _KNEE)
# a budget changes by a quarter, or not at all
_LEAST_CHANGE = 0.25
# a step counts half as much after so many more
_HALF_LIFE = 256
# a bin that counts for less is forgotten
_LEAST_WEIGHT = 4.0


class Point(NamedTuple):
    """Mean tokens of some steps, and mean seconds of their forward passes."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def knee(points: list[Point]) -> float:
    """Return the fewest tokens that reach 97% of the best measured tokens/s.

    The curve of step time t over tokens n goes straight from point to point. If t = max(w, a n)
    that is 0.97 w/a, where the flat part ends; if t = w + a n, where the fixed part is 3% of a
    step, it is 97/3 w/a.
    """
    wanted = _KNEE * max(point.rate for point in points)
    last = points[0]
    for point in points:
        if point.rate >= wanted:
            return _crossing(last, point, wanted)
        last = point
    raise AssertionError("the best point reaches what is wanted")


def _crossing(low: Point, high: Point, wanted: float) -> float:
    """Where n / t(n) is `wanted` on the straight line between two points."""
    if low.rate >= wanted or low.tokens == high.tokens:
        return low.tokens
    slope = (high.seconds - low.seconds) / (high.tokens - low.tokens)
    fixed_s = low.seconds - slope * low.tokens
    tokens = wanted * fixed_s / (1 - wanted * slope)
    return min(max(tokens, low.tokens), high.tokens)


@dataclass(slots=True)
class _Bin:
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    seen: int = 0


class StepTimes:
    """The curve of step time over tokens: means by powers of two, in which old steps fade."""

    def __init__(self) -> None:
        self._bins: dict[int, _Bin] = {}
        self._steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Take in a forward pass over so many tokens."""
        self._steps += 1
        place = self._bins.setdefault(tokens.bit_length(), _Bin())
        kept = self._fading(place)
        place.weight = kept * place.weight + 1
        place.tokens = kept * place.tokens + tokens
        place.seconds = kept * place.seconds + seconds
        place.seen = self._steps

    def points(self) -> list[Point]:
        """What is known, from few tokens to many."""
        known = [self._bins[key] for key in sorted(self._bins) if self.knows(1 << (key - 1))]
        return [Point(each.tokens / each.weight, each.seconds / each.weight) for each in known]

    def knows(self, tokens: int) -> bool:
        """Whether steps of about so many tokens ran not long ago."""
        place = self._bins.get(tokens.bit_length())
        return place is not None and self._fading(place) * place.weight >= _LEAST_WEIGHT

    def _fading(self, place: _Bin) -> float:
        return float(0.5 ** ((self._steps - place.seen) / _HALF_LIFE))


class TokenBudget:
    """The budget at the knee of the step-time curve, never above the one it starts with.

    The memory beside weights and KV is meant for that one. Never below `least` either, so that
    prompts go on beside the decodes. Where steps use the budget up, twice and half of it are
    tried for a while if it is not known how long such steps take, or not any more.
    """

    def __init__(self, start: int) -> None:
        self.tokens = start
        self._most = start
        self._least = 1
        self._settled = start
        self._times = StepTimes()
        self._steps = 0

    def at_least(self, tokens: int) -> None:
        """Set the least budget, as far as the most allows."""
        self._least = min(self._most, tokens)
        self.tokens = max(self.tokens, self._least)

    def lower(self, most: int) -> None:
        """Stay at so many at most from now on: there is no memory for more."""
        self._most = min(self._most, most)
        self._least = min(self._least, self._most)
        self.tokens = min(self.tokens, self._most)
        self._settled = min(self._settled, self._most)

    def observe(self, step: Step) -> None:
        """Take in a step; decide after so many."""
        self._steps += 1
        if step.forward_s > 0 and self._steps > _SETTLING:
            self._times.add(step.tokens_computed, step.forward_s)
        # what steps need less than the budget for tells nothing about it
        if self._steps % _WINDOW == 0 and self._times.knows(self.tokens):
            self.tokens = self._unknown() or self._settle()

    def _unknown(self) -> int | None:
        """Return the budget to be tried next: twice the present one, or half, if that may do."""
        times, points = self._times, self._times.points()
        twice = min(self._most, 2 * self.tokens)
        if not times.knows(twice) and _still_grows(points, self.tokens):
            return twice
        half = max(self._least, self.tokens // 2)
        return half if not times.knows(half) and knee(points) <= self.tokens else None

    def _settle(self) -> int:
        wanted = math.ceil(knee(self._times.points()))
        wanted = min(self._most, max(self._least, wanted))
        if wanted.bit_length() == self._most.bit_length():
            # the steps of one bin are not told apart
            wanted = self._most
        if not _differs(wanted, self.tokens):
            wanted = self.tokens
        # what is only tried is not worth a line
        if _differs(wanted, self._settled):
            log.info(
                "token budget: %s -> %s, %.0f%% of the best tokens/s",
                f"{self._settled:,}",
                f"{wanted:,}",
                100 * _KNEE,
            )
            self._settled = wanted
        return wanted


def _still_grows(points: list[Point], budget: int) -> bool:
    """Whether steps with such a budget have more tokens/s than the next shorter ones known."""
    upto = [point for point in points if point.tokens <= budget]
    return len(upto) < 2 or upto[-1].rate >= _GAIN_AT_KNEE * upto[-2].rate


def _differs(new: int, old: int) -> bool:
    return abs(new - old) >= _LEAST_CHANGE * old


@dataclass(slots=True)
class _Window:
    """Steps with rows left over, and of those that had a full batch what they did.

    So many full ones at the start do not count.
    """

    settling: int = 0
    steps: int = 0
    full: int = 0
    tokens: int = 0
    seconds: float = 0.0
    preempted: bool = False

    def count(self, step: Step) -> None:
        if self.settling > 0:
            self.settling -= 1
            return
        self.full += 1
        self.tokens += step.tokens_computed - step.tokens_padded - step.tokens_recomputed
        self.seconds += step.step_s
        self.preempted |= step.preemptions > 0


class MaxBatchSize:
    """The batch size that still pays: doubled while that gives more tokens/s, up to `most`.

    Judged by windows of steps with a full batch and rows left over. A doubling that gives less
    than 5% more tokens/s, or that memory does not let fill, is taken back and tried again much
    later: contexts may have changed. It is not tried where twice the KV memory in use is more
    than there is, or while rows are preempted. Never below `start`, and nobody is turned out:
    a batch shrinks as rows end.
    """

    def __init__(self, start: int, most: int) -> None:
        self.size = start
        self._most = most
        self._before: tuple[int, float] | None = None
        self._failures = 0
        self._hold = 0
        self._window = _Window(_SETTLING)

    @property
    def trying(self) -> bool:
        """Whether the size has been doubled and it is not known yet if that pays."""
        return self._before is not None

    def lower(self, most: int) -> None:
        """Stay at so many at most from now on: there is no memory for more."""
        self._most = min(self._most, most)
        if self.size > self._most:
            self.size = self._most
            self._before = None
            self._window = _Window(_SETTLING)

    def observe(self, step: Step) -> None:
        """Take in a step; decide after so many with a full batch."""
        self._hold = max(0, self._hold - 1)
        if step.waiting == 0:
            return
        window = self._window
        window.steps += 1
        if step.running >= _FULL * self.size:
            window.count(step)
            if window.full >= _WINDOW and window.seconds > 0:
                self._decide(window.tokens / window.seconds, step)
        elif self.trying and window.steps >= 16 * _WINDOW:
            self._take_back()

    def _decide(self, rate: float, step: Step) -> None:
        if self._before is not None:
            size, rate_before = self._before
            if rate < _LEAST_GAIN * rate_before:
                self._take_back()
                return
            log.info(
                "max_batch_size: %s -> %s, %.0f -> %.0f tokens/s",
                f"{size:,}",
                f"{self.size:,}",
                rate_before,
                rate,
            )
            self._before, self._failures = None, 0
        wanted = min(self._most, 2 * self.size)
        fits = step.kv_blocks_used * wanted <= step.kv_blocks * self.size
        if wanted > self.size and self._hold == 0 and fits and not self._window.preempted:
            self._before = self.size, rate
            self.size = wanted
        self._window = _Window(_SETTLING if self.trying else 0)

    def _take_back(self) -> None:
        assert self._before is not None, "nothing was tried"
        self.size, _ = self._before
        self._before = None
        self._hold = _TRY_AGAIN << self._failures
        self._failures += 1
        self._window = _Window(_SETTLING)


@dataclass(frozen=True, slots=True)
class Automatic:
    """Which limits are left to the machine; the others stay as they are."""

    max_batch_size: bool = False
    token_budget: bool = False
    chunk_size: bool = False
    lookahead: bool = False


def largest(limits: Limits, automatic: Automatic) -> Limits:
    """What the limits may become; a budget that is left to the machine only falls."""
    if not automatic.max_batch_size:
        return limits
    return replace(limits, max_batch_size=most_batch_size(limits))


def most_batch_size(limits: Limits) -> int:
    """The size that a batch which begins with such limits may grow to by itself."""
    return max(limits.max_batch_size, min(MOST_BATCH_SIZE, limits.token_budget))


class Tuning:
    """Adjusts those limits that are left to the machine to the steps that run."""

    def __init__(self, limits: Limits, automatic: Automatic) -> None:
        self._limits = limits
        self._automatic = automatic
        self._batch = self._budget = None
        if automatic.max_batch_size:
            self._batch = MaxBatchSize(limits.max_batch_size, most_batch_size(limits))
        if automatic.token_budget:
            self._budget = TokenBudget(limits.token_budget)

    def lower(self, limits: Limits) -> None:
        """Go on from lower limits, and never above them again: there is no memory for more."""
        self._limits = limits
        if self._batch is not None:
            self._batch.lower(limits.max_batch_size)
        if self._budget is not None:
            self._budget.lower(limits.token_budget)

    def observe(self, step: Step) -> Limits | None:
        """Take in a step; return the new limits if they change."""
        if step.idle:
            return None
        size, budget = self._limits.max_batch_size, self._limits.token_budget
        if self._batch is not None:
            self._batch.observe(step)
            size = self._batch.size
        if self._budget is not None:
            # a token for each slot, and as many for prompts
            self._budget.at_least(2 * size)
            # one thing at a time: a batch that is tried is compared with the one before
            if self._batch is None or not self._batch.trying:
                self._budget.observe(step)
            budget = self._budget.tokens
        return self._changed(size, budget)

    def _changed(self, size: int, budget: int) -> Limits | None:
        limits = self._limits
        if (size, budget) == (limits.max_batch_size, limits.token_budget):
            return None
        self._limits = replace(
            limits,
            max_batch_size=size,
            token_budget=budget,
            chunk_size=budget if self._automatic.chunk_size else limits.chunk_size,
            lookahead=4 * size if self._automatic.lookahead else limits.lookahead,
        )
        return self._limits
