"""The step loop: pull requests, plan, launch, collect, commit. Knows no tensors, files or text.

A runner that computes beside the host is kept one step ahead: the next step is planned and
launched before the tokens of the last one are read back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jobrunner.engine.duplicates import Duplicates
from jobrunner.engine.plan import Drawn, OutOfMemoryError, Plan
from jobrunner.engine.scheduler import Scheduler
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.shortage import Shortage
from jobrunner.engine.tuning import Tuning
from jobrunner.engine.watchdog import Watchdog
from jobrunner.records import Completion, Partial, Request, Requests, Step

# how long an idle turn may last before the caller can look at its stop flag
_IDLE_WAIT_S = 0.1
# turns without progress before an open door and an empty batch: then it would be so for ever
_MOST_STALLED = 1000
_NOTHING = Plan()


class Runner(Protocol):
    """Computes what a plan says."""

    def run(self, plan: Plan) -> Drawn:
        """Return one sampled token per sampling chunk, in the order of the plan.

        Raises OutOfMemoryError where there is no memory for it: then it is planned anew, smaller.
        """


class Pending(Protocol):
    """What a launched plan will give."""

    def collect(self) -> Drawn:
        """Wait for it; as `Runner.run` returns it. Called once, in the order of the launches."""


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """Computes plans beside the host, in their order, if `ahead`; else one after the other."""

    @property
    def ahead(self) -> bool: ...

    def launch(self, plan: Plan) -> Pending:
        """Begin with a plan, of which single tokens may follow from the plan before.

        See `Chunk.follows`. What a plan says of tokens and blocks is to be read before returning.
        Raises OutOfMemoryError where there is no memory for it; what is launched has its memory.
        """


@dataclass(frozen=True, slots=True)
class _Ready:
    drawn: Drawn

    def collect(self) -> Drawn:
        return self.drawn


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched plan, and how things stood then."""

    plan: Plan
    pending: Pending
    launched_at: float
    running: int
    used: int


class Engine:
    """Serves requests with continuous batching, one step a turn.

    With a runner that is `ahead`, a turn yields the step that is complete while the next computes.
    A step that finds no memory is planned anew under lower limits, when all before it is booked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
        *,
        duplicates: Duplicates | None = None,
        tuning: Tuning | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._ahead = isinstance(runner, AheadRunner) and runner.ahead
        self._launch = _launcher(runner)
        self._flights: deque[_Flight] = deque()
        self._collected_at = -math.inf
        self._clock = clock
        self._duplicates = duplicates
        self._tuning = tuning
        # a plan that there was no memory for, as long as nothing smaller is launched
        self._shortage: Shortage | None = None
        self._shortages = 0
        self._watchdog = watchdog

    def run(self, requests: Requests) -> Iterator[Step]:
        """Serve requests until they are exhausted and all are complete.

        An idle step is yielded when there is nothing to compute yet. What the runner raises
        passes through, OutOfMemoryError only where a step cannot be smaller; a step that takes too
        long ends the process.
        """
        with self._watchdog.on_guard() if self._watchdog else nullcontext():
            yield from self._serve(requests)

    def _serve(self, requests: Requests) -> Iterator[Step]:
        scheduler = self._scheduler
        stalled = 0
        while True:
            started = self._clock()
            complete = self._top_up(requests, started)
            if scheduler.busy or self._flights:
                step = self._step(complete, started, last_call=requests.exhausted)
                yield step
                if step.tokens_computed or step.completions:
                    stalled = 0
                    continue
                # those who wait are gathered until the policy opens the door
                opens_in_s = scheduler.opens_in_s(self._clock())
                stalled += opens_in_s == 0 and not scheduler.running
                if stalled > _MOST_STALLED:
                    raise RuntimeError(f"nothing runs, and none of {scheduler.waiting} rows may")
                requests.wait(min(_IDLE_WAIT_S, opens_in_s))
            elif complete:
                yield self._report(started, completions=complete)
            elif requests.exhausted:
                return
            else:
                requests.wait(_IDLE_WAIT_S)
                yield self._report(started)

    def partials(self) -> list[Partial]:
        """Every unfinished sample that the engine holds and that has a known generated token."""
        return [
            _partial(sequence)
            for sequence in self._scheduler.unfinished()
            if sequence.known > sequence.prompt_length
        ]

    def withdraw(self) -> list[Request]:
        """Give back the requests that have not begun, to be asked for again or by others."""
        withdrawn = self._scheduler.withdraw()
        if self._duplicates is not None:
            withdrawn = self._duplicates.withdraw(withdrawn)
        return withdrawn

    def _top_up(self, requests: Requests, now: float) -> list[Completion]:
        """Fill the waiting window; return the requests that were complete as they came."""
        self._count_outside()
        room = self._scheduler.room
        if room == 0:
            return []
        taken, known = requests.take(room), list[Completion]()
        if self._duplicates is not None:
            taken, known = self._duplicates.sift(taken, now)
            self._count_outside()
        added = [self._scheduler.add(request, now) for request in taken]
        return known + [completion for completion in added if completion is not None]

    def _count_outside(self) -> None:
        """Tell the scheduler which part of its window is taken by those who wait for an answer."""
        if self._duplicates is not None:
            self._scheduler.outside = self._duplicates.window_rows

    def _with_duplicates(self, completions: Seq[Completion]) -> Seq[Completion]:
        """Add the completions of those that waited for one of these."""
        if self._duplicates is None or not completions:
            return completions
        return [*completions, *self._duplicates.share(completions, self._clock())]

    def _step(self, complete: list[Completion], started: float, *, last_call: bool) -> Step:
        while self._may_plan:
            self._make_do()
            plan = self._scheduler.plan(started, last_call=last_call)
            complete += plan.completions
            works = bool(len(plan) or plan.copies)
            if works or not self._flights:
                self._take_off(plan, works=works)
            if not works:
                break
        return self._land(complete, started)

    @property
    def _may_plan(self) -> bool:
        if not self._flights:
            return True
        if self._shortage is not None or not self._ahead or len(self._flights) > 1:
            return False
        return self._scheduler.may_plan_ahead

    def _make_do(self) -> None:
        """Lower the limits if the latest plan found no memory."""
        if self._shortage is None:
            return
        before = self._scheduler.limits
        limits = self._shortage.lowered(before)
        self._shortage.tell(before, limits, gave_way=self._scheduler.lower(limits))
        if self._tuning is not None:
            self._tuning.lower(limits)
        self._shortage = None
        self._shortages += 1

    def _take_off(self, plan: Plan, *, works: bool) -> None:
        """Launch a plan, or withdraw it where there is no memory for it."""
        launched_at = self._clock()
        try:
            with self._watching(plan):
                pending = self._launch(plan) if works else _Ready(Drawn())
        except OutOfMemoryError as error:
            self._shortage = Shortage(plan.tokens, len(plan))
            if self._shortage.final:
                raise
            self._scheduler.take_back(plan, error.copied)
            return
        if self._ahead and works:
            self._scheduler.launched(plan)
        running, used = self._scheduler.running, self._scheduler.blocks.used
        self._flights.append(_Flight(plan, pending, launched_at, running, used))

    def _land(self, complete: list[Completion], started: float) -> Step:
        """Book the plan that was launched first."""
        flight = self._flights.popleft()
        with self._watching(flight.plan):
            drawn = flight.pending.collect()
        finished = self._clock()
        # the device began with it when it had it, and was done with the one before
        forward_s = finished - max(flight.launched_at, self._collected_at)
        if self._ahead:
            forward_s = drawn.held_s + drawn.compute_s or forward_s
        self._collected_at = finished
        done = self._scheduler.commit(flight.plan, drawn, finished)
        discarded = self._scheduler.discarded
        return self._report(
            started,
            completions=[*complete, *done],
            plan=flight.plan,
            output_tokens=len(drawn.tokens) - discarded,
            discarded=discarded,
            running=flight.running - discarded,
            used=flight.used,
            forward_s=forward_s,
            swap_s=drawn.held_s,
        )

    def _watching(self, plan: Plan) -> AbstractContextManager[None]:
        return self._watchdog.watching(plan) if self._watchdog else nullcontext()

    def _report(
        self,
        started: float,
        *,
        completions: Seq[Completion] = (),
        plan: Plan = _NOTHING,
        output_tokens: int = 0,
        discarded: int = 0,
        running: int = 0,
        used: int = 0,
        forward_s: float = 0.0,
        swap_s: float = 0.0,
    ) -> Step:
        completions = self._with_duplicates(completions)
        step = Step(
            completions=completions,
            duplicates=self._duplicates.count_answered() if self._duplicates else 0,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens - discarded,
            output_tokens=output_tokens,
            tokens_computed=plan.prefill_tokens + plan.decode_tokens + plan.padding,
            tokens_padded=discarded + plan.padding,
            tokens_recomputed=plan.tokens_recomputed,
            tokens_cached=plan.tokens_cached,
            context_tokens=plan.context_tokens,
            attended_tokens=plan.attended_tokens,
            batch_size=len(plan) - discarded,
            running=running,
            waiting=self._scheduler.waiting,
            preemptions=plan.preemptions,
            swapped_blocks=plan.swapped_blocks,
            out_of_memory=self._shortages,
            token_budget=self._scheduler.limits.token_budget,
            max_batch_size=self._scheduler.limits.max_batch_size,
            kv_blocks_used=used,
            kv_blocks=self._scheduler.blocks.count,
            forward_s=forward_s,
            swap_s=swap_s,
            step_s=self._clock() - started,
        )
        self._tune(step)
        return step

    def _tune(self, step: Step) -> None:
        """Let what a step took change the limits of the next ones."""
        limits = self._tuning.observe(step) if self._tuning is not None else None
        if limits is not None:
            self._scheduler.retune(limits)


def _launcher(runner: Runner) -> Callable[[Plan], Pending]:
    if isinstance(runner, AheadRunner) and runner.ahead:
        return runner.launch
    return lambda plan: _Ready(runner.run(plan))


def _partial(sequence: Sequence) -> Partial:
    request = sequence.request
    return Partial(
        id=request.id,
        tokens=sequence.output.tolist(),
        attempt=request.attempt,
        sample=request.sample,
        logprobs=tuple(sequence.logprobs),
    )
