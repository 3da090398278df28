"""Serve the same rows in several ways, each at its best batch size. Knows no model and no job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jobrunner.console.quantiles import Quantiles
from jobrunner.console.snapshot import Snapshot, Totals
from jobrunner.console.stats import Stats
from jobrunner.engine.arrivals import Arrivals
from jobrunner.engine.scheduler import Limits
from jobrunner.records import Completion, Engine, Request, Requests, SampleId, Step

PolicyName = Literal["static", "dynamic", "continuous"]
Answers = Mapping[SampleId, Sequence[int]]
Clock = Callable[[], float]

# sizes in a row that are slower than the best before no larger one is tried
_SLOWER = 2


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to serve rows: by a policy, prompts cut into chunks or not; None is `generate`."""

    name: str
    policy: PolicyName | None
    chunked: bool = False


GENERATE = Contender("generate", None)


@dataclass(frozen=True, slots=True)
class Tried:
    """A batch size of the sweep."""

    max_batch_size: int
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Percentiles of queue + prefill, in seconds."""

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """All rows served once.

    `batches` are those that ended together. Of memory, `kv_peak_bytes` of the KV pool were in use
    at most, `peak_bytes` of all, and that was `grown_bytes` more than before; None is unknown.
    """

    snapshot: Snapshot
    first_token: FirstToken
    answers: Answers
    batches: Sequence[Sequence[Request]]
    kv_peak_bytes: int | None
    peak_bytes: int | None
    grown_bytes: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one contender: the sweep, and every run at the size that was best."""

    contender: Contender
    limits: Limits
    tried: Sequence[Tried]
    runs: Sequence[Run]

    @property
    def run(self) -> Run:
        """The run in the middle, by output tokens/s; of an even number the slower one."""
        ordered = sorted(self.runs, key=lambda run: run.snapshot.output_tokens_per_s)
        return ordered[(len(ordered) - 1) // 2]


class Memory(Protocol):
    """Tells the most memory in use since `begin`."""

    def begin(self) -> None: ...

    def peak_bytes(self) -> int | None: ...

    def grown_bytes(self) -> int | None: ...


class Listed:
    """A source of requests that are all there."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._taken = 0

    @property
    def exhausted(self) -> bool:
        return self._taken == len(self._requests)

    def take(self, limit: int) -> Sequence[Request]:
        """Hand over the next ones, in order."""
        first, self._taken = self._taken, min(self._taken + limit, len(self._requests))
        return self._requests[first : self._taken]

    def wait(self, timeout_s: float) -> None:
        """Return at once: nothing more will come."""


def source_of(requests: Sequence[Request]) -> Requests:
    """Hand over requests, each when it arrives."""
    listed = Listed(requests)
    return Arrivals(listed) if any(request.arrival_s for request in requests) else listed


@dataclass(frozen=True, slots=True)
class Bench:
    """Serves rows and counts what is done.

    `open_engine` gives an engine of its own to each run, on a KV pool of `kv_bytes`; `generate`
    answers batches without ours.
    """

    open_engine: Callable[[Contender, Limits], Engine]
    generate: Callable[[Sequence[Sequence[Request]]], Iterable[Step]]
    memory: Memory
    kv_bytes: int
    price_per_gpu_hour: float | None = None
    clock: Clock = time.perf_counter

    def serve(self, contender: Contender, limits: Limits, requests: Sequence[Request]) -> Run:
        """Serve all requests with an empty KV memory to begin with."""
        engine = self.open_engine(contender, limits)
        return self._counted(engine.run(source_of(requests)), limits, requests)

    def answer(self, limits: Limits, batches: Sequence[Sequence[Request]]) -> Run:
        """Let `generate` answer batches."""
        requests = [request for batch in batches for request in batch]
        return self._counted(self.generate(batches), limits, requests)

    def _counted(self, steps: Iterable[Step], limits: Limits, requests: Sequence[Request]) -> Run:
        self.memory.begin()
        stats = Stats(
            Totals(rows=len({request.id for request in requests})),
            slots=limits.max_batch_size,
            started_s=self.clock(),
            price_per_gpu_hour=self.price_per_gpu_hour,
        )
        first, answers = Quantiles(), dict[SampleId, Sequence[int]]()
        batches = list[list[Request]]()
        for step in steps:
            stats.observe(step, self.clock())
            done = [each for each in step.completions if each.error is None]
            for completion in done:
                first.add(completion.queue_s + completion.prefill_s)
                answers[_sample(completion)] = completion.tokens
            if done:
                batches.append([each.request for each in done if each.request is not None])
        snapshot = stats.snapshot(self.clock())
        kv_use = snapshot.kv_use_peak
        return Run(
            snapshot,
            FirstToken(*(first.at(fraction) for fraction in (0.5, 0.95, 0.99))),
            answers,
            batches,
            None if kv_use is None else round(kv_use * self.kv_bytes),
            self.memory.peak_bytes(),
            self.memory.grown_bytes(),
        )


def _sample(completion: Completion) -> SampleId:
    assert completion.request is not None, "an answer of no request"
    return SampleId(completion.id, completion.request.sample)


def sweep(
    sizes: Sequence[int], tokens_per_s: Callable[[int], float]
) -> tuple[int, Sequence[Tried]]:
    """Try sizes from small to large until they only get slower; return the best and all."""
    tried: list[Tried] = []
    for size in sorted(sizes):
        tried.append(Tried(size, tokens_per_s(size)))
        best = max(tried, key=lambda each: each.output_tokens_per_s)
        if tried.index(best) < len(tried) - _SLOWER:
            break
    return max(tried, key=lambda each: each.output_tokens_per_s).max_batch_size, tried


def in_turns(
    contenders: Sequence[Contender], serve: Callable[[Contender], Run], repeats: int
) -> dict[Contender, list[Run]]:
    """Run all contenders, then all again, backwards every other time: machines change."""
    runs: dict[Contender, list[Run]] = {contender: [] for contender in contenders}
    for repeat in range(repeats):
        order = list(contenders if repeat % 2 == 0 else reversed(contenders))
        for contender in order:
            runs[contender].append(serve(contender))
    return runs
