"""What is asked of torch.cuda, by a torch.cuda that only takes notes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobrunner.engine.devices import device_state
from jobrunner.engine.streams import CudaStreams, Lane, streams_of

CUDA = torch.device("cuda", 0)


class FakeCuda:
    """Streams and events by name; an event has happened at so many milliseconds, or not yet."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events: list[FakeEvent] = []
        self.current = FakeStream(self, "default")
        self.made = 0

    def make_stream(self, device: torch.device) -> FakeStream:
        assert device == CUDA
        self.made += 1
        return FakeStream(self, f"side {self.made}")

    def make_event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing, "its time is wanted"
        self.events.append(FakeEvent(self, f"event {len(self.events)}"))
        return self.events[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.at_ms: float | None = None

    def record(self, stream: FakeStream) -> None:
        self.cuda.calls.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms

    def synchronize(self) -> None:
        raise AssertionError("a device that hangs would never return from it")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.make_event)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    return fake


def test_lanes_are_held_by_events(cuda: FakeCuda):
    streams = streams_of(CUDA)
    assert isinstance(streams, CudaStreams)
    computed = streams.mark(Lane.COMPUTE)
    streams.hold(Lane.COPY, computed)
    with streams.on(Lane.COPY):
        assert cuda.current.name == "side 1"
        copied = streams.mark(Lane.COPY)
    assert cuda.current.name == "default"
    streams.hold(Lane.COMPUTE, copied)
    assert cuda.calls == [
        "default records event 0",
        "side 1 waits for event 0",
        "side 1 records event 1",
        "default waits for event 1",
    ]


def test_a_mark_is_passed_when_its_event_has_happened_and_tells_seconds(cuda: FakeCuda):
    streams = CudaStreams(CUDA)
    begun, done = streams.mark(Lane.COMPUTE), streams.mark(Lane.COMPUTE)
    first, second = cuda.events
    first.at_ms = 100.0
    assert (begun.passed, done.passed) == (True, False)
    second.at_ms = 350.0
    assert done.passed
    assert done.since(begun) == pytest.approx(0.25)


def test_the_state_of_a_gpu_is_told_from_what_the_host_knows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 80 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 << 30)
    properties = SimpleNamespace(name="Some GPU", total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_state(CUDA) == (
        "the device is Some GPU with 140.0 GiB, 80.0 GiB in use and 100.0 GiB held"
    )
    assert device_state(torch.device("cpu")) == "the device is `cpu`"
