"""Run the engine's own loop and scheduler in virtual time. Knows nothing of tensors or files."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jobrunner.config import BatchingTable
from jobrunner.engine.arrivals import Arrivals
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.preemption import Costs
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.strategies import make_scheduler
from jobrunner.engine.tuning import Automatic, Tuning
from jobrunner.records import Requests, Step, TextStream
from jobrunner.simulate.cost import StepCost
from jobrunner.simulate.requests import VirtualClock, VirtualRequests
from jobrunner.simulate.runner import VirtualRunner
from jobrunner.simulate.timeline import Places
from jobrunner.simulate.trace import TraceRow

# rows that have arrived, or nearly, and wait in front of a worker's window
_HELD_ROWS = 1000
# turns in which no time passes, before that is taken for a fault
_MOST_STILL = 100_000


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated: how workers schedule, what a step costs them and what memory they have.

    `batching` has names and numbers that `limits` and `kv_blocks` do not say. Each worker begins
    with `limits`, of which those that are `automatic` follow its steps.
    """

    cost: StepCost
    limits: Limits
    kv_blocks: int
    batching: BatchingTable
    max_new_tokens: int
    known_lengths: bool = False
    workers: int = 1
    shared_prefix: int = 0
    host_blocks: int = 0
    prediction: bool = True
    automatic: Automatic = field(default_factory=Automatic)

    @property
    def slots(self) -> int | None:
        """How many sequences may run, None if that follows the steps."""
        return None if self.automatic.max_batch_size else self.limits.max_batch_size


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one worker: when it was, under which limits, and how many rows joined with it.

    `places` says what each slot did, where that was asked for.
    """

    worker: int
    step: Step
    started_s: float
    ended_s: float
    limits: Limits
    joined: int
    places: Places | None


def simulate(rows: Sequence[TraceRow], machine: Machine, *, draw: bool = False) -> Iterator[Moment]:
    """Serve all rows; yield every step of every worker.

    The rows are dealt to the workers in turn, in the order in which they arrive. The same rows
    and machine give the same steps. `draw` asks for the places of each step.
    """
    rows = sorted(rows, key=lambda row: row.arrival_s)
    workers = [_Worker(number, rows, machine, draw) for number in range(machine.workers)]
    turns = [(0.0, worker.number) for worker in workers]
    while turns:
        _, number = heapq.heappop(turns)
        moment = workers[number].turn()
        if moment is not None:
            heapq.heappush(turns, (moment.ended_s, number))
            yield moment


class _Worker:
    """An engine of its own with a clock and rows of its own."""

    def __init__(self, number: int, rows: Sequence[TraceRow], machine: Machine, draw: bool) -> None:
        self.number = number
        self._still = 0
        self._clock = VirtualClock()
        blocks = Blocks(
            machine.kv_blocks,
            machine.batching.block_size,
            # without a common prefix there is nothing to find, and looking takes time
            machine.batching.prefix_cache and machine.shared_prefix > 0,
        )
        self._scheduler = make_scheduler(
            machine.batching,
            blocks,
            machine.limits,
            _no_text,
            host_blocks=machine.host_blocks,
            costs=Costs(machine.cost.swapped_block_s, machine.cost.prefill_token_s),
            ahead=machine.prediction,
        )
        self._runner = VirtualRunner(self._clock, machine.cost, rows, draw)
        self._requests = self._source(rows, machine)
        tuning = Tuning(machine.limits, machine.automatic)
        engine = Engine(self._scheduler, self._runner, clock=self._clock, tuning=tuning)
        self._steps = engine.run(self._requests)

    def _source(self, rows: Sequence[TraceRow], machine: Machine) -> Requests:
        source = VirtualRequests(
            rows,
            range(self.number, len(rows), machine.workers),
            self._clock,
            None if machine.known_lengths else machine.max_new_tokens,
            machine.shared_prefix,
        )
        if not rows or rows[-1].arrival_s == 0.0:
            return source
        return Arrivals(source, self._clock, self._clock.advance, _HELD_ROWS)

    def turn(self) -> Moment | None:
        """Do one step; None if all is done."""
        started_s, limits = self._clock.now, self._scheduler.limits
        self._runner.look_away()
        step = next(self._steps, None)
        if step is None:
            return None
        self._still = 0 if self._clock.now > started_s else self._still + 1
        if self._still > _MOST_STILL:
            raise RuntimeError("the simulated scheduler waits for something that never comes")
        return Moment(
            worker=self.number,
            step=step,
            # beside what it waited before
            started_s=self._clock.now - step.step_s,
            ended_s=self._clock.now,
            limits=limits,
            joined=self._runner.joined,
            places=self._runner.places,
        )


def _no_text() -> TextStream:
    raise AssertionError("a simulated row has no stop string, so nobody reads its text")
