"""The step loop: pull requests, plan, run, commit. Knows nothing of tensors, files or text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from jobrunner.engine.scheduler import Drawn, Plan, Scheduler
from jobrunner.engine.sequence import Sequence
from jobrunner.records import Completion, Partial, Requests, Step

# how long an idle turn may last before the caller can look at its stop flag
_IDLE_WAIT_S = 0.1
_NOTHING = Plan(chunks=(), completions=(), preemptions=0, tokens_cached=0)
_NO_TOKENS = Drawn()


class Runner(Protocol):
    """Computes what a plan says."""

    def run(self, plan: Plan) -> Drawn:
        """Return one sampled token per sampling chunk, in the order of the plan."""


class Engine:
    """Serves requests with continuous batching, one step a turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock

    def run(self, requests: Requests) -> Iterator[Step]:
        """Serve requests until they are exhausted and all are complete.

        An idle step is yielded when there is nothing to compute yet. What the runner raises
        passes through.
        """
        scheduler = self._scheduler
        while True:
            started = self._clock()
            complete = self._top_up(requests, started)
            if scheduler.running or scheduler.waiting:
                yield self._step(complete, started)
            elif complete:
                yield self._report(started, completions=complete)
            elif requests.exhausted:
                return
            else:
                requests.wait(_IDLE_WAIT_S)
                yield self._report(started)

    def partials(self) -> list[Partial]:
        """Every unfinished sample that the engine holds and that has a generated token."""
        return [
            _partial(sequence)
            for sequence in self._scheduler.unfinished()
            if sequence.output_length
        ]

    def _top_up(self, requests: Requests, now: float) -> list[Completion]:
        """Fill the waiting window; return the requests that were complete as they came."""
        room = self._scheduler.room
        if room == 0:
            return []
        added = [self._scheduler.add(request, now) for request in requests.take(room)]
        return [completion for completion in added if completion is not None]

    def _step(self, complete: list[Completion], started: float) -> Step:
        plan = self._scheduler.plan(started)
        forward_started = self._clock()
        drawn = self._runner.run(plan) if plan.chunks else _NO_TOKENS
        finished = self._clock()
        running, used = self._scheduler.running, self._scheduler.blocks.used
        done = self._scheduler.commit(plan, drawn, finished)
        return self._report(
            started,
            completions=[*complete, *plan.completions, *done],
            plan=plan,
            output_tokens=len(drawn.tokens),
            running=running,
            used=used,
            forward_s=finished - forward_started,
        )

    def _report(
        self,
        started: float,
        *,
        completions: Seq[Completion] = (),
        plan: Plan = _NOTHING,
        output_tokens: int = 0,
        running: int = 0,
        used: int = 0,
        forward_s: float = 0.0,
    ) -> Step:
        return Step(
            completions=completions,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens,
            output_tokens=output_tokens,
            tokens_computed=plan.prefill_tokens + plan.decode_tokens,
            tokens_recomputed=plan.tokens_recomputed,
            tokens_cached=plan.tokens_cached,
            context_tokens=sum(chunk.start for chunk in plan.chunks),
            batch_size=len(plan.chunks),
            running=running,
            waiting=self._scheduler.waiting,
            preemptions=plan.preemptions,
            kv_blocks_used=used,
            kv_blocks=self._scheduler.blocks.count,
            forward_s=forward_s,
            step_s=self._clock() - started,
        )


def _partial(sequence: Sequence) -> Partial:
    request = sequence.request
    return Partial(
        id=request.id,
        tokens=sequence.output.tolist(),
        attempt=request.attempt,
        sample=request.sample,
        logprobs=tuple(sequence.logprobs),
    )
