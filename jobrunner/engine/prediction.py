"""Learn how long outputs become while the job runs. Knows no blocks, no queue and no tensors.

What is learnt is the survival S(l) = P(L > l) of the output length L, by the estimator of
Kaplan and Meier: a row that ran into its own limit, or that still runs, tells that it got so far
and nothing of what would have followed. So the short rows that finish first do not deceive.

How long an answer gets often goes with how long the prompt is, if only because both tell of the
task. So there is a survival for each power of two of the prompt length; while few rows of such a
length have been seen it is mostly that of all rows.

A limit is not a guess: rows that may have 100,000 tokens have a few hundred, most of them. Where
nothing is known no row is expected beyond a usual length, or several times of what some row has
come to, whether that one ended or runs.
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
# prompts from 2^(k-1) to 2^k - 1 tokens are of class k, longer ones of the last
_CLASSES = 22
# rows of all lengths that count for those of a class until it has rows enough itself
_BORROWED_ROWS = 16.0
# where nothing is known: tokens that rows are expected to get to at most, while none came near
_USUAL_MOST = 1024
# or so many times what is known
_FURTHER = 16
# the share of rows that is not longer than `longest`
_FEW_ARE_LONGER = 1 - 1 / 32
# tables are made anew for an eighth more rows, at the latest for so many
_MOST_STALE_ROWS = 128


class LengthPredictor:
    """Expects the length E[min(L, most) | L > tokens so far], and some more.

    `margin` is the share of the standard deviation that is added. Where nothing is known a row
    is expected to run into its limit, if that is a usual one.
    """

    def __init__(self, margin: float = 0.1) -> None:
        self._margin = margin
        self._knots = _knots()
        self._knot_list: list[int] = self._knots.tolist()
        shape = _CLASSES, len(self._knots) - 1
        # of each class the rows that ended in each bin, (k_b, k_b+1]; those cut there; those
        # running there now
        self._ended = np.zeros(shape)
        self._cut = np.zeros(shape)
        self._running = np.zeros(shape)
        # no row has been seen beyond so many tokens
        self._known_to = 1
        self._rows = 0.0
        self._stale = 0
        self._expected: dict[tuple[int, int, int], int] = {}
        self._build()

    def expect(self, request: Request) -> int:
        """The final output length of a request, tokens of an earlier run included."""
        return len(request.output) + self._remaining(
            _class(len(request.prompt)), len(request.output), length_bounds(request.sampling)
        )

    def remaining(self, sequence: Sequence) -> int:
        """How many more tokens a sequence will generate; at least one."""
        return self._remaining(
            _class(sequence.prompt_length), sequence.output_length, sequence.length_bounds
        )

    def _remaining_of_many(
        self, classes: Numbers, lengths: Numbers, least: Numbers, most: Numbers
    ) -> Numbers:
        """`remaining` for classes and output lengths with their bounds, all `[n]`."""
        lengths = np.minimum(lengths, most - 1)
        survival, area, moment = self._at(classes, lengths)
        farthest = self._farthest(lengths, most)
        _, area_most, moment_most = self._at(classes, farthest)
        known = survival > 0
        per_row = np.divide(1.0, survival, out=np.zeros_like(survival), where=known)
        area = area_most - area
        mean = area * per_row
        # E[X²] = Σ (2x + 1) P(X > x), with x counted from the tokens so far
        square = (2 * (moment_most - moment) + (1 - 2 * lengths) * area) * per_row
        deviation = np.sqrt(np.maximum(0.0, square - mean**2))
        remaining = np.ceil(mean + self._margin * deviation - 1e-6)
        remaining = np.where(known, remaining, farthest - lengths)
        whole: Numbers = np.clip(remaining, np.maximum(1, least - lengths), most - lengths).astype(
            np.int64
        )
        return whole

    def remaining_of_sequences(self, sequences: Seq[Sequence]) -> Numbers:
        """`remaining` of each sequence, `[n]`."""
        prompts = np.array([sequence.prompt_length for sequence in sequences], np.int64)
        lengths = output_lengths(sequences)
        bounds = np.array([sequence.length_bounds for sequence in sequences], np.int64)
        least, most = bounds.reshape(-1, 2).T
        return self._remaining_of_many(_classes(prompts), lengths, least, most)

    def longest(self, request: Request) -> int:
        """The final output length that one in 32 of such requests gets beyond."""
        prompt_class, length = _class(len(request.prompt)), len(request.output)
        bounds = length_bounds(request.sampling)
        return length + self._drawn(prompt_class, length, bounds, _FEW_ARE_LONGER)

    def draw_remaining(self, sequence: Sequence) -> int:
        """How many more tokens one of the lengths that are still possible would bring.

        Over many rows, whose places are evenly spread, these are distributed as the true ones.
        Beyond what is known every order of magnitude up to the farthest is as likely as another.
        """
        prompt_class, length = _class(sequence.prompt_length), sequence.output_length
        return self._drawn(prompt_class, length, sequence.length_bounds, sequence.place)

    def _drawn(self, prompt_class: int, length: int, bounds: tuple[int, int], place: float) -> int:
        """What remains up to the length that a share of `place` of such rows does not outlive."""
        least, most = bounds
        length = min(length, most - 1)
        ended_by = self._ended_by[prompt_class]
        wanted = self._survival_at(ended_by, length) * (1.0 - place)
        knot = bisect_right(ended_by, -wanted)
        if wanted > 0 and knot < len(ended_by):
            before, after = -ended_by[knot - 1], -ended_by[knot]
            first, last = self._knot_list[knot - 1], self._knot_list[knot]
            total = first + (before - wanted) / (before - after) * (last - first)
        else:
            unknown = -ended_by[-1]
            share = 1.0 - wanted / unknown if unknown else place
            first = min(max(length, self._known_to), most)
            total = first * (min(most, max(_USUAL_MOST, _FURTHER * first)) / first) ** share
        return max(1, least - length, min(math.floor(total) + 1, most) - length)

    def draw_remaining_of_many(
        self, prompts: Numbers, lengths: Numbers, least: Numbers, most: Numbers, places: Numbers
    ) -> Numbers:
        """`draw_remaining` for prompt and output lengths, bounds and places, all `[n]`."""
        classes, lengths = _classes(prompts), np.minimum(lengths, most - 1)
        survival, *_ = self._at(classes, lengths)
        wanted = survival * (1.0 - places)
        knot = self._knots_above(classes, wanted)
        known = (wanted > 0) & (knot < len(self._knots))
        knot = np.clip(knot, 1, len(self._knots) - 1)
        before, after = self._survival[classes, knot - 1], self._survival[classes, knot]
        first, last = self._knots[knot - 1], self._knots[knot]
        share = np.divide(before - wanted, before - after, out=places.copy(), where=known)
        beyond = self._survival[classes, -1]
        share = np.where(known | (beyond == 0), share, 1.0 - wanted / np.where(beyond, beyond, 1.0))
        unknown = np.minimum(np.maximum(lengths, self._known_to), most)
        guess = unknown * (self._farthest(lengths, most) / unknown) ** share
        total = np.where(known, first + share * (last - first), guess)
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
        (self._cut if cut else self._ended)[_class(sequence.prompt_length), self._bin(length)] += 1
        self._rows += 1
        self._stale += 1
        if self._stale >= min(_MOST_STALE_ROWS, max(1, self._rows // 8)):
            self._build()

    def observe_running(self, prompts: Numbers, lengths: Numbers) -> None:
        """Learn how far those have come that run now, in prompt and output tokens `[n]`."""
        begun = lengths > 0
        bins = self._running.shape[1]
        places = np.minimum(np.searchsorted(self._knots, lengths[begun]) - 1, bins - 1)
        cells = _classes(prompts[begun]) * bins + places
        counts = np.bincount(cells, minlength=_CLASSES * bins)
        self._running = counts.reshape(_CLASSES, bins).astype(np.float64)
        if len(places):
            self._known_to = max(self._known_to, int(self._knots[places.max() + 1]))

    def _farthest(self, lengths: Numbers, most: Numbers) -> Numbers:
        """What rows that have come so far get to at most, as long as no row is known that did."""
        further = _FURTHER * np.maximum(lengths, self._known_to)
        farthest: Numbers = np.minimum(most, np.maximum(_USUAL_MOST, further))
        return farthest

    def _remaining(self, prompt_class: int, length: int, bounds: tuple[int, int]) -> int:
        key = (prompt_class, *bounds)
        if length == 0 and key in self._expected:
            return self._expected[key]
        each = (np.array([number]) for number in (prompt_class, length, *bounds))
        remaining = int(self._remaining_of_many(*each)[0])
        if length == 0:
            self._expected[key] = remaining
        return remaining

    def _bin(self, length: int) -> int:
        return min(bisect_left(self._knot_list, length), len(self._knot_list) - 1) - 1

    def _survival_at(self, ended_by: list[float], length: int) -> float:
        """S(l) of a class, linear between the knots."""
        place = bisect_right(self._knot_list, length) - 1
        into = length - self._knot_list[place]
        if into == 0:
            return -ended_by[place]
        width = self._knot_list[place + 1] - self._knot_list[place]
        return -ended_by[place] + (ended_by[place] - ended_by[place + 1]) / width * into

    def _knots_above(self, classes: Numbers, wanted: Numbers) -> Numbers:
        """Of each the first knot that so many do not outlive, `[n]`; one too far if none is."""
        knots = np.zeros(len(wanted), np.int64)
        for each in np.unique(classes):
            of_it = classes == each
            ended_by = -self._survival[each]
            knots[of_it] = np.searchsorted(ended_by, -wanted[of_it], side="right")
        return knots

    def _build(self) -> None:
        if self._rows > _MEMORY_ROWS:
            self._ended *= 0.5
            self._cut *= 0.5
            self._rows *= 0.5
        self._stale = 0
        self._expected.clear()
        beyond = self._cut + self._running
        ended, others = self._ended.sum(axis=0), beyond.sum(axis=0)
        all_rows, reached = _survival(ended, others, 0.0)
        # the rows of all lengths, as many as are borrowed, among those of each class
        borrowed = -_BORROWED_ROWS * np.diff(all_rows)
        self._survival, _ = _survival(
            self._ended + borrowed, beyond, _BORROWED_ROWS * float(all_rows[-1])
        )
        self._known_to = max(1, int(self._knots[np.count_nonzero(reached)]))
        # for single rows lists are faster; searched in rising order
        self._ended_by: list[list[float]] = (-self._survival).tolist()
        slope = np.diff(self._survival) / np.diff(self._knots)
        self._slope = np.pad(slope, ((0, 0), (0, 1)))
        area, moment = self._within(slice(None), slice(None, -1), np.diff(self._knots))
        self._area = np.pad(np.cumsum(area, axis=-1), ((0, 0), (1, 0)))
        self._moment = np.pad(np.cumsum(moment, axis=-1), ((0, 0), (1, 0)))

    def _at(self, classes: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """S(l), Σ S(k) and Σ k S(k) over k < l of a class; S is linear within a bin."""
        lengths = np.minimum(lengths, _LONGEST)
        place = np.searchsorted(self._knots, lengths, side="right") - 1
        into = lengths - self._knots[place]
        area, moment = self._within(classes, place, into)
        survival = self._survival[classes, place] + self._slope[classes, place] * into
        area_before, moment_before = self._area[classes, place], self._moment[classes, place]
        return survival, area_before + area, moment_before + moment

    def _within(
        self, classes: Numbers | slice, place: Numbers | slice, into: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Σ S(k) and Σ k S(k) over the first `into` lengths from the knot at `place`."""
        start, slope = self._survival[classes, place], self._slope[classes, place]
        first = into * (into - 1) / 2  # Σ j
        second = first * (2 * into - 1) / 3  # Σ j²
        area = start * into + slope * first
        return area, self._knots[place] * area + start * first + slope * second


def _survival(ended: Numbers, others: Numbers, more: float) -> tuple[Numbers, Numbers]:
    """S at each knot, and how many reached each bin, from the rows of each bin, `[..., bins]`.

    So many `more` rows get beyond all bins.
    """
    reached = np.cumsum((ended + others)[..., ::-1], axis=-1)[..., ::-1] + more
    ending = np.divide(ended, reached, out=np.zeros_like(reached), where=reached > 0)
    survival = np.cumprod(1.0 - np.minimum(1.0, ending), axis=-1)
    first = np.ones((*survival.shape[:-1], 1))
    return np.concatenate([first, survival], axis=-1), reached


def _class(prompt_length: int) -> int:
    return min(prompt_length.bit_length(), _CLASSES - 1)


def _classes(prompt_lengths: Numbers) -> Numbers:
    """`_class` of each."""
    _, bits = np.frexp(prompt_lengths)
    classes: Numbers = np.minimum(bits, _CLASSES - 1).astype(np.int64)
    return classes


def _knots() -> Numbers:
    knots: list[int] = list(range(_EXACT + 1))
    while knots[-1] < _LONGEST:
        knots.append(int(knots[-1] * _GROWTH) + 1)
    knots[-1] = _LONGEST
    return np.array(knots)


def output_lengths(sequences: Seq[Sequence]) -> Numbers:
    """The tokens that each has generated, `[n]`."""
    return np.array([each.output_length for each in sequences], np.int64)
