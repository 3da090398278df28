"""Swapping blocks to host memory and back: no token is lost, computed twice or mixed up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.block_pool import BlockPool, shared_runs
from jobrunner.engine.kv import AttentionCall, KvPool, runs
from jobrunner.engine.swap import HostBlocks
from tests.engine.memory_bench import MemoryBench, finished, preemptions, request
from tests.properties import examples

SETTINGS = examples(150)
STOP_IDS = frozenset({0})

rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(1, 25),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=10,
)


@SETTINGS
@given(
    rows=rows,
    arrivals=st.lists(st.integers(0, 3), max_size=20),
    blocks=st.integers(1, 14),
    host=st.sampled_from([0, 1, 2, 5, 100]),
    mode=st.sampled_from(["swap", "recompute", "auto"]),
    block_size=st.integers(1, 6),
    batch=st.integers(1, 5),
    budget=st.integers(5, 20),
    chunk=st.integers(1, 20),
    prefix_cache=st.booleans(),
    protected=st.sets(st.integers(0, 2)),
)
def test_every_row_ends_with_the_tokens_it_gets_alone(
    rows, arrivals, blocks, host, mode, block_size, batch, budget, chunk, prefix_cache, protected
):
    bench = MemoryBench(
        blocks=blocks,
        host=host,
        mode=mode,
        block_size=block_size,
        batch=batch,
        budget=budget,
        chunk=chunk,
        prefix_cache=prefix_cache,
        protected=tuple(protected),
    )
    requests = [
        request(index, prompt, most, stop_ids=STOP_IDS, priority=priority)
        for index, (prompt, most, priority) in enumerate(rows)
    ]
    steps = bench.serve(requests, arrivals)
    done = finished(steps)
    assert sorted(done) == list(range(len(rows)))
    for each in requests:
        expected = bench.runner.alone(each)
        if len(each.prompt) + len(expected) - 1 > blocks * block_size:
            assert done[each.id.index].error is not None
        else:
            assert list(done[each.id.index].tokens) == expected
    if mode == "swap" and host == 100:
        assert sum(step.tokens_recomputed for step in steps) == 0
    if mode == "recompute" or host == 0:
        assert sum(step.swapped_blocks for step in steps) == 0


def crowded(**more):
    """Three rows of 8 + 12 tokens in memory for two of them."""
    bench = MemoryBench(blocks=10, batch=3, **more)
    return bench, [request(index, [index] * 8, 12) for index in range(3)]


def test_a_swapped_row_goes_on_where_it_stopped_and_nothing_is_computed_twice():
    bench, requests = crowded(host=20)
    steps = bench.serve(requests)
    assert preemptions(steps) > 0
    assert bench.runner.tokens_computed == 3 * (8 + 12 - 1)
    assert sum(step.tokens_recomputed for step in steps) == 0
    assert sum(step.output_tokens for step in steps) == 3 * 12


def test_each_swapped_block_is_copied_out_and_back_once():
    bench, requests = crowded(host=20)
    steps = bench.serve(requests)
    copied = [step.swapped_blocks for step in steps if step.swapped_blocks]
    assert len(copied) == 2 * preemptions(steps)
    assert sum(copied) % 2 == 0


def test_a_row_without_room_in_host_memory_is_computed_again():
    bench, requests = crowded(host=2)
    steps = bench.serve(requests)
    assert preemptions(steps) > 0
    assert sum(step.tokens_recomputed for step in steps) > 0
    assert sum(step.swapped_blocks for step in steps) == 0


def test_a_swapped_row_resumes_as_a_decode():
    bench, requests = crowded(host=20)
    done = finished(bench.serve(requests))
    assert [done[index].chunks for index in range(3)] == [1, 1, 1]


def test_blocks_that_the_prefix_cache_still_has_are_not_copied_back():
    bench = MemoryBench(blocks=7, host=20, batch=2, prefix_cache=True)
    two = [
        request(index, [7] * 9, 12, temperature=1.0, draw_key=bytes([index])) for index in range(2)
    ]
    steps = bench.serve(two, [1, 1])
    assert preemptions(steps) == 1
    out, *back = [step.swapped_blocks for step in steps if step.swapped_blocks]
    # the other row holds the blocks of the shared prompt all the while
    assert sum(back) <= out - 2
    assert sum(step.tokens_recomputed for step in steps) == 0


def test_a_row_swapped_out_in_its_prompt_goes_on_with_the_rest_of_it():
    bench = MemoryBench(blocks=6, host=20, batch=2, budget=3, chunk=2)
    steps = bench.serve([request(0, [5] * 4, 12), request(1, [6] * 14, 3)])
    assert preemptions(steps) == 1
    assert sum(step.swapped_blocks for step in steps) == 2 * 3
    assert bench.runner.tokens_computed == (4 + 11) + (14 + 2)


def test_more_host_memory_than_there_is_cannot_be_taken():
    host = HostBlocks(2)
    with pytest.raises(ValueError, match="3 blocks of host memory wanted, 2 free"):
        host.take(3)
    assert host.free == 2


def test_neighbours_are_handed_out_together():
    host = HostBlocks(8)
    first, second = host.take(3), host.take(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    host.give_back(first)
    assert host.take(3) == [0, 1, 2]


@pytest.mark.parametrize("make_pool", [KvPool, BlockPool])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_blocks_come_back_from_host_memory_as_they_were(make_pool, at_once: int, monkeypatch):
    block_bytes = (2 * 6 + 6) * 4 * 4
    monkeypatch.setattr("jobrunner.engine.kv._COPIED_BYTES", at_once * block_bytes)
    swap_back_and_forth(make_pool)


def test_large_blocks_come_back_without_a_detour(monkeypatch):
    monkeypatch.setattr("jobrunner.engine.block_pool._STAGED_BELOW_BYTES", 0)
    swap_back_and_forth(BlockPool)


def swap_back_and_forth(make_pool) -> None:
    calls = [AttentionCall(2, 3, 3), AttentionCall(1, 4, 2)]
    pool = make_pool(calls, 6, 4, torch.float32, torch.device("cpu"), host_block_count=5)
    for tensor in [*pool.keys, *pool.values]:
        tensor.normal_()
    before = [tensor.clone() for tensor in [*pool.keys, *pool.values]]
    pool.swap_out([5, 0, 3], [4, 1, 2])
    pool.swap_in([1, 2, 4], [4, 1, 2])
    for tensor, then in zip([*pool.keys, *pool.values], before, strict=True):
        assert torch.equal(tensor[:, [1, 2, 4]], then[:, [5, 0, 3]])
        assert torch.equal(tensor[:, [0, 3, 5]], then[:, [0, 3, 5]])


def test_a_block_of_the_gpu_layout_is_one_run_of_memory_with_keys_before_values():
    calls = [AttentionCall(2, 3, 3), AttentionCall(1, 4, 2)]
    pool = BlockPool(calls, 2, 4, torch.float32, torch.device("cpu"), host_block_count=1)
    parts = [pool.keys[0], pool.values[0], pool.keys[1], pool.values[1]]
    for number, part in enumerate(parts):
        part[:, 1] = number
    pool.swap_out([1], [0])
    assert pool._host_NE[0].tolist() == [0] * 24 + [1] * 24 + [2] * 16 + [3] * 8


def test_pairs_that_go_on_together_are_one_copy():
    assert shared_runs([], []) == []
    assert shared_runs([4, 5, 6, 7, 3], [0, 1, 5, 6, 7]) == [(4, 0, 2), (6, 5, 2), (3, 7, 1)]


def test_numbers_that_follow_each_other_are_one_run():
    assert runs([]) == []
    assert runs([4, 5, 6, 2, 3, 9]) == [(0, 4, 7), (3, 2, 4), (5, 9, 10)]
