"""Decide whether the KV memory will do for one more sequence. Knows no queue and no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.forecast import Forecast, Slots
from jobrunner.engine.pace import Pace
from jobrunner.engine.prediction import LengthPredictor
from jobrunner.engine.sequence import Sequence

Numbers = np.ndarray

# how often what is expected of the running sequences is set right by what came
_CORRECTION_STEPS = 16


@dataclass(frozen=True, slots=True)
class Need:
    """Blocks that a sequence needs to join: `private` ones to be taken, all of them free now,
    beside `shared` ones that others hold as well."""

    private: int
    shared: int = 0


class Admission:
    """Admits a sequence whose known tokens fit, leaving a block for each that already runs."""

    def fits(self, sequence: Sequence, need: Need, running: int, blocks: Blocks) -> bool:
        """Tell whether a sequence may join so many that run."""
        return blocks.free >= need.private + running

    def next_step(self, lengths: Callable[[], Numbers]) -> None:
        """Take note that a step begins; `lengths` are the tokens of those who run, by slot."""

    def entered(self, sequence: Sequence, shared: int) -> None:
        """Take note of a sequence that got the next slot, and of the blocks it shares."""

    def left(self, slot: int) -> None:
        """Take note of a slot that was left; the sequence in the last one moves into it."""

    def preempted(self) -> None:
        """Take note that blocks ran out."""

    def observe(self, sequence: Sequence) -> None:
        """Take note of a sequence that ended by itself or by its limit."""


class Reserve:
    """The share of all blocks that admission leaves free: a fixed one, or one that learns.

    Under "auto" it grows with each preemption and shrinks by and by while there is none.
    """

    _LEAST, _MOST, _MORE = 0.005, 0.25, 0.001
    # half of what was added is gone after some 500 steps
    _KEPT_A_STEP = 0.5 ** (1 / 500)

    def __init__(self, share: float | Literal["auto"] = "auto") -> None:
        self._learns = share == "auto"
        self.share = self._LEAST if share == "auto" else share

    def preempted(self) -> None:
        if self._learns:
            self.share = min(self._MOST, self.share + self._MORE)

    def next_step(self) -> None:
        if self._learns:
            self.share = self._LEAST + (self.share - self._LEAST) * self._KEPT_A_STEP


class AdmissionAhead(Admission):
    """Admits a sequence if the blocks will do for as long as it is expected to run.

    Each is given a length of those that are still possible, not the mean of them: with the means
    all would seem to grow for a long while and none to end. What it foresees may be wrong: then
    sequences are preempted. An empty engine always admits.
    """

    def __init__(
        self, predictor: LengthPredictor, block_size: int, reserve: Reserve, pace: Pace
    ) -> None:
        self._predictor = predictor
        self._reserve = reserve
        self._pace = pace
        self._forecast = Forecast(block_size)
        # of each running sequence: prompt length, the bounds of its output, its place among all
        self._known = Slots(4)
        self._until_correction = _CORRECTION_STEPS
        # what was drawn for whom fits, and is about to enter
        self._drawn: tuple[Sequence, int] | None = None

    def fits(self, sequence: Sequence, need: Need, running: int, blocks: Blocks) -> bool:
        # a block for each that runs, as without any foresight
        if not super().fits(sequence, need, running, blocks):
            return False
        if running == 0:
            return True
        if not self._pace.may_start:
            return False
        remaining = self._predictor.draw_remaining(sequence)
        self._drawn = sequence, remaining
        peak = self._forecast.peak(blocks.used, sequence.length, remaining, need.shared)
        return peak <= blocks.count * (1.0 - self._reserve.share)

    def next_step(self, lengths: Callable[[], Numbers]) -> None:
        self._pace.next_step()
        self._forecast.next_step()
        self._reserve.next_step()
        self._until_correction -= 1
        if self._until_correction == 0:
            self._until_correction = _CORRECTION_STEPS
            self._correct(lengths())

    def entered(self, sequence: Sequence, shared: int) -> None:
        drawn, self._drawn = self._drawn, None
        if drawn is not None and drawn[0] is sequence:
            remaining = drawn[1]
        else:
            remaining = self._predictor.draw_remaining(sequence)
        self._known.add(sequence.prompt_length, *sequence.length_bounds, sequence.place)
        self._forecast.enter(sequence.length, remaining, shared)
        self._pace.started()

    def left(self, slot: int) -> None:
        self._known.remove(slot)
        self._forecast.leave(slot)

    def preempted(self) -> None:
        self._reserve.preempted()

    def observe(self, sequence: Sequence) -> None:
        self._predictor.observe(sequence)
        self._pace.observe(sequence.prompt_length, sequence.output_length)

    def _correct(self, tokens: Numbers) -> None:
        prompts, least, most, places = (self._known.column(index) for index in range(4))
        lengths = tokens - prompts
        self._predictor.observe_running(prompts, lengths)
        remaining = self._predictor.draw_remaining_of_many(prompts, lengths, least, most, places)
        self._forecast.correct(tokens, remaining)
