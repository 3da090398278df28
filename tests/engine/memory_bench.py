"""An engine on a fake model whose memory is short, checked after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobrunner.engine.admission import Admission
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.engine import Engine
from jobrunner.engine.preemption import Mode, Preemption
from jobrunner.engine.scheduler import Limits, Scheduler
from jobrunner.engine.swap import HostBlocks
from jobrunner.engine.waiting import Waiting
from jobrunner.records import Completion, Request, RowId, Sampling, Step
from tests.fakes import FakeClock, FakeRequests, FakeRunner, LetterText


def request(index: int, prompt: Sequence[int], max_new_tokens: int, **more: Any) -> Request:
    """A request that only its limit ends, unless `stop_ids` say otherwise."""
    priority = more.pop("priority", 0)
    return Request(RowId("s", index), prompt, Sampling(max_new_tokens, **more), priority=priority)


class MemoryBench:
    """Serves requests with so many blocks on the device and on the host."""

    def __init__(
        self,
        *,
        blocks: int,
        host: int = 0,
        mode: Mode = "swap",
        block_size: int = 4,
        batch: int = 4,
        budget: int = 64,
        chunk: int = 64,
        prefix_cache: bool = False,
        admission: Admission | None = None,
        protected: Sequence[int] = (),
        **waiting: Any,
    ) -> None:
        self.runner = FakeRunner(block_size)
        self.preemption = Preemption(mode, HostBlocks(host), protected=protected)
        self.scheduler = Scheduler(
            Blocks(blocks, block_size, prefix_cache),
            Limits(batch, budget, chunk, lookahead=32),
            lambda: LetterText(lambda token: f"{token} "),
            admission=admission,
            preemption=self.preemption,
            waiting=Waiting(**waiting),
        )
        self.engine = Engine(self.scheduler, self.runner, clock=FakeClock())

    def serve(self, requests: Sequence[Request], arrivals: Sequence[int] = ()) -> list[Step]:
        """Run all requests; every step leaves the scheduler's invariants in order."""
        steps = []
        for step in self.engine.run(FakeRequests(requests, arrivals)):
            self.scheduler.check()
            steps.append(step)
        assert self.scheduler.blocks.used == 0
        assert self.preemption.host.free == self.preemption.host.count
        return steps


def finished(steps: Sequence[Step]) -> dict[int, Completion]:
    """The completions by row, in the order of their ends."""
    done = [completion for step in steps for completion in step.completions]
    assert len({completion.id for completion in done}) == len(done), "a row ended twice"
    return {completion.id.index: completion for completion in done}


def preemptions(steps: Sequence[Step]) -> int:
    return sum(step.preemptions for step in steps)
