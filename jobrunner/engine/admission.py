"""Decide whether the KV memory will do for one more sequence. Knows no queue and no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.forecast import Forecast, Slots
from jobrunner.engine.prediction import LengthPredictor
from jobrunner.engine.preemption import Costs, Mode
from jobrunner.engine.sequence import Sequence

# how often what is expected of the running sequences is set right by what came
_CORRECTION_STEPS = 16
# blocks that are left for each that runs: half of them begin one within half a block's steps
_SPARE = 0.5
# whoever joins between two waves leaves between them too, and so does whoever follows: what is
# gained by it comes back so often
_LASTING = 4.0
# of all memory over the mean life of a row: what may be promised at once, and how much more where
# lengths differ by their mean
_BURST, _BURST_SPREAD = 0.25, 1.5
# what is promised over what there is, and how much more at most where memory lies idle
_MORE, _MOST_MORE = 1.1, 4.0
# what was foreseen to run short is forgotten by half in some 140 steps
_BETS_KEPT_A_STEP = 0.995


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

    def next_step(self, running: Seq[Sequence]) -> None:
        """Take note that a step begins."""

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


class Prices:
    """What it is worth to run a sequence for some steps, and what it costs to take it back."""

    def __init__(self, costs: Costs, mode: Mode, block_size: int) -> None:
        self._costs = costs
        self._mode = mode
        self._block_size = block_size

    def worth(self, steps: int, tokens: int, running: int) -> bool:
        """Whether to run a sequence of so many tokens of its own though it is preempted then.

        A step that one more shares is spared by a part: what it takes beyond computing tokens.
        Nothing is, as long as no step without prompts was measured.
        """
        step_s = self._costs.decode_step_s
        if step_s is None:
            return False
        spared_s = max(0.0, step_s / running - self._costs.prefill_s_per_token)
        return steps * spared_s * _LASTING > (tokens + steps) * self._recovery_s()

    def _recovery_s(self) -> float:
        """Seconds for each token."""
        computed_s = self._costs.prefill_s_per_token
        copied_s = 2 * self._costs.copy_s_per_block / self._block_size
        if self._mode == "recompute":
            return computed_s
        return copied_s if self._mode == "swap" else min(computed_s, copied_s)


class Pace:
    """Lets rows of like lengths in one by one, so that they end one by one.

    Rows that start together end together: when the last of them need the memory, nobody else can
    join, and then all of it is empty at once. In the long run the memory serves so many rows as
    their blocks over the steps of their lives fit into its own: no more are let in at a time, but
    for a burst. The more lengths differ, the sooner rows fall out of step by themselves, and the
    more is a burst. Where memory lies idle, more is promised.
    """

    def __init__(self, predictor: LengthPredictor, block_size: int) -> None:
        self._predictor = predictor
        self._block_size = block_size
        # blocks times steps that are promised beyond what there was
        self._promised = 0.0
        self._mean_used: float | None = None

    def allows(self, block_count: int) -> bool:
        """Whether one more may join at this moment."""
        known = self._predictor.usual()
        if known is None:
            return True
        mean, square = known
        spread = math.sqrt(max(0.0, square / mean**2 - 1.0))
        return self._promised < (_BURST + _BURST_SPREAD * spread) * block_count * mean

    def entered(self, tokens: int, shared: int) -> None:
        """Promise a sequence its blocks for as long as rows usually live."""
        known = self._predictor.usual()
        if known is None:
            return
        mean, square = known
        at_first = tokens / self._block_size + 0.5 - shared
        self._promised += at_first * mean + square / (2 * self._block_size)

    def next_step(self, used: float, block_count: int) -> None:
        """Let a step go by with so many blocks in use."""
        known = self._predictor.usual()
        if known is None:
            return
        if self._mean_used is None:
            self._mean_used = float(block_count)
        self._mean_used += (used - self._mean_used) / max(1.0, known[0])
        more = min(_MOST_MORE, block_count / max(1.0, self._mean_used))
        self._promised = max(0.0, self._promised - block_count * _MORE * more)


class AdmissionAhead(Admission):
    """Admits a sequence if the blocks will do for as long as it is expected to run.

    Each is given a length of those that are still possible, not the mean of them: with the means
    all would seem to grow for a long while and none to end. What it foresees may be wrong: then
    sequences are preempted. Where `prices` are known, one joins too that will run short of blocks
    late enough to be worth it; those are not what the reserve learns from. An empty engine always
    admits.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        block_size: int,
        reserve: Reserve,
        prices: Prices | None = None,
    ) -> None:
        self._predictor = predictor
        self._reserve = reserve
        self._prices = prices
        self._pace = Pace(predictor, block_size)
        self._forecast = Forecast(block_size)
        # of each running sequence: prompt length, the bounds of its output, its place among all
        self._known = Slots(4)
        self._until_correction = _CORRECTION_STEPS
        # sequences that joined though blocks will run out
        self._bets = 0.0
        self._block_count = 0

    def fits(self, sequence: Sequence, need: Need, running: int, blocks: Blocks) -> bool:
        self._block_count = blocks.count
        if blocks.free < need.private:
            return False
        if running == 0:
            return True
        if blocks.free < need.private + _SPARE * running:
            return False
        steps = self._forecast.fits_for(
            blocks.used,
            len(sequence.tokens),
            self._predictor.draw_remaining(sequence),
            need.shared,
            blocks.count * (1.0 - self._reserve.share),
        )
        if steps is None:
            return self._pace.allows(blocks.count)
        return self._bet(sequence, need, running, blocks, steps)

    def next_step(self, running: Seq[Sequence]) -> None:
        self._pace.next_step(self._forecast.now, self._block_count)
        self._forecast.next_step()
        self._reserve.next_step()
        self._bets *= _BETS_KEPT_A_STEP
        self._until_correction -= 1
        if self._until_correction == 0:
            self._until_correction = _CORRECTION_STEPS
            self._correct(running)

    def entered(self, sequence: Sequence, shared: int) -> None:
        remaining = self._predictor.draw_remaining(sequence)
        self._known.add(sequence.prompt_length, *sequence.length_bounds, sequence.place)
        self._forecast.enter(len(sequence.tokens), remaining, shared)
        self._pace.entered(len(sequence.tokens), shared)

    def left(self, slot: int) -> None:
        self._known.remove(slot)
        self._forecast.leave(slot)

    def preempted(self) -> None:
        if self._bets >= 1:
            self._bets -= 1
        else:
            self._reserve.preempted()

    def observe(self, sequence: Sequence) -> None:
        self._predictor.observe(sequence)

    def _bet(
        self, sequence: Sequence, need: Need, running: int, blocks: Blocks, steps: int
    ) -> bool:
        """Whether a sequence is worth to join that will be short of blocks after so many steps."""
        if self._prices is None or blocks.free < need.private + running:
            return False
        own_tokens = len(sequence.tokens) - need.shared * blocks.block_size
        worth = self._prices.worth(steps, own_tokens, running)
        self._bets += worth
        return worth

    def _correct(self, running: Seq[Sequence]) -> None:
        tokens = np.fromiter((len(each.tokens) for each in running), np.int64, len(running))
        prompts, least, most, places = (self._known.column(index) for index in range(4))
        lengths = tokens - prompts
        self._predictor.observe_running(lengths)
        remaining = self._predictor.draw_remaining_of_many(lengths, least, most, places)
        self._forecast.correct(tokens, remaining)
