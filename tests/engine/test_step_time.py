"""What a step takes of a device that copies beside its computing, worked out by hand.

Each lane does its work as early as it may; a block takes 3 s to copy, a step 10 s to compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobrunner.engine.attention.hook import Piece, Singles
from jobrunner.engine.kv import AttentionCall, KvPool
from jobrunner.engine.plan import Chunk, Drawn, Plan
from jobrunner.engine.runner import TransformersRunner
from jobrunner.engine.sequence import Sequence as Text
from jobrunner.engine.stopping import Stopping
from jobrunner.engine.streams import Lane
from jobrunner.engine.swap import Copy
from jobrunner.records import Request, RowId, Sampling, Step
from tests.engine.test_pipeline import Bench, endless
from tests.fakes import FakeDevice, Launch, LetterText

CPU = torch.device("cpu")
BLOCK_COPY_S, COMPUTE_S = 3.0, 10.0


@dataclass(frozen=True)
class TimedMark:
    streams: TimedStreams
    at_s: float

    @property
    def passed(self) -> bool:
        self.streams.asked_s = self.at_s
        return self.at_s <= self.streams.now_s

    def since(self, earlier: TimedMark) -> float:
        assert max(self.at_s, earlier.at_s) <= self.streams.now_s, "nobody knows yet"
        return self.at_s - earlier.at_s


class TimedStreams:
    """Lanes that are busy until some time; the host launches in no time, and waits by `sleep`."""

    def __init__(self) -> None:
        self.now_s = self.asked_s = 0.0
        self._lane = Lane.COMPUTE
        self._free_at_s = dict.fromkeys(Lane, 0.0)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, self._lane = self._lane, lane
        yield
        self._lane = before

    def mark(self, lane: Lane) -> TimedMark:
        return TimedMark(self, max(self.now_s, self._free_at_s[lane]))

    def hold(self, lane: Lane, mark: TimedMark) -> None:
        self._free_at_s[lane] = max(self._free_at_s[lane], mark.at_s)

    def does(self, seconds: float) -> None:
        self._free_at_s[self._lane] = max(self.now_s, self._free_at_s[self._lane]) + seconds

    def sleep(self, seconds: float) -> None:
        self.now_s = max(self.now_s, self.asked_s)


class TimedPool(KvPool):
    """Takes its time for every block."""

    streams: TimedStreams

    def swap_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        self.streams.does(BLOCK_COPY_S * len(blocks))

    def swap_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        self.streams.does(BLOCK_COPY_S * len(blocks))


class TimedModel(torch.nn.Module):
    """Takes its time for every pass."""

    def __init__(self, streams: TimedStreams) -> None:
        super().__init__()
        self._streams = streams

    def forward(self, *, logits_to_keep: torch.Tensor, **given: Any) -> Any:
        self._streams.does(COMPUTE_S)
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 5))


class NoAttention:
    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        pass


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> TransformersRunner:
    streams = TimedStreams()
    monkeypatch.setattr("jobrunner.engine.streams.sleep", streams.sleep)
    pool = TimedPool([AttentionCall(1, 8, 8)], 8, 2, torch.float32, CPU, 8)
    pool.streams = streams
    model = TimedModel(streams)
    return TransformersRunner(model, NoAttention(), CPU, pool, ahead=True, streams=streams)


def plan_of(*copies: Copy, uses: Sequence[int] = ()) -> Plan:
    """Compute a row whose tokens lie in these blocks, if any, after these copies."""
    if not uses:
        return Plan(copies=copies)
    sampling = Sampling(1)
    prompt = [1] * 2 * len(uses)
    text = Text(
        Request(RowId("s", 0), prompt, sampling), Stopping(sampling, lambda: LetterText(str)), 0.0
    )
    text.blocks = list(uses)
    return Plan(prefills=[Chunk(text, 0, len(prompt), samples=True)], copies=copies)


def out(*blocks: int) -> Copy:
    return Copy(blocks, blocks, out=True)


def seconds(drawn: Drawn) -> tuple[float, float, float]:
    return drawn.copy_s, drawn.held_s, drawn.compute_s


def test_a_step_without_copies_computes_and_no_more(runner: TransformersRunner):
    first, second = runner.launch(plan_of(uses=[1])), runner.launch(plan_of(uses=[1]))
    assert seconds(first.collect()) == (0, 0, 10)
    assert seconds(second.collect()) == (0, 0, 10)


def test_what_is_copied_beside_the_computing_does_not_make_the_step_longer(
    runner: TransformersRunner,
):
    # 2 is copied in 3 s, then 3 and 4 while the step computes
    assert seconds(runner.run(plan_of(out(2, 3, 4), uses=[2]))) == (9, 3, 10)
    # none of them is used
    assert seconds(runner.run(plan_of(out(2, 3), uses=[1]))) == (6, 0, 10)
    # all of them are
    assert seconds(runner.run(plan_of(out(2, 3), uses=[2, 3]))) == (6, 6, 10)


def test_a_step_waits_for_what_the_step_before_still_copies(runner: TransformersRunner):
    # copies until 15 s, computes until 10 s
    first = runner.launch(plan_of(out(2, 3, 4, 5, 6), uses=[1]))
    # computes from 15 s
    second = runner.launch(plan_of(uses=[4]))
    assert seconds(first.collect()) == (15, 0, 10)
    assert seconds(second.collect()) == (0, 5, 10)


def test_copies_alone_take_nothing_of_the_computing(runner: TransformersRunner):
    assert seconds(runner.run(plan_of(out(2, 3)))) == (6, 0, 0)


class CopyingDevice(FakeDevice):
    """Tells of each step that it copied for 9 s, of which it computed nothing for 3 s."""

    def collect(self, launch: Launch) -> Drawn:
        drawn = super().collect(launch)
        return Drawn(drawn.tokens, drawn.logprobs, copy_s=9.0, held_s=3.0, compute_s=10.0)


def test_a_step_of_the_engine_takes_what_it_computed_and_waited_for_copies():
    bench = Bench(make_device=CopyingDevice, step_s=13.0)
    steps: list[Step] = bench.serve([endless(0, 4)])
    assert {(step.forward_s, step.swap_s) for step in steps} == {(13.0, 3.0)}
    assert sum(step.forward_s for step in steps) == bench.clock.now
