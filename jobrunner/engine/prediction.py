"""Learn how long outputs become while the job runs. Knows no blocks, no queue and no tensors.

What is learnt is the survival S(l) = P(L > l) of the output length L, by the estimator of
Kaplan and Meier: a row that ran into its own limit, or that still runs, tells that it got so far
and nothing of what would have followed. So the short rows that finish first do not deceive.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq

import numpy as np

from jobrunner.engine.sequence import Sequence, length_bounds
from jobrunner.records import Request

Numbers = np.ndarray

# lengths up to here have a bin each; those above share bins that grow by this factor
_EXACT = 128
_GROWTH = 1.06
_LONGEST = 1 << 21
# older rows count half when so many more have come: lengths may change within a job
_MEMORY_ROWS = 8192
# tables are made anew for an eighth more rows, at the latest for so many
_MOST_STALE_ROWS = 128


class LengthPredictor:
    """Expects the length E[min(L, most) | L > tokens so far], and some more.

    `margin` is the share of the standard deviation that is added. Where nothing is known a row
    is expected to run into its limit.
    """

    def __init__(self, margin: float = 0.1) -> None:
        self._margin = margin
        self._knots = _knots()
        self._knot_list: list[int] = self._knots.tolist()
        bins = len(self._knots) - 1
        # rows that ended in each bin, (k_b, k_b+1]; those cut there; those running there now
        self._ended = np.zeros(bins)
        self._cut = np.zeros(bins)
        self._running = np.zeros(bins)
        self._rows = 0.0
        self._stale = 0
        self._expected: dict[tuple[int, int], int] = {}
        self._build()

    def expect(self, request: Request) -> int:
        """The final output length of a request, tokens of an earlier run included."""
        return len(request.output) + self._remaining(
            len(request.output), length_bounds(request.sampling)
        )

    def remaining(self, sequence: Sequence) -> int:
        """How many more tokens a sequence will generate; at least one."""
        return self._remaining(sequence.output_length, sequence.length_bounds)

    def remaining_of_many(self, lengths: Numbers, least: Numbers, most: Numbers) -> Numbers:
        """`remaining` for output lengths with their bounds, all `[n]`."""
        lengths = np.minimum(lengths, most - 1)
        survival, area, moment = self._at(lengths)
        _, area_most, moment_most = self._at(most)
        known = survival > 0
        per_row = np.divide(1.0, survival, out=np.zeros_like(survival), where=known)
        area = area_most - area
        mean = area * per_row
        # E[X²] = Σ (2x + 1) P(X > x), with x counted from the tokens so far
        square = (2 * (moment_most - moment) + (1 - 2 * lengths) * area) * per_row
        deviation = np.sqrt(np.maximum(0.0, square - mean**2))
        remaining = np.ceil(mean + self._margin * deviation - 1e-6)
        remaining = np.where(known, remaining, most)
        return np.clip(remaining, np.maximum(1, least - lengths), most - lengths).astype(np.int64)

    def remaining_of_sequences(self, sequences: Seq[Sequence]) -> Numbers:
        """`remaining` of each sequence, `[n]`."""
        lengths = output_lengths(sequences)
        bounds = np.array([sequence.length_bounds for sequence in sequences], np.int64)
        least, most = bounds.reshape(-1, 2).T
        return self.remaining_of_many(lengths, least, most)

    def draw_remaining(self, sequence: Sequence) -> int:
        """How many more tokens one of the lengths that are still possible would bring.

        Over many rows, whose places are evenly spread, these are distributed as the true ones.
        Beyond what is known every order of magnitude up to the limit is as likely as another.
        """
        least, most = sequence.length_bounds
        length = min(sequence.output_length, most - 1)
        wanted = self._survival_at(length) * (1.0 - sequence.place)
        knot = bisect_right(self._ended_by, -wanted)
        if wanted > 0 and knot < len(self._ended_by):
            before, after = -self._ended_by[knot - 1], -self._ended_by[knot]
            first, last = self._knot_list[knot - 1], self._knot_list[knot]
            total = first + (before - wanted) / (before - after) * (last - first)
        else:
            share = 1.0 - wanted / self._unknown if self._unknown else sequence.place
            first = min(max(length, self._known_to), most)
            total = first * (most / first) ** share
        return max(1, least - length, min(math.floor(total) + 1, most) - length)

    def draw_remaining_of_many(
        self, lengths: Numbers, least: Numbers, most: Numbers, places: Numbers
    ) -> Numbers:
        """`draw_remaining` for output lengths with their bounds and places, all `[n]`."""
        lengths = np.minimum(lengths, most - 1)
        wanted = np.interp(lengths, self._knots, self._survival) * (1.0 - places)
        knot = np.searchsorted(-self._survival, -wanted, side="right")
        known = (wanted > 0) & (knot < len(self._knots))
        knot = np.clip(knot, 1, len(self._knots) - 1)
        before, after = self._survival[knot - 1], self._survival[knot]
        first, last = self._knots[knot - 1], self._knots[knot]
        share = np.divide(before - wanted, before - after, out=places.copy(), where=known)
        if self._unknown:
            share = np.where(known, share, 1.0 - wanted / self._unknown)
        unknown = np.minimum(np.maximum(lengths, self._known_to), most)
        total = np.where(known, first + share * (last - first), unknown * (most / unknown) ** share)
        left = np.clip(
            np.floor(total) + 1 - lengths, np.maximum(1, least - lengths), most - lengths
        )
        whole: Numbers = left.astype(np.int64)
        return whole

    def observe(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended, by itself or by its limit."""
        length = sequence.output_length
        if length < 1:
            return
        cut = length >= sequence.request.sampling.max_new_tokens
        (self._cut if cut else self._ended)[self._bin(length)] += 1
        self._rows += 1
        self._stale += 1
        if self._stale >= min(_MOST_STALE_ROWS, max(1, self._rows // 8)):
            self._build()

    def observe_running(self, lengths: Numbers) -> None:
        """Learn how far those have come that run now, in output tokens `[n]`."""
        places = np.searchsorted(self._knots, lengths[lengths > 0]) - 1
        bins = len(self._running)
        counts = np.bincount(np.minimum(places, bins - 1), minlength=bins)
        self._running = counts.astype(np.float64)

    def _remaining(self, length: int, bounds: tuple[int, int]) -> int:
        if length == 0 and bounds in self._expected:
            return self._expected[bounds]
        least, most = (np.array([bound]) for bound in bounds)
        remaining = int(self.remaining_of_many(np.array([length]), least, most)[0])
        if length == 0:
            self._expected[bounds] = remaining
        return remaining

    def _bin(self, length: int) -> int:
        return min(bisect_left(self._knot_list, length), len(self._ended)) - 1

    def _survival_at(self, length: int) -> float:
        place = bisect_right(self._knot_list, length) - 1
        into = length - self._knot_list[place]
        return -self._ended_by[place] + self._slope_list[place] * into

    def _build(self) -> None:
        if self._rows > _MEMORY_ROWS:
            self._ended *= 0.5
            self._cut *= 0.5
            self._rows *= 0.5
        self._stale = 0
        self._expected.clear()
        reached = np.cumsum((self._ended + self._cut + self._running)[::-1])[::-1]
        ending = np.divide(self._ended, reached, out=np.zeros_like(reached), where=reached > 0)
        self._survival = np.concatenate([[1.0], np.cumprod(1.0 - ending)])
        # the share of rows of which only is known that they get beyond here
        self._unknown = float(self._survival[-1])
        self._known_to = max(1, int(self._knots[np.count_nonzero(reached)]))
        # for single rows lists are faster; searched in rising order
        self._ended_by: list[float] = (-self._survival).tolist()
        self._slope = np.diff(self._survival) / np.diff(self._knots)
        self._slope = np.append(self._slope, 0.0)
        self._slope_list: list[float] = self._slope.tolist()
        area, moment = self._within(slice(None, -1), np.diff(self._knots))
        self._area = np.concatenate([[0.0], np.cumsum(area)])
        self._moment = np.concatenate([[0.0], np.cumsum(moment)])

    def _at(self, lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """S(l), Σ S(k) and Σ k S(k) over k < l; S is linear within a bin."""
        lengths = np.minimum(lengths, _LONGEST)
        place = np.searchsorted(self._knots, lengths, side="right") - 1
        into = lengths - self._knots[place]
        area, moment = self._within(place, into)
        survival = self._survival[place] + self._slope[place] * into
        return survival, self._area[place] + area, self._moment[place] + moment

    def _within(self, place: Numbers | slice, into: Numbers) -> tuple[Numbers, Numbers]:
        """Σ S(k) and Σ k S(k) over the first `into` lengths from the knot at `place`."""
        start, slope = self._survival[place], self._slope[place]
        first = into * (into - 1) / 2  # Σ j
        second = first * (2 * into - 1) / 3  # Σ j²
        area = start * into + slope * first
        return area, self._knots[place] * area + start * first + slope * second


def _knots() -> Numbers:
    knots: list[int] = list(range(_EXACT + 1))
    while knots[-1] < _LONGEST:
        knots.append(int(knots[-1] * _GROWTH) + 1)
    knots[-1] = _LONGEST
    return np.array(knots)


def output_lengths(sequences: Seq[Sequence]) -> Numbers:
    """The tokens that each has generated, `[n]`."""
    return np.array([each.output_length for each in sequences], np.int64)
