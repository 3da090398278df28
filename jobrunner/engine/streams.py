"""Lanes of a device's work and marks in them. Knows nothing of steps, blocks or models.

What is given to a device runs in the order of its lane, beside the other lane and the host. A lane
can be held until another one has got to a mark; only `Mark.passed` tells the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from time import perf_counter, sleep
from typing import Protocol, Self, cast

import torch

from jobrunner.engine.watchdog import Patience

# short beside a step, long beside a question
_ASK_EVERY_S = 5e-5


class Lane(Enum):
    """What a device does side by side."""

    COMPUTE = "compute"
    COPY = "copy"


class Mark(Protocol):
    """A point in the work of a lane."""

    @property
    def passed(self) -> bool:
        """Whether the device got there; does not wait."""

    def since(self, earlier: Self) -> float:
        """Seconds of the device's time from an earlier mark; it must have passed both."""


class Streams(Protocol):
    """The lanes of one device."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Give the device what is begun in the block in this lane; outside it is COMPUTE."""

    def mark(self, lane: Lane) -> Mark:
        """Mark the end of what a lane was given so far."""

    def hold(self, lane: Lane, mark: Mark) -> None:
        """Let a lane go on only when the device has passed a mark; the host does not wait."""


def wait_for(mark: Mark, patience: Patience | None = None) -> bool:
    """Wait until the device has passed a mark; return False if patience ends before.

    Asks again and again: a call that waits for a device that hangs never returns.
    """
    while not mark.passed:
        if patience is not None and patience.is_over:
            return False
        sleep(_ASK_EVERY_S)
    return True


def streams_of(device: torch.device) -> Streams:
    """The lanes of a device; beside a host that computes itself there are none."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class _Moment:
    """When the host was there, which has done all that it began."""

    passed = True

    def __init__(self) -> None:
        self._at_s = perf_counter()

    def since(self, earlier: _Moment) -> float:
        return self._at_s - earlier._at_s


class HostStreams:
    """Everything is done when it is begun."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self, lane: Lane) -> _Moment:
        return _Moment()

    def hold(self, lane: Lane, mark: Mark) -> None:
        pass


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    @property
    def passed(self) -> bool:
        return bool(self.event.query())

    def since(self, earlier: _EventMark) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """COMPUTE is the stream that torch uses by itself, COPY one beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = torch.cuda.Stream(device)

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], torch.cuda.stream(self._stream(lane)))

    def mark(self, lane: Lane) -> _EventMark:
        return _EventMark(self._stream(lane))

    def hold(self, lane: Lane, mark: Mark) -> None:
        assert isinstance(mark, _EventMark), "a mark of another device"
        self._stream(lane).wait_event(mark.event)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copy if lane is Lane.COPY else torch.cuda.current_stream(self._device)
