"""Decide who gives back its blocks when they run out, and how. Knows no queue and no tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.prediction import LengthPredictor
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.swap import HostBlocks

Mode = Literal["auto", "swap", "recompute"]

# a row that was preempted so often is only chosen where nobody else is left
MOST_PREEMPTIONS = 8
# costs closer than this are equal
_EQUAL = 1 + 1e-9
# weight of the newest measurement
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class Held:
    """What a running sequence holds: blocks of its own, tokens computed in them, and blocks
    that others hold as well."""

    private_blocks: int
    private_tokens: int
    shared_blocks: int


def held_by(sequence: Sequence, blocks: Blocks) -> Held:
    """Count what a sequence holds. Those who share blocks share the beginning of their tokens."""
    shared = 0
    while shared < len(sequence.blocks) and blocks.holders(sequence.blocks[shared]) > 1:
        shared += 1
    tokens = max(0, sequence.computed - shared * blocks.block_size)
    return Held(len(sequence.blocks) - shared, tokens, shared)


class Costs:
    """Seconds to copy a block between device and host, and to compute a token again.

    Starts with what a device of this kind may need and learns from each step.
    """

    def __init__(self, copy_s_per_block: float = 1e-4, prefill_s_per_token: float = 1e-4) -> None:
        self.copy_s_per_block = copy_s_per_block
        self.prefill_s_per_token = prefill_s_per_token
        self._decode_step_s: float | None = None
        self._prefilled = self._copied = False

    def observe(
        self, copied_blocks: int, copy_s: float, prefill_tokens: int, compute_s: float
    ) -> None:
        """Learn from a step: what it copied and prefilled, and how long either took.

        What a step without prompts takes is taken off those with prompts.
        """
        if copied_blocks and copy_s > 0:
            known_s = self.copy_s_per_block if self._copied else None
            self.copy_s_per_block = _mixed(known_s, copy_s / copied_blocks)
            self._copied = True
        if prefill_tokens == 0 and compute_s > 0:
            self._decode_step_s = _mixed(self._decode_step_s, compute_s)
        elif compute_s > 0:
            more_s = max(0.0, compute_s - (self._decode_step_s or 0.0))
            known_s = self.prefill_s_per_token if self._prefilled else None
            self.prefill_s_per_token = _mixed(known_s, more_s / prefill_tokens)
            self._prefilled = True


class Preemption:
    """Chooses victims, and whether their blocks are swapped to host memory or computed again.

    The victim is the sequence that costs least to recover for each block it frees, counted over
    what it holds alone; of equal ones the one with most work left, then the one that shares
    least, then the newest. A lower band goes first, and none of `protected` bands while there is
    another way to go on: then the newest of them goes. Whoever was preempted often goes last.
    Whom the starvation limit has `lifted` over all bands gives way to none of them.
    """

    def __init__(
        self,
        mode: Mode = "recompute",
        host: HostBlocks | None = None,
        *,
        costs: Costs | None = None,
        predictor: LengthPredictor | None = None,
        protected: Collection[int] = (),
        lifted: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> None:
        self.host = host or HostBlocks()
        self.costs = costs or Costs()
        self._mode = mode
        self._predictor = predictor
        self._protected = frozenset(protected)
        self._lifted = lifted

    def choose(self, running: Seq[Sequence], blocks: Blocks) -> Sequence:
        """Return who gives back its blocks so that the others can go on."""
        free_to_go = [sequence for sequence in running if not self._is_protected(sequence)]
        if not free_to_go:
            return max(running, key=lambda sequence: sequence.admission)
        fresh = [sequence for sequence in free_to_go if not _worn(sequence)]
        return self.cheapest(fresh or free_to_go, blocks)

    def below(self, candidate: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        """Those of lower bands than a candidate's that may be preempted for it."""
        band = candidate.request.priority
        return [
            sequence
            for sequence in running
            if sequence.request.priority > band
            and not self._is_protected(sequence)
            and not _worn(sequence)
            and not self._lifted(sequence)
        ]

    def swaps(self, sequence: Sequence, blocks: Blocks) -> bool:
        """Whether the blocks of a victim go to host memory."""
        needed = blocks.needed(sequence.computed)
        if self._mode == "recompute" or not 0 < needed <= self.host.free:
            return False
        if self._mode == "swap":
            return True
        held = held_by(sequence, blocks)
        return self._swap_s(held, blocks) <= self._recompute_s(held)

    def _is_protected(self, sequence: Sequence) -> bool:
        return sequence.request.priority in self._protected

    def cheapest(self, sequences: Seq[Sequence], blocks: Blocks) -> Sequence:
        """Return the victim of these, whatever their bands may do."""
        lowest = max(sequence.request.priority for sequence in sequences)
        band = [sequence for sequence in sequences if sequence.request.priority == lowest]
        held = [held_by(sequence, blocks) for sequence in band]
        costs = [self._cost_per_block(each, blocks) for each in held]
        most = min(costs) * _EQUAL
        cheapest = [place for place, cost in enumerate(costs) if cost <= most]
        left = self._work_left([band[place] for place in cheapest])
        return band[
            min(
                (-work, held[place].shared_blocks, -band[place].admission, place)
                for work, place in zip(left, cheapest, strict=True)
            )[-1]
        ]

    def _cost_per_block(self, held: Held, blocks: Blocks) -> float:
        if held.private_blocks == 0:
            return math.inf
        if self._mode == "recompute" or self.host.free == 0:
            cost_s = self._recompute_s(held)
        elif self._mode == "swap":
            cost_s = self._swap_s(held, blocks)
        else:
            cost_s = min(self._swap_s(held, blocks), self._recompute_s(held))
        return cost_s / held.private_blocks

    def _swap_s(self, held: Held, blocks: Blocks) -> float:
        return 2 * blocks.needed(held.private_tokens) * self.costs.copy_s_per_block

    def _recompute_s(self, held: Held) -> float:
        return held.private_tokens * self.costs.prefill_s_per_token

    def _work_left(self, sequences: Seq[Sequence]) -> list[int]:
        """Tokens that each will still generate, as far as that can be told."""
        if self._predictor is not None:
            return [int(left) for left in self._predictor.remaining_of_sequences(sequences)]
        return [sequence.length_bounds[1] - sequence.output_length for sequence in sequences]


def _worn(sequence: Sequence) -> bool:
    return sequence.preemptions >= MOST_PREEMPTIONS


def _mixed(known: float | None, newest: float) -> float:
    if known is None:
        return newest
    return (1 - _NEWEST) * known + _NEWEST * newest
