"""Copies beside the computing: in the right order on the device, and no waiting on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from jobrunner.config import BatchingTable
from jobrunner.engine import loading
from jobrunner.engine.attention import choice, torch_kernels
from jobrunner.engine.attention.device_paged import DevicePagedAttention
from jobrunner.engine.attention.hook import Piece, Singles
from jobrunner.engine.block_pool import BlockPool
from jobrunner.engine.copies import Copies
from jobrunner.engine.inputs import InputSets
from jobrunner.engine.kv import AttentionCall
from jobrunner.engine.plan import Drawn, Plan
from jobrunner.engine.runner import Launched, TransformersRunner
from jobrunner.engine.streams import HostStreams, Lane, wait_for
from jobrunner.engine.swap import Copy
from jobrunner.engine.watchdog import Patience, StepLimit
from jobrunner.errors import HungError
from jobrunner.records import Request, RowId, Step
from tests.engine.fake_streams import FakeStreams, Place, fake_streams, waited_for
from tests.engine.test_transformers import MIXED, generate, greedy, open_tiny, random_prompts, serve
from tests.fakes import FakeRequests
from tests.properties import examples

__all__ = ["fake_streams"]

CPU = torch.device("cpu")
NOTHING = np.zeros(0, np.int64)


class SeenPool(BlockPool):
    """Tells the lanes which blocks it copies."""

    streams: FakeStreams

    def places(self, kind: str, numbers: Sequence[int]) -> list[Place]:
        return [(kind, id(self), int(number)) for number in numbers]

    def swap_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        reads, writes = self.places("block", blocks), self.places("host", places)
        self.streams.does("swap out", reads, writes)
        super().swap_out(blocks, places)

    def swap_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        reads, writes = self.places("host", places), self.places("block", blocks)
        self.streams.does("swap in", reads, writes)
        super().swap_in(blocks, places)


class SeenAttention(DevicePagedAttention):
    """Tells the lanes which blocks a step reads and writes."""

    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        pool = self._pool
        assert isinstance(pool, SeenPool)
        size = pool.block_size
        reads: list[int] = []
        writes: list[int] = []
        for row, length in zip(singles.rows.tolist(), singles.lengths.tolist(), strict=True):
            blocks = singles.table[row, : -(-length // size)].tolist()
            reads += blocks
            writes.append(blocks[-1])
        for piece in pieces:
            held = list(piece.blocks)[: -(-piece.stop // size)]
            reads += held
            writes += held[piece.start // size :]
        pool.streams.does("compute", pool.places("block", reads), pool.places("block", writes))
        super().begin(singles, pieces)


def watch(streams: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines with `attention="reference"` be one step ahead of a device with these lanes."""
    pools: list[SeenPool] = []

    def make_pool(*arguments: Any) -> SeenPool:
        pools.append(SeenPool(*arguments))
        pools[-1].streams = streams
        return pools[-1]

    backend = choice.Backend(make_pool, partial(SeenAttention, torch_kernels))
    monkeypatch.setattr(choice, "REFERENCE", backend)
    runner = partial(TransformersRunner, ahead=True, streams=streams)
    monkeypatch.setattr(loading, "TransformersRunner", runner)
    monkeypatch.setattr("jobrunner.engine.runner.InputSets", partial(InputSets, staged=True))
    launch, collect = TransformersRunner.launch, Launched.collect

    def launch_aloud(self: TransformersRunner, plan: Plan) -> Launched:
        streams.events.append(f"launch {plan.number}")
        launched = launch(self, plan)
        streams.events.append("launched")
        return launched

    def collect_aloud(self: Launched) -> Drawn:
        streams.events.append(f"collect {self.plan.number}")
        drawn = collect(self)
        streams.events.append("collected")
        return drawn

    monkeypatch.setattr(TransformersRunner, "launch", launch_aloud)
    monkeypatch.setattr(Launched, "collect", collect_aloud)


def serve_crowded(llama: Path, count: int = 18) -> tuple[list[Step], list[list[int]]]:
    """More rows than the memory has room for."""
    prompts = random_prompts(count)
    steps, done = serve(
        llama,
        [greedy(*row) for row in enumerate(prompts)],
        chunk_size=7,
        kv_memory=36 * 4 * open_tiny(llama).kv_bytes_per_token,
        scheduling=BatchingTable(preemption="swap"),
        ahead=False,
        attention="reference",
    )
    return steps, [list(done[index].tokens) for index in range(count)]


def test_no_step_reads_a_block_before_it_is_copied_nor_writes_one_that_still_is(
    llama: Path, fake_streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    expected = generate(llama, random_prompts(18))
    watch(fake_streams, monkeypatch)
    steps, tokens = serve_crowded(llama)
    assert tokens == expected
    # before that, a copy is tried
    serving = fake_streams.events[fake_streams.events.index("launch 1") :]
    given = {event for event in serving if ": " in event}
    assert given == {"compute: compute", "copy: swap in", "copy: swap out"}
    fake_streams.check()
    # where a step uses a block that is copied, it waits
    swaps = [step for step in steps if step.swapped_blocks]
    assert swaps
    assert any(step.swap_s >= 1 for step in swaps)


def test_lanes_that_are_never_held_are_found_out(llama: Path, monkeypatch: pytest.MonkeyPatch):
    deaf = waited_for(FakeStreams(deaf=True), monkeypatch)
    watch(deaf, monkeypatch)
    serve_crowded(llama)
    with pytest.raises(AssertionError, match="may overtake"):
        deaf.check()


def test_the_host_waits_for_nothing_but_the_step_before(
    llama: Path, fake_streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    watch(fake_streams, monkeypatch)
    serve_crowded(llama)
    doing, launched, waits = "", 0, 0
    ahead = 0
    for event in fake_streams.events:
        word, _, number = event.partition(" ")
        if word == "wait":
            assert doing.startswith("collect "), f"waited in {doing or 'planning'}"
            waits += 1
            ahead += int(doing.split()[1]) < launched
        elif word in ("launch", "collect"):
            doing = event
            launched = int(number) if word == "launch" else launched
        elif word in ("launched", "collected"):
            doing = ""
    assert waits > 20
    # with the next step already launched
    assert ahead > waits / 2


def test_a_hung_device_is_noticed_and_said(
    llama: Path, fake_streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    watch(fake_streams, monkeypatch)
    limit = StepLimit(0.01)
    monkeypatch.setattr(loading, "step_limit", lambda *_: limit)
    engine = open_tiny(llama, attention="reference").engine
    monkeypatch.setattr("jobrunner.engine.streams.sleep", lambda seconds: None)
    with pytest.raises(
        HungError, match=r"^step 1 \(.*row 3 of `s`\) is not done after 0\.0 s"
    ) as e:
        list(engine.run(FakeRequests([greedy(3, [1, 2])])))
    assert "the device is `cpu`" in str(e.value)


def test_who_waits_asks_until_patience_ends(fake_streams: FakeStreams):
    fake_streams.does("compute")
    mark = fake_streams.mark(Lane.COMPUTE)
    assert not mark.passed
    assert not wait_for(mark, Patience(-1.0))
    assert fake_streams.events == ["compute: compute"]
    assert wait_for(mark)
    assert fake_streams.events[1:] == ["wait"]
    assert wait_for(mark, Patience(-1.0)), "it has passed"


def pool_and_copies(streams: FakeStreams) -> tuple[SeenPool, Copies]:
    pool = SeenPool([AttentionCall(1, 8, 8)], 8, 2, torch.float32, CPU, 8)
    pool.streams = streams
    return pool, Copies(pool, streams)


def computes(pool: SeenPool, streams: FakeStreams, *blocks: int) -> None:
    places = pool.places("block", blocks)
    streams.does("compute", places, places)


def test_copies_wait_for_what_was_computed_before(fake_streams: FakeStreams):
    pool, copies = pool_and_copies(fake_streams)
    computes(pool, fake_streams, 1, 2)
    copies.begin([Copy([1, 2], [0, 1], out=True)], NOTHING)
    fake_streams.check()


def test_what_a_step_does_not_use_is_copied_beside_it(fake_streams: FakeStreams):
    pool, copies = pool_and_copies(fake_streams)
    used = np.array([5, 2])
    copies.begin([Copy([1, 2, 3, 4], [0, 1, 2, 3], out=True)], used)
    copies.hold_for(used)
    computes(pool, fake_streams, 2, 5)
    first, second, step = fake_streams.work
    assert [(work.what, len(work.reads)) for work in (first, second)] == [
        ("swap out", 1),
        ("swap out", 3),
    ]
    assert first.surely_before(step)
    assert not second.surely_before(step)
    fake_streams.check()
    # the next one uses another of them
    copies.hold_for(np.array([3]))
    computes(pool, fake_streams, 3)
    fake_streams.check()
    assert copies.idle


def test_a_step_that_uses_nothing_that_is_copied_is_not_held(fake_streams: FakeStreams):
    _, copies = pool_and_copies(fake_streams)
    copied = copies.begin([Copy([1], [0], out=True)], NOTHING)
    held = fake_streams.events.count("hold compute")
    copies.hold_for(np.array([2]))
    assert fake_streams.events.count("hold compute") == held == 0
    assert wait_for(copied.done)
    copies.hold_for(np.array([1]))
    assert fake_streams.events.count("hold compute") == 0, "it was done long ago"
    assert copied.seconds == 1.0


def test_copies_whose_order_matters_keep_it(fake_streams: FakeStreams):
    _, copies = pool_and_copies(fake_streams)
    plan = [
        Copy([1, 2], [0, 1], out=True),
        Copy([2, 3], [5, 6], out=False),
        Copy([4], [0], out=True),
    ]
    copies.begin(plan, np.array([4]))
    assert [work.what for work in fake_streams.work] == ["swap out", "swap in", "swap out"]


blocks = st.integers(0, 7)
moves = st.lists(
    st.tuples(
        st.lists(st.tuples(blocks, blocks), max_size=3, unique_by=lambda pair: pair[0]),
        st.booleans(),
        st.lists(blocks, max_size=3),
        st.booleans(),
    ),
    max_size=12,
)


@examples(200)
@given(moves=moves)
def test_any_copies_and_steps_are_in_order(moves: list[Any]):
    streams = FakeStreams()
    pool, copies = pool_and_copies(streams)
    memory, host = [f"b{n}" for n in range(8)], [f"h{n}" for n in range(8)]
    content = torch.arange(8.0)
    pool._pool_NE[:8] = content[:, None]
    pool._host_NE[:] = -content[:, None] - 1
    values = {f"b{n}": float(n) for n in range(8)} | {f"h{n}": -n - 1.0 for n in range(8)}
    for pairs, out, used, waits in moves:
        plan = []
        if pairs:
            plan = [Copy([one for one, _ in pairs], [other for _, other in pairs], out)]
            for block, place in pairs:
                if out:
                    host[place] = memory[block]
                else:
                    memory[block] = host[place]
        wanted = np.array(used, np.int64)
        copied = copies.begin(plan, wanted) if plan else None
        copies.hold_for(wanted)
        computes(pool, streams, *used)
        if waits and copied is not None:
            assert not copied.done.passed
            streams.sleep(0.0)
    streams.check()
    assert pool._pool_NE[:8, 0].tolist() == [values[each] for each in memory]
    assert pool._host_NE[:, 0].tolist() == [values[each] for each in host]


def test_two_sets_of_inputs_are_used_in_turns_and_none_before_its_launch_is_done(
    fake_streams: FakeStreams,
):
    inputs = InputSets(CPU, fake_streams, staged=True)
    kept = []
    for number in range(5):
        with inputs.launch():
            kept.append([inputs.put(np.full(3, number)), inputs.put(np.full((2, 2), number * 1.5))])
            fake_streams.does("compute")
        assert [kept[number][0].tolist(), kept[number][1].flatten().tolist()] == [
            [number] * 3,
            [number * 1.5] * 4,
        ]
        # waits for the launch before the last, and for no other
        assert fake_streams.events.count("wait") == max(0, number - 1)
    # what a CPU is given lies where the next but one is written
    assert [first[0].data_ptr() for first in kept[::2]] == [kept[0][0].data_ptr()] * 3
    assert kept[0][0].data_ptr() != kept[1][0].data_ptr()
    assert kept[2][0].tolist() == [4] * 3


def test_a_set_grows_and_what_was_read_from_it_stays(fake_streams: FakeStreams):
    inputs = InputSets(CPU, fake_streams, staged=True)
    with inputs.launch():
        first = inputs.put(np.arange(100))
        large = inputs.put(np.arange(300_000))
        last = inputs.put(np.arange(5, dtype=np.int32))
    assert first.tolist() == list(range(100))
    assert torch.equal(large, torch.arange(300_000))
    assert last.tolist() == list(range(5))


def test_a_failed_launch_frees_its_set_no_sooner(fake_streams: FakeStreams):
    inputs = InputSets(CPU, fake_streams, staged=True)

    def launch_and_fail() -> None:
        with inputs.launch():
            fake_streams.does("compute")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        launch_and_fail()
    for waits in (0, 1):
        with inputs.launch():
            assert fake_streams.events.count("wait") == waits


def test_on_a_cpu_numbers_stay_where_they_are():
    inputs = InputSets(CPU, HostStreams())
    numbers = np.arange(3)
    with inputs.launch():
        assert inputs.put(numbers).data_ptr() == numbers.ctypes.data


class NeverAsks(TorchFunctionMode):
    """Fails where the host would have to wait for a device: it asks for numbers, or sends a list.

    On a CPU such a wait costs nothing and would go unnoticed.
    """

    ASKING = frozenset(
        {torch.tensor, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in self.ASKING, f"{func.__name__} waits for the device"
        if func is torch.Tensor.to and "cpu" in args:
            assert kwargs.get("non_blocking"), "a copy to the host waits for the device"
        with _NeverCounts():
            return func(*args, **kwargs)


class _NeverCounts(TorchDispatchMode):
    ASKING = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in self.ASKING, f"{name} waits for the device"
        if name in ("aten::index", "aten::index_put_", "aten::index_put"):
            for index in args[1]:
                assert index is None or index.dtype != torch.bool, "a mask has to be counted"
        return func(*args, **(kwargs or {}))


def launch_without_asking(llama: Path, rows: Sequence[Request], monkeypatch: Any) -> list[Step]:
    """Serve rows with kernels that do nothing, every launch watched."""
    monkeypatch.setattr(loading, "TransformersRunner", partial(TransformersRunner, ahead=True))
    launch = TransformersRunner.launch
    launches = 0

    def watched(self: TransformersRunner, plan: Plan) -> Launched:
        nonlocal launches
        launches += 1
        with NeverAsks():
            return launch(self, plan)

    monkeypatch.setattr(TransformersRunner, "launch", watched)
    engine = open_tiny(llama, attention="reference", chunk_size=7).engine

    def nothing(self: Any, q_HTD: torch.Tensor, k_KTD: Any, v_KTW: torch.Tensor, _: Any) -> Any:
        return q_HTD.new_zeros(q_HTD.shape[1], q_HTD.shape[0], v_KTW.shape[-1])

    monkeypatch.setattr(DevicePagedAttention, "attend", nothing)
    steps = list(engine.run(FakeRequests(rows, [2] + [1] * 99)))
    assert launches > 10
    return steps


def test_a_launch_asks_nothing_of_the_device(llama: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = random_prompts(len(MIXED), seed=3)
    rows = [
        Request(RowId("s", index), prompt, replace(kind, top_p=1.0))
        for index, (prompt, kind) in enumerate(zip(prompts, MIXED, strict=True))
    ]
    assert any(row.sampling.temperature and row.sampling.top_k for row in rows)
    assert any(row.sampling.logprobs for row in rows)
    steps = launch_without_asking(llama, rows, monkeypatch)
    assert sum(len(step.completions) for step in steps) == len(rows)


def test_rows_with_top_p_do(llama: Path, monkeypatch: pytest.MonkeyPatch):
    """Whether its likeliest tokens reach top_p has to be known: a full sort costs more."""
    kind = next(kind for kind in MIXED if kind.top_p < 1)
    with pytest.raises(AssertionError, match="waits for the device"):
        launch_without_asking(llama, [Request(RowId("s", 0), [1, 2], kind)], monkeypatch)
