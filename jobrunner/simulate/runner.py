"""Compute a plan in virtual time: let the step's cost pass. Knows nothing of rows or policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobrunner.engine.plan import Chunk, Drawn, Plan
from jobrunner.simulate.cost import StepCost
from jobrunner.simulate.requests import END, OTHER, VirtualClock
from jobrunner.simulate.timeline import DECODE, KEPT, PREFILL, Places
from jobrunner.simulate.trace import TraceRow

Numbers = np.ndarray


class VirtualRunner:
    """A runner that only takes time; a text ends with the token that its row's length says.

    `rows` say those lengths. What pads a batch costs what a decode costs. After a step it can
    tell how many rows `joined` the batch and, if it is to `draw`, what was in which slot.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost: StepCost,
        rows: Sequence[TraceRow],
        draw: bool,
    ) -> None:
        self._clock = clock
        self._cost = cost
        # tokens that are computed when the last one is drawn
        self._ends_at = np.array([row.prompt + row.output - 1 for row in rows], np.int64)
        self._draw = draw
        self._latest_admission = -1
        self.look_away()

    def look_away(self) -> None:
        """Forget the last step."""
        self.joined = 0
        self.places: Places | None = None

    def run(self, plan: Plan) -> Drawn:
        """Let the time of a plan pass; return one token per sampling chunk."""
        for chunk in plan.prefills:
            self._see_admission(chunk)
        tokens = self._drawn_tokens(plan)
        copy_s = self._cost.swapped_block_s * plan.swapped_blocks
        compute_s = self._cost.seconds(
            plan.prefill_tokens,
            len(plan.decodes) + plan.padding,
            plan.context_tokens,
            plan.attended_tokens,
        )
        self._clock.advance(copy_s + compute_s)
        if self._draw:
            self.places = _drawn(plan)
        return Drawn(tokens, copy_s=copy_s, held_s=copy_s, compute_s=compute_s)

    def _drawn_tokens(self, plan: Plan) -> Numbers:
        prefilled = [chunk for chunk in plan.prefills if chunk.samples]
        rows = [chunk.sequence.request.id.index for chunk in prefilled]
        stops = np.concatenate([plan.decodes.starts + 1, [chunk.stop for chunk in prefilled]])
        rows_N = np.concatenate([plan.decodes.rows, np.array(rows, np.int64)])
        return np.where(stops >= self._ends_at[rows_N], END, OTHER)

    def _see_admission(self, chunk: Chunk) -> None:
        if chunk.sequence.admission > self._latest_admission:
            self._latest_admission = chunk.sequence.admission
            self.joined += 1


def _drawn(plan: Plan) -> Places:
    # running sequences lie close together: who stays is behind them
    slots = [chunk.sequence.slot or 0 for chunk in plan.chunks]
    places = bytearray(max(slots, default=-1) + 1)
    for slot, chunk in zip(slots, plan.chunks, strict=True):
        places[slot] = DECODE if chunk.decode else PREFILL
    return bytes(places) + bytes([KEPT]) * plan.padding
