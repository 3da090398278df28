"""Who gives way when blocks run out, and how; and that higher bands make lower ones give way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.config import BatchingTable
from jobrunner.engine.blocks import Blocks
from jobrunner.engine.preemption import MOST_PREEMPTIONS, Costs, Preemption
from jobrunner.engine.scheduler import Drawn, Limits
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Stopping
from jobrunner.engine.strategies import make_scheduler
from jobrunner.engine.swap import HostBlocks
from tests.engine.memory_bench import MemoryBench, finished, preemptions, request
from tests.fakes import FakeRequests, LetterText
from tests.properties import examples


@pytest.fixture
def blocks() -> Blocks:
    return Blocks(100, 4)


def running(
    blocks: Blocks,
    admission: int,
    *,
    computed: int,
    most: int = 20,
    priority: int = 0,
    held: list[int] | None = None,
    preempted: int = 0,
) -> Sequence:
    """A sequence that runs, with blocks of its own for what it computed."""
    asked = request(admission, [1] * (computed + 1), most, priority=priority)
    sequence = Sequence(asked, Stopping(asked.sampling, lambda: LetterText(str)), 0.0)
    sequence.admission, sequence.slot, sequence.computed = admission, 0, computed
    sequence.preemptions = preempted
    sequence.blocks = blocks.allocate(blocks.needed(computed)) if held is None else held
    return sequence


def test_the_cheapest_to_recover_for_each_block_it_frees_goes(blocks: Blocks):
    full, begun = running(blocks, 0, computed=16), running(blocks, 1, computed=17)
    assert Preemption("recompute").choose([full, begun], blocks) is begun
    swap = Preemption("swap", HostBlocks(100))
    assert swap.choose([full, running(blocks, 2, computed=16)], blocks).admission == 2


def test_blocks_that_were_never_written_cost_nothing_to_swap(blocks: Blocks):
    written = running(blocks, 0, computed=16)
    waiting = running(blocks, 1, computed=4, held=blocks.allocate(4))
    assert Preemption("swap", HostBlocks(100)).choose([written, waiting], blocks) is waiting


def test_of_equal_ones_the_one_with_most_work_left_goes(blocks: Blocks):
    short, long = running(blocks, 1, computed=8, most=5), running(blocks, 0, computed=8, most=50)
    for mode in ("swap", "recompute", "auto"):
        assert Preemption(mode, HostBlocks(100)).choose([short, long], blocks) is long


def test_then_the_one_that_shares_least(blocks: Blocks):
    common = blocks.allocate(1)
    blocks.publish(common[0], b"common")
    sharing = [
        running(blocks, place, computed=8, held=[*blocks.match([b"common"]), *blocks.allocate(1)])
        for place in (1, 2)
    ]
    alone = running(blocks, 0, computed=4)
    assert Preemption("recompute").choose([*sharing, alone], blocks) is alone


def test_a_sequence_that_holds_nothing_alone_goes_last(blocks: Blocks):
    common = blocks.allocate(1)
    blocks.publish(common[0], b"common")
    sharing = running(blocks, 5, computed=4, held=blocks.match([b"common"]))
    assert (
        Preemption("recompute").choose([sharing, running(blocks, 0, computed=4)], blocks).admission
        == 0
    )


def slow_victim(
    sequences: list[Sequence], blocks: Blocks, mode: str, costs: Costs, protected: set[int]
) -> Sequence:
    """By the words of the rule: one list, cut down rule by rule."""
    left = [each for each in sequences if each.request.priority not in protected]
    if not left:
        return max(sequences, key=lambda each: each.admission)
    left = [each for each in left if each.preemptions < MOST_PREEMPTIONS] or left
    lowest = max(each.request.priority for each in left)
    left = [each for each in left if each.request.priority == lowest]

    def shared(each: Sequence) -> int:
        return sum(blocks.holders(block) > 1 for block in each.blocks)

    def cost(each: Sequence) -> float:
        freed = len(each.blocks) - shared(each)
        own = max(0, each.computed - 4 * shared(each))
        swap_s, recompute_s = 2 * -(-own // 4) * costs.copy_s_per_block, own * 1.0
        known = {"swap": swap_s, "recompute": recompute_s, "auto": min(swap_s, recompute_s)}
        return known[mode] / freed if freed else float("inf")

    least = min(map(cost, left))
    left = [each for each in left if cost(each) == least]
    most = max(each.length_bounds[1] - each.output_length for each in left)
    left = [each for each in left if each.length_bounds[1] - each.output_length == most]
    fewest = min(map(shared, left))
    return max((each for each in left if shared(each) == fewest), key=lambda each: each.admission)


@examples(300)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 24),
            st.sampled_from([5, 5, 9]),
            st.integers(0, 2),
            st.sampled_from([0, 0, MOST_PREEMPTIONS]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=8,
    ),
    mode=st.sampled_from(["swap", "recompute", "auto"]),
    copy_s=st.sampled_from([0.5, 2.0, 8.0]),
    protected=st.sets(st.integers(0, 2), max_size=2),
)
def test_the_victim_is_whom_the_rule_names(rows, mode, copy_s, protected):
    blocks = Blocks(200, 4)
    common = blocks.allocate(2)
    sequences = []
    for admission, (computed, most, band, preempted, shares) in enumerate(rows):
        shares = min(shares, computed // 4)
        # of the common beginning
        for block in common[:shares]:
            blocks._references[block] += 1
        held = common[:shares] + blocks.allocate(blocks.needed(computed) - shares)
        more = {"most": most, "priority": band, "preempted": preempted}
        sequences.append(running(blocks, admission, computed=computed, held=held, **more))
    costs = Costs(copy_s_per_block=copy_s, prefill_s_per_token=1.0)
    preemption = Preemption(mode, HostBlocks(100), costs=costs, protected=protected)
    found = preemption.choose(sequences, blocks)
    assert found is slow_victim(sequences, blocks, mode, costs, protected)


def test_a_lower_band_goes_first_whatever_it_costs(blocks: Blocks):
    cheap, dear = running(blocks, 0, computed=1), running(blocks, 1, computed=40, priority=3)
    assert Preemption("recompute").choose([cheap, dear], blocks) is dear


def test_a_protected_band_goes_only_where_nobody_else_is_left(blocks: Blocks):
    preemption = Preemption("recompute", protected=[3])
    safe = [running(blocks, place, computed=8, priority=3) for place in (1, 2)]
    assert preemption.choose([*safe, running(blocks, 0, computed=40)], blocks).admission == 0
    assert preemption.choose(safe, blocks).admission == 2


def test_a_row_that_was_preempted_often_goes_only_where_nobody_else_is_left(blocks: Blocks):
    worn = running(blocks, 0, computed=1, preempted=MOST_PREEMPTIONS)
    other = running(blocks, 1, computed=40, preempted=MOST_PREEMPTIONS - 1)
    assert Preemption("recompute").choose([worn, other], blocks) is other
    assert Preemption("recompute").choose([worn], blocks) is worn


def test_auto_takes_what_costs_less(blocks: Blocks):
    def swaps(copy_s: float, prefill_s: float) -> bool:
        costs = Costs(copy_s_per_block=copy_s, prefill_s_per_token=prefill_s)
        victim = running(blocks, 0, computed=16)
        return Preemption("auto", HostBlocks(100), costs=costs).swaps(victim, blocks)

    # four blocks there and back, or sixteen tokens
    assert swaps(copy_s=1.9, prefill_s=1.0)
    assert not swaps(copy_s=2.1, prefill_s=1.0)


def test_nothing_is_swapped_that_does_not_fit_or_holds_nothing(blocks: Blocks):
    assert not Preemption("swap", HostBlocks(3)).swaps(running(blocks, 0, computed=16), blocks)
    assert Preemption("swap", HostBlocks(4)).swaps(running(blocks, 0, computed=16), blocks)
    assert not Preemption("swap", HostBlocks(4)).swaps(running(blocks, 0, computed=0), blocks)
    assert not Preemption("recompute", HostBlocks(4)).swaps(running(blocks, 0, computed=16), blocks)


def test_costs_are_learnt_from_the_steps():
    costs = Costs(copy_s_per_block=9.0, prefill_s_per_token=9.0)
    costs.observe(copied_blocks=4, copy_s=2.0, prefill_tokens=0, compute_s=1.0)
    assert costs.copy_s_per_block == 0.5
    for _ in range(60):
        # a second of decoding is in it
        costs.observe(copied_blocks=0, copy_s=0.0, prefill_tokens=10, compute_s=6.0)
    assert costs.prefill_s_per_token == pytest.approx(0.5)
    for _ in range(60):
        costs.observe(copied_blocks=1, copy_s=3.0, prefill_tokens=0, compute_s=0.0)
    assert costs.copy_s_per_block == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("host", [0, 50])
def test_a_higher_band_takes_the_slot_of_a_lower_one(host: int):
    bench = MemoryBench(blocks=50, host=host, batch=2)
    low = [request(index, [index] * 4, 30, priority=1) for index in range(3)]
    high = request(9, [9] * 4, 3)
    # the high one comes while two low ones run
    steps = bench.serve([*low[:2], high, low[2]], [2, 0, 0, 2])
    assert preemptions(steps) == 1
    assert next(iter(finished(steps))) == 9
    assert (sum(step.tokens_recomputed for step in steps) > 0) == (host == 0)


def test_a_higher_band_takes_the_memory_of_lower_ones():
    bench = MemoryBench(blocks=12, host=50, batch=4)
    low = [request(index, [index] * 8, 20, priority=1) for index in range(3)]
    steps = bench.serve([*low, request(9, [9] * 20, 2)], [3, 0, 1])
    assert next(iter(finished(steps))) == 9
    assert sum(step.tokens_recomputed for step in steps) == 0


def test_nobody_gives_way_to_its_own_band_or_for_nothing():
    same = MemoryBench(blocks=50, batch=2)
    steps = same.serve([request(index, [index] * 4, 9) for index in range(3)], [2, 0, 1])
    assert preemptions(steps) == 0
    # more than there is, whoever goes
    bench = MemoryBench(blocks=8, batch=3)
    rows = [
        request(0, [0] * 14, 14, priority=0),
        request(1, [1] * 4, 4, priority=2),
        request(2, [2] * 28, 2, priority=1),
    ]
    assert preemptions(bench.serve(rows, [2, 0, 0, 1])) == 0


def test_a_protected_band_does_not_give_way_to_a_higher_one():
    bench = MemoryBench(blocks=50, batch=1, protected=[1])
    steps = bench.serve([request(0, [1], 9, priority=1), request(1, [2], 2)], [1, 0, 1])
    assert preemptions(steps) == 0
    assert list(finished(steps)) == [0, 1]


@examples(60)
@given(
    high=st.lists(st.integers(1, 6), min_size=10, max_size=60),
    low=st.integers(1, 3),
    batch=st.integers(1, 3),
    host=st.sampled_from([0, 3, 100]),
)
def test_a_row_gives_way_to_higher_bands_only_so_often(high, low, batch, host):
    bench = MemoryBench(blocks=40, host=host, batch=batch)
    rows = [request(index, [index] * 3, 20, priority=1) for index in range(low)]
    rows += [request(100 + place, [7], most) for place, most in enumerate(high)]
    seen: dict[int, int] = {}
    steps = []
    for step in bench.engine.run(FakeRequests(rows, [low] + [0, 1] * len(high))):
        bench.scheduler.check()
        steps.append(step)
        for sequence in bench.scheduler.unfinished():
            seen[sequence.request.id.index] = sequence.preemptions
    assert max(seen.values(), default=0) <= MOST_PREEMPTIONS
    done = finished(steps)
    assert all(list(done[each.id.index].tokens) == bench.runner.alone(each) for each in rows)


@examples(150)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(1, 25)),
        min_size=1,
        max_size=25,
    ),
    batch=st.integers(1, 4),
    limit_s=st.integers(1, 20),
)
def test_a_row_that_starvation_lifted_gives_way_to_no_band(rows, batch, limit_s):
    batching = BatchingTable(order="input", starvation_limit=f"{limit_s}s", prefix_cache=False)
    # memory for all: whoever is preempted gave way to a higher band
    blocks, limits = Blocks(1000, 4, prefix_cache=False), Limits(batch, 64, 64, 99)
    scheduler = make_scheduler(batching, blocks, limits, lambda: LetterText(str))
    done: set[int] = set()
    ran: list[Sequence] = []
    for now in range(2000):
        for index, (at, band, most) in enumerate(rows):
            if at == now:
                scheduler.add(request(index, [index], most, priority=band), float(now))
        plan = scheduler.plan(float(now))
        for sequence in ran:
            if sequence.slot is None and sequence.request.id.index not in done:
                assert now - sequence.arrived_at <= limit_s
        ran = [chunk.sequence for chunk in plan.chunks]
        drawn = Drawn([1] * sum(chunk.samples for chunk in plan.chunks))
        ended = scheduler.commit(plan, drawn, float(now))
        done |= {each.id.index for each in (*plan.completions, *ended)}
        if len(done) == len(rows):
            break
    assert len(done) == len(rows)
