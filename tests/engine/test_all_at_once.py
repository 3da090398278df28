"""Whatever comes over a job at once, every row gets the tokens that it gets alone, and all ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jobrunner.config import BatchingTable
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.duplicates import Duplicates
from jobrunner.engine.engine import Engine
from jobrunner.engine.scheduler import Limits
from jobrunner.engine.strategies import make_scheduler
from jobrunner.records import Completion, Request, RowId, Sampling
from tests.engine.test_shortage import ShortDevice
from tests.fakes import FakeRequests, LetterText, StillClock
from tests.properties import examples

# no storm takes a third of them
MOST_STEPS = 10_000


@dataclass(frozen=True)
class Turn:
    """What happens after a step: new limits, other memory for steps, rows that are given back."""

    limits: Limits | None = None
    most_tokens: int | None = None
    withdraws: bool = False


@dataclass(frozen=True)
class Machine:
    """What the rows are served with."""

    batching: dict[str, Any]
    limits: Limits
    blocks: int
    block_size: int
    host: int
    ahead: bool
    foresight: bool
    remembered: int | None
    hitches: int
    seed: int


limits_strategy = st.builds(
    lambda batch, over, chunk, lookahead, every: Limits(
        batch, batch + over, min(chunk, batch + over), lookahead, every
    ),
    batch=st.sampled_from([1, 1, 2, 3, 4, 6]),
    over=st.sampled_from([0, 1, 4, 16]),
    chunk=st.integers(1, 16),
    lookahead=st.integers(1, 9),
    every=st.sampled_from([1, 1, 3]),
)
batching_strategy = st.builds(
    dict,
    policy=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    order=st.sampled_from(["auto", "input", "longest", "shortest", "prefix"]),
    preemption=st.sampled_from(["swap", "recompute", "auto"]),
    prefix_cache=st.sampled_from([True, True, False]),
    not_preemptible=st.sets(st.integers(0, 3), max_size=2).map(sorted),
    starvation_limit=st.sampled_from(["1s", "5s", "30s", "600s"]),
    reserve=st.sampled_from(["auto", 0.0, 0.4]),
    gate=st.sampled_from(
        [
            {},
            {},
            {"max_queue_delay": "4s"},
            {"max_queue_delay": "20s", "preferred_batch_size": 2},
            {"max_queue_delay": "20s", "preferred_batch_size": 5},
        ]
    ),
)
machines = st.builds(
    Machine,
    batching=batching_strategy,
    limits=limits_strategy,
    blocks=st.integers(3, 24),
    block_size=st.integers(1, 5),
    host=st.sampled_from([0, 2, 6, 60]),
    ahead=st.booleans(),
    foresight=st.booleans(),
    remembered=st.sampled_from([None, None, 0, 30, 1000]),
    hitches=st.integers(0, 2),
    seed=st.integers(0, 9),
)
turns = st.lists(
    st.builds(
        Turn,
        limits=st.none() | limits_strategy,
        most_tokens=st.sampled_from([None, None, None, 1, 3, 8, 100]),
        withdraws=st.sampled_from([False] * 5 + [True]),
    ),
    max_size=30,
)


def rows_of(
    beginning: st.SearchStrategy[tuple[int, int]], length: st.SearchStrategy[int]
) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Rows that begin with a token, so many times, and generate so many."""
    row = st.builds(
        dict,
        beginning=beginning,
        tail=st.lists(st.integers(0, 1), max_size=4),
        known=st.sampled_from([0] * 5 + [1, 3]),
        priority=st.integers(0, 3),
        max_new_tokens=length,
        stop_ids=st.sampled_from([frozenset[int](), frozenset({0})]),
        min_new_tokens=st.sampled_from([0, 0, 3]),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        draw_key=st.sampled_from([b"one", b"other"]),
        repetition_penalty=st.sampled_from([1.0] * 7 + [1.5]),
        logprobs=st.sampled_from([None, None, 2]),
    )
    return st.lists(row, min_size=1, max_size=14)


rows_strategy = rows_of(st.tuples(st.integers(0, 1), st.integers(0, 12)), st.integers(1, 14)) | (
    # all wait for the prefix of one that is soon done
    rows_of(st.tuples(st.just(0), st.sampled_from([8, 12])), st.sampled_from([1, 2, 5]))
)


class Storm:
    """Serves rows while turns come over an engine that is checked after every step."""

    def __init__(self, machine: Machine) -> None:
        self._clock = StillClock()
        more = dict(machine.batching)
        batching = BatchingTable(**more.pop("gate"), **more)
        pool = Blocks(machine.blocks, machine.block_size, batching.prefix_cache)
        self._scheduler = make_scheduler(
            batching,
            pool,
            machine.limits,
            lambda: LetterText(lambda token: f"{token} "),
            host_blocks=machine.host,
            ahead=machine.foresight,
        )
        self.device = ShortDevice(
            pool,
            self._clock,
            ahead=machine.ahead,
            step_s=1.0,
            vocabulary=range(8),
            hitches=machine.hitches,
            seed=machine.seed,
        )
        remembered = machine.remembered
        self._duplicates = None if remembered is None else Duplicates(remembered)
        self._engine = Engine(
            self._scheduler, self.device, self._clock, duplicates=self._duplicates
        )

    def serve(
        self, requests: Sequence[Request], arrivals: Sequence[int], turns: Sequence[Turn]
    ) -> list[Completion]:
        source, turn = Source(self._clock, requests, arrivals), iter(turns)
        done: list[Completion] = []
        for steps, step in enumerate(self._engine.run(source)):
            assert steps < MOST_STEPS, "steps are made, and nothing goes on"
            self._check()
            done += step.completions
            self._take(next(turn, Turn()), source)
            self._check()
        assert self._scheduler.blocks.used == 0
        host = self._scheduler._preemption.host
        assert host.free == host.count
        return done

    def _take(self, turn: Turn, source: Source) -> None:
        if turn.limits is not None:
            # no fewer tokens than there are running rows
            budget = max(turn.limits.token_budget, self._scheduler.running)
            self._scheduler.retune(replace(turn.limits, token_budget=budget))
        if turn.most_tokens is not None:
            self.device._most_tokens = turn.most_tokens
        if turn.withdraws:
            source.give_back(self._engine.withdraw())

    def _check(self) -> None:
        self._scheduler.check()
        if self._duplicates is not None:
            self._duplicates.check()


class Source(FakeRequests):
    """A source in which waiting takes its time, and that takes rows back."""

    def __init__(self, clock: StillClock, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock = clock

    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s)
        self._clock.now += timeout_s

    def give_back(self, requests: Sequence[Request]) -> None:
        self._requests[:0] = requests


def requests_of(drawn: Sequence[dict[str, Any]], device: ShortDevice) -> list[Request]:
    """The drawn rows; some go on with tokens of an earlier run."""
    requests = []
    for index, row in enumerate(drawn):
        row = dict(row)
        (token, length), tail = row.pop("beginning"), row.pop("tail")
        known, priority = row.pop("known"), row.pop("priority")
        prompt = [token] * length + tail or [1]
        request = Request(RowId("s", index), prompt, Sampling(**row), priority=priority)
        if known:
            output = device.alone(request)[:known]
            logprobs = device.alone_logprobs(request)[:known]
            request = replace(request, output=output, logprobs=logprobs)
        requests.append(request)
    return requests


@examples(60)
@given(
    machine=machines,
    drawn=rows_strategy,
    arrivals=st.lists(st.integers(0, 3), max_size=20),
    turns=turns,
)
def test_every_row_gets_its_tokens_whatever_comes_over_the_job(machine, drawn, arrivals, turns):
    storm = Storm(machine)
    requests = requests_of(drawn, storm.device)
    ended = storm.serve(requests, arrivals, turns)
    assert sorted(each.id.index for each in ended) == list(range(len(requests)))
    done = {completion.id.index: completion for completion in ended}
    capacity = machine.blocks * machine.block_size
    for request in requests:
        found, expected = done[request.id.index], storm.device.alone(request)
        if found.error is None:
            assert list(found.tokens) == expected
            assert list(found.logprobs) == storm.device.alone_logprobs(request)
        else:
            assert found.error.kind == "cannot_fit"
            assert len(request.prompt) + len(expected) - 1 > capacity
