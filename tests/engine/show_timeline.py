"""Draw two steps on the fake device, with the host one step ahead and without: show_timeline.

The clock is the fake device's; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.engine.plan import Drawn, Plan
from jobrunner.records import Completion
from tests.engine.test_pipeline import Bench, SlowScheduler, endless
from tests.fakes import FakeDevice, Launch

PLAN_MS, LAUNCH_MS, COMMIT_MS, COMPUTE_MS, BLOCK_COPY_MS = 3, 1, 2, 10, 1
LANES = (
    *("host plan", "host launch", "host read-back", "host commit"),
    *("device copy", "device compute"),
)
RULER_MS = 5


@dataclass(frozen=True)
class Span:
    """What a lane was busy with: from `start_ms` up to `stop_ms` with this step."""

    lane: str
    step: int
    start_ms: float
    stop_ms: float


class TimedScheduler(SlowScheduler):
    """Takes its time to plan and to commit, and notes when it did."""

    spans: list[Span]

    def plan(self, now: float, *, last_call: bool = False) -> Plan:
        start_ms = self._clock.now
        plan = super().plan(now, last_call=last_call)
        self.spans.append(Span("host plan", plan.number, start_ms, self._clock.now))
        return plan

    def commit(self, plan: Plan, drawn: Drawn, now: float) -> list[Completion]:
        start_ms = self._clock.now
        self._clock.now += COMMIT_MS
        self.spans.append(Span("host commit", plan.number, start_ms, self._clock.now))
        return super().commit(plan, drawn, now)


class TimedDevice(FakeDevice):
    """Takes its time to copy, too, and notes when it did what."""

    spans: list[Span]
    numbers: list[int]

    def launch(self, plan: Plan) -> Launch:
        self._on_host("host launch", plan, LAUNCH_MS)
        begun_ms = max(self._free_at, self._clock.now)
        copied_ms = begun_ms + BLOCK_COPY_MS * plan.swapped_blocks
        if plan.swapped_blocks:
            self.spans.append(Span("device copy", plan.number, begun_ms, copied_ms))
        self._free_at = copied_ms
        launch = super().launch(plan)
        self.spans.append(Span("device compute", plan.number, copied_ms, launch.done_at))
        self.numbers.append(plan.number)
        return launch

    def collect(self, launch: Launch) -> Drawn:
        start_ms = self._clock.now
        drawn = super().collect(launch)
        step = self.numbers.pop(0)
        self.spans.append(Span("host read-back", step, start_ms, self._clock.now))
        return drawn

    def run(self, plan: Plan) -> Drawn:
        self._on_host("host launch", plan, LAUNCH_MS)
        start_ms = self._clock.now
        drawn = super().run(plan)
        for lane in ("host read-back", "device compute"):
            self.spans.append(Span(lane, plan.number, start_ms, self._clock.now))
        return drawn

    def _on_host(self, lane: str, plan: Plan, took_ms: float) -> None:
        start_ms = self._clock.now
        self._clock.now += took_ms
        self.spans.append(Span(lane, plan.number, start_ms, self._clock.now))


class TimedBench(Bench):
    """A bench whose clock counts milliseconds, and what everybody was busy with."""

    scheduler_type = TimedScheduler
    device_type = TimedDevice

    def __init__(self, **more: Any) -> None:
        super().__init__(step_s=COMPUTE_MS, host_s=PLAN_MS, **more)
        assert isinstance(self.scheduler, TimedScheduler)
        assert isinstance(self.device, TimedDevice)
        self.spans: list[Span] = []
        self.scheduler.spans = self.device.spans = self.spans
        self.device.numbers = []

    def of_steps(self, steps: Sequence[int]) -> list[Span]:
        """What was done for these steps."""
        return [span for span in self.spans if span.step in steps]


def drawing(spans: Sequence[Span]) -> str:
    """Draw lanes over time, one column a millisecond; each step is drawn as its last digit."""
    first_ms = min(span.start_ms for span in spans)
    width = int(max(span.stop_ms for span in spans) - first_ms)
    ruler = "".join(f"{at:<{RULER_MS}}" for at in range(0, width + 1, RULER_MS))
    lines = [f"{'ms':<15} {ruler}".rstrip()]
    for lane in LANES:
        cells = ["."] * width
        for span in spans:
            if span.lane == lane:
                for at in range(int(span.start_ms - first_ms), int(span.stop_ms - first_ms)):
                    cells[at] = str(span.step % 10)
        lines.append(f"{lane:<15} {''.join(cells)}")
    return "\n".join(lines)


def plain(*, ahead: bool) -> TimedBench:
    """Serve two rows that nothing disturbs."""
    bench = TimedBench(ahead=ahead)
    bench.serve([endless(index, 12) for index in range(2)])
    return bench


def crowded() -> TimedBench:
    """Serve three rows in a memory for two."""
    bench = TimedBench(blocks=9, batch=3, host=20)
    bench.serve([endless(index, 12) for index in range(3)])
    return bench


def timelines() -> str:
    """Draw the timelines that are worth a look."""
    swapping = crowded()
    swapped = next(span.step for span in swapping.spans if span.lane == "device copy")
    parts = [
        ("the host waits for each step", plain(ahead=False).of_steps([5, 6])),
        ("the host one step ahead", plain(ahead=True).of_steps([5, 6])),
        (
            "one step ahead; the second step swaps, when the one before it is read back",
            swapping.of_steps([swapped - 1, swapped]),
        ),
    ]
    return "\n\n".join(f"{title}\n{drawing(spans)}" for title, spans in parts) + "\n"


if __name__ == "__main__":
    print(timelines(), end="")
