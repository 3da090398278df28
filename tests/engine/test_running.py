"""Columns by slot against one obvious object a sequence, whoever comes, grows and leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.engine.running import Running
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.stopping import Stopping
from jobrunner.records import Request, RowId, Sampling
from tests.fakes import LetterText
from tests.properties import examples

BLOCK_SIZE = 4


@dataclass
class Reference:
    """What a sequence must be."""

    sequence: Sequence
    tokens: list[int]
    blocks: list[int]
    times: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        gaps = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
        return max(gaps, default=0.0)


class World:
    """Running sequences, each beside its reference; blocks are numbers that never repeat."""

    def __init__(self) -> None:
        self.running = Running(BLOCK_SIZE)
        self.known: list[Reference] = []
        self._blocks = iter(range(1_000_000))

    def enter(self, prompt: list[int], stop_ids: frozenset[int], least: int, most: int) -> None:
        sampling = Sampling(most, stop_ids=stop_ids, min_new_tokens=least)
        request = Request(RowId("s", len(self.known)), prompt, sampling)
        sequence = Sequence(request, Stopping(sampling, lambda: LetterText(str)), 0.0)
        sequence.blocks = [next(self._blocks) for _ in range(-(-len(prompt) // BLOCK_SIZE))]
        self.running.enter(sequence)
        # as after a prefill
        sequence.computed = len(prompt) - 1
        sequence.prefill_end = len(prompt) - 1
        self.running.decode(sequence)
        self.known.append(Reference(sequence, list(prompt), list(sequence.blocks)))

    def step(self, draws: list[int], now_s: float) -> None:
        running = self.running
        ready = running.ready()
        short = running.short_of_blocks(ready)
        blocks = [next(self._blocks) for _ in short]
        by_sequence = {id(each.sequence): each for each in self.known}
        for sequence, block in zip(
            [running.sequences[slot] for slot in short], blocks, strict=True
        ):
            by_sequence[id(sequence)].blocks.append(block)
        running.add_block(short, blocks)
        decodes = running.decodes(ready)
        tokens = np.array([draws[row % len(draws)] for row in decodes.rows], np.int64)
        references = [by_sequence[id(each)] for each in decodes.sequences]
        for place, reference in enumerate(references):
            assert decodes.starts[place] == len(reference.tokens) - 1
            assert decodes.tokens[place] == reference.tokens[-1]
            held = decodes.table[decodes.slots[place], : len(reference.blocks)].tolist()
            assert held == reference.blocks
            assert len(held) * BLOCK_SIZE >= len(reference.tokens)
        places, stopped = running.land(running.slots_of(decodes), tokens, now_s)
        ended = {}
        for place, reference in enumerate(references):
            reference.tokens.append(int(tokens[place]))
            reference.times.append(now_s)
            sampling = reference.sequence.request.sampling
            count = len(reference.tokens) - reference.sequence.prompt_length
            if tokens[place] in sampling.stop_ids and count > sampling.min_new_tokens:
                ended[place] = True
            elif count >= sampling.max_new_tokens:
                ended[place] = False
        assert {place: bool(stopped[place]) for place in places} == ended
        for place in ended:
            self.leave(references[place])

    def leave(self, reference: Reference) -> None:
        self.running.leave(reference.sequence)
        self.check(reference)
        assert reference.sequence.computed == len(reference.tokens) - 1
        assert reference.sequence.longest_gap_s == reference.longest_gap_s
        if reference.times:
            assert reference.sequence.first_token_at == reference.times[0]
            assert reference.sequence.last_token_at == reference.times[-1]
        self.known.remove(reference)

    def check(self, reference: Reference) -> None:
        assert list(reference.sequence.tokens) == reference.tokens
        assert reference.sequence.known == len(reference.tokens)
        assert reference.sequence.blocks == reference.blocks


@examples(60)
@given(st.data())
def test_columns_say_what_the_sequences_would(data):
    world = World()
    token = st.integers(0, 5)
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        for _ in range(data.draw(st.integers(0, 2))):
            world.enter(
                data.draw(st.lists(token, min_size=1, max_size=70)),
                data.draw(st.frozensets(token, max_size=3)),
                data.draw(st.integers(0, 3)),
                data.draw(st.integers(3, 80)),
            )
        if world.known and data.draw(st.booleans()):
            world.leave(data.draw(st.sampled_from(world.known)))
        if world.known and data.draw(st.booleans()):
            # whoever asks for tokens in between has them all
            world.check(data.draw(st.sampled_from(world.known)))
        now_s += data.draw(st.sampled_from([0.5, 1.0, 4.0]))
        world.step(data.draw(st.lists(token, min_size=1, max_size=5)), now_s)
        world.running.check()
    for reference in list(world.known):
        world.leave(reference)


def test_many_sequences_keep_their_own_columns():
    world = World()
    for index in range(100):
        world.enter([index] * (1 + index % 40), frozenset(), 0, 200)
    for step in range(150):
        world.step([step], float(step))
    world.running.check()
    assert len(world.running) == 100
    for reference in list(world.known):
        world.leave(reference)
    assert len(world.running) == 0


@given(st.integers(1, 12), st.data())
def test_slots_of_a_plan_are_found_after_others_left_and_came(count, data):
    world = World()
    for index in range(count):
        world.enter([index], frozenset(), 0, 50)
    world.step([1], 0.0)
    decodes = world.running.decodes(world.running.ready())
    planned = list(decodes.sequences)
    for _ in range(data.draw(st.integers(0, count))):
        world.leave(data.draw(st.sampled_from(world.known)))
    for index in range(data.draw(st.integers(0, 3))):
        world.enter([index], frozenset(), 0, 50)
    expected = [-1 if each.slot is None else each.slot for each in planned]
    assert world.running.slots_of(decodes).tolist() == expected
