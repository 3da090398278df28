"""Let the time pass in which prompts attend to what is before them. Knows no rows or policies."""

from __future__ import annotations

from dataclasses import replace

from jobrunner.engine.engine import Runner, attended_tokens
from jobrunner.engine.scheduler import Drawn, Plan
from jobrunner.simulate.requests import VirtualClock


class Attending:
    """A runner that takes longer than another by `attended_token_s` a token attended to."""

    def __init__(self, runner: Runner, clock: VirtualClock, attended_token_s: float) -> None:
        self._runner = runner
        self._clock = clock
        self._attended_token_s = attended_token_s

    def run(self, plan: Plan) -> Drawn:
        """Let the other runner compute a plan, then let more time pass."""
        drawn = self._runner.run(plan)
        more_s = self._attended_token_s * attended_tokens(plan)
        self._clock.advance(more_s)
        return replace(drawn, compute_s=drawn.compute_s + more_s)
