"""See that no step goes on for ever, and end the worker of one that does. Knows no devices."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from jobrunner.engine.plan import Plan
from jobrunner.errors import ExitCode
from jobrunner.leaving import leave_at_once

log = logging.getLogger("cbjob")

# far beyond every step that ends, the first ones with all that they compile included
_LONGEST_S = 300.0
# a CPU may be slow enough for so much on top of that
_CPU_TOKEN_S = 1.0
# whoever waits for a device looks for itself, and can say more: this watches those who cannot
_MARGIN_S = 10.0
# how often the watching thread looks at the most
_LOOK_EVERY_S = 1.0
# of the time between two looks no more counts: the process may have been stopped in between
_MOST_COUNTED_S = 2.0
# so long may it take to say why a worker ends: the disk of the log may hang, too
_SAYING_S = 5.0
_NAMED_ROWS = 3


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How long a step may take: `base_s`, and `token_s` more for each token that it computes."""

    base_s: float
    token_s: float = 0.0

    def of(self, plan: Plan) -> float:
        """The seconds that a plan may take."""
        return self.base_s + self.token_s * (plan.prefill_tokens + plan.decode_tokens)


def step_limit(max_step: float | Literal["auto"], device_kind: str) -> StepLimit:
    """Resolve `batching.max_step` for a kind of device."""
    if max_step != "auto":
        return StepLimit(max_step)
    return StepLimit(_LONGEST_S, _CPU_TOKEN_S if device_kind == "cpu" else 0.0)


class Patience:
    """Counts how long something is waited for, as often as one looks.

    Time in which this process was stopped, by a scheduler that suspends jobs or by a machine that
    sleeps, does not count: what it waits for may have been stopped, too.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.waited_s = 0.0
        self.limit_s = limit_s
        self._clock = clock
        self._looked_at = clock()

    @property
    def is_over(self) -> bool:
        """Whether more was waited than the limit says."""
        now = self._clock()
        self.waited_s += min(now - self._looked_at, _MOST_COUNTED_S)
        self._looked_at = now
        return self.waited_s > self.limit_s


@dataclass(frozen=True, slots=True)
class _Watched:
    plan: Plan
    patience: Patience
    thread: int


class Watchdog:
    """Calls `end` with words about a step that takes longer than its limit, from another thread.

    That thread asks nothing of a device: it might wait there with the one that it watches.
    """

    def __init__(
        self,
        limit: StepLimit,
        end: Callable[[str], None] | None = None,
        *,
        margin_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._end = end or end_worker
        self._margin_s = margin_s
        self._clock = clock
        self._watched: _Watched | None = None

    @contextmanager
    def on_guard(self) -> Iterator[None]:
        """Look now and then, from a thread of its own, while the block runs."""
        done = threading.Event()
        every_s = min(_LOOK_EVERY_S, self._limit.base_s / 10)

        def look() -> None:
            while not done.wait(every_s):
                self.look()

        threading.Thread(target=look, name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    @contextmanager
    def watching(self, plan: Plan) -> Iterator[None]:
        """Watch how long the block takes, which launches a plan or waits for it."""
        patience = Patience(self._limit.of(plan) + self._margin_s, self._clock)
        self._watched = _Watched(plan, patience, threading.get_ident())
        try:
            yield
        finally:
            self._watched = None

    def look(self) -> None:
        """End the worker if what is watched takes too long."""
        watched = self._watched
        if watched is not None and watched.patience.is_over:
            self._end(
                f"{words_of(watched.plan)} has taken {watched.patience.waited_s:,.1f} s, more than"
                f" the {watched.patience.limit_s:,.1f} s of batching.max_step;"
                f" it is {_place_of(watched.thread)}"
            )


def watchdog(limit: StepLimit, *, ahead: bool) -> Watchdog:
    """Make one that leaves it to whoever waits for a device `ahead` of the host to notice first."""
    return Watchdog(limit, margin_s=_MARGIN_S if ahead else 0.0)


def end_worker(words: str) -> None:
    """Say why and end this process, from whatever thread, without waiting for the others."""
    speaking = threading.Thread(target=log.error, args=("%s", words), daemon=True)
    speaking.start()
    speaking.join(_SAYING_S)
    leave_at_once(ExitCode.INFRASTRUCTURE, f"hint: {STEP_HINT}\n")


STEP_HINT = (
    "run again: nothing committed is lost; a step may take longer with a higher batching.max_step,"
    " and takes less with a lower batching.token_budget"
)


def words_of(plan: Plan) -> str:
    """Say which step this is, how much it computes, and of which rows, the first few by name."""
    sequences = [*plan.decodes.sequences, *(chunk.sequence for chunk in plan.prefills)]
    rows = list(dict.fromkeys(str(sequence.request.id) for sequence in sequences))
    named = ", ".join(rows[:_NAMED_ROWS])
    if len(rows) > _NAMED_ROWS:
        named += f" and {len(rows) - _NAMED_ROWS:,} more"
    return (
        f"step {plan.number:,} ({plan.decode_tokens:,} single tokens,"
        f" {plan.prefill_tokens:,} of prompts, {plan.swapped_blocks:,} swapped blocks;"
        f" {named or 'no row'})"
    )


def _place_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"in {code.co_name}, {code.co_filename}:{frame.f_lineno}"
