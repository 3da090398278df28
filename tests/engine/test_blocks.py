"""Blocks: counts, sharing, eviction; no tensors."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.blocks import Blocks, chain_digest


def chain(*blocks: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    for tokens in blocks:
        digests.append(chain_digest(digests[-1] if digests else b"", array("q", tokens)))
    return digests


def publish(blocks: Blocks, digests: list[bytes]) -> list[int]:
    held = blocks.allocate(len(digests))
    for block, digest in zip(held, digests, strict=True):
        blocks.publish(block, digest)
    return held


def test_needed_blocks_at_the_edges_of_a_block():
    blocks = Blocks(4, 16)
    assert [blocks.needed(tokens) for tokens in (0, 1, 15, 16, 17)] == [0, 1, 1, 1, 2]


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="0 of 16 tokens"):
        Blocks(0, 16)


def test_allocating_more_than_there_is_changes_nothing():
    blocks = Blocks(2, 4)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        blocks.allocate(3)
    assert blocks.free == 2


def test_the_longest_published_prefix_is_matched():
    blocks = Blocks(8, 2)
    digests = chain([1, 2], [3, 4], [5, 6])
    held = publish(blocks, digests)
    other = chain([1, 2], [3, 4], [9, 9])
    assert blocks.match(other) == held[:2]
    assert [blocks.holders(block) for block in held] == [2, 2, 1]
    blocks.check()


def test_equal_tokens_behind_another_beginning_do_not_match():
    blocks = Blocks(8, 2)
    publish(blocks, chain([1, 2], [3, 4]))
    assert blocks.match(chain([0, 2], [3, 4])) == []


def test_a_released_prefix_stays_known_and_counts_as_free():
    blocks = Blocks(3, 2)
    digests = chain([1, 2], [3, 4])
    held = publish(blocks, digests)
    blocks.release(held)
    assert (blocks.free, blocks.used) == (3, 0)
    assert blocks.match(digests) == held
    assert blocks.free == 1
    blocks.check()


def test_the_block_released_longest_ago_is_evicted_first_and_ends_before_beginnings():
    blocks = Blocks(4, 2)
    old, new = chain([1, 1], [2, 2]), chain([3, 3], [4, 4])
    held_old, held_new = publish(blocks, old), publish(blocks, new)
    blocks.release(held_old)
    blocks.release(held_new)
    assert blocks.allocate(1) == [held_old[1]]
    assert blocks.match(old) == held_old[:1]
    assert blocks.match(new) == held_new
    blocks.check()


def test_of_two_equal_blocks_the_older_stays_published():
    blocks = Blocks(4, 2)
    digests = chain([1, 2])
    older = publish(blocks, digests)
    younger = publish(blocks, digests)
    blocks.release(younger)
    assert blocks.match(digests) == older
    blocks.check()


def test_without_prefix_cache_nothing_is_published():
    blocks = Blocks(4, 2, prefix_cache=False)
    digests = chain([1, 2])
    blocks.release(publish(blocks, digests))
    assert blocks.match(digests) == []


@given(
    count=st.integers(1, 6),
    actions=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=60),
)
def test_any_order_of_use_keeps_the_accounts(count: int, actions: list[tuple[int, int]]):
    """Random owners take, match, publish and release; a list of owners is the reference."""
    blocks = Blocks(count, 1)
    owners: list[list[int]] = []
    for action, number in actions:
        digests = chain(*([token] for token in range(number)))
        if action == 0:
            matched = blocks.match(digests)
            if len(digests) - len(matched) > blocks.free:
                blocks.release(matched)
                continue
            held = matched + blocks.allocate(len(digests) - len(matched))
            for block, digest in zip(held, digests, strict=True):
                blocks.publish(block, digest)
            owners.append(held)
        elif action == 1 and blocks.free >= number:
            owners.append(blocks.allocate(number))
        elif owners:
            blocks.release(owners.pop(number % len(owners)))
        blocks.check()
        expected = [sum(block in owner for owner in owners) for block in range(count)]
        assert [blocks.holders(block) for block in range(count)] == expected
        assert blocks.used == len({block for owner in owners for block in owner})
