"""Keep the running sequences in slots. Knows no queue, no budget and no tensors.

What changes with every token of a sequence that decodes stands in columns by slot, so that a
step goes over arrays and touches a sequence only where something happens to it. A sequence that
decodes reads these facts through its slot (see `Sequence`); they go back to it when it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from jobrunner.engine.plan import Decodes
from jobrunner.engine.sequence import Sequence

Numbers = np.ndarray

# the newest tokens of a text stay in its slot until there are so many
_RECENT = 128
_NO_TOKEN = -1
_FIRST_SLOTS, _FIRST_BLOCKS = 16, 8


class Running:
    """Sequences by slot; slots are given up by swap-remove.

    Columns, `[slots]`: tokens `known`, and those `unknown` that a device draws, of which the last
    is its `drawn_at`-th; tokens that the sequence itself `holds`; how many it may have at most,
    `end`, and how many it has before a stop id counts, `least`; tokens for which it has `room`
    in its blocks; whether it `decodes`; whether it is `watched`, told of each token, and its
    draws are `ruled`; the place of its `row`; the number of its `entry` among all, -1 in a slot
    that nobody has. Times in seconds, NaN where there is none.
    """

    _COLUMNS = (
        "known", "unknown", "drawn_at", "holds", "end", "least", "room", "decodes", "watched",
        "ruled", "row", "entry",
    )  # fmt: skip
    _TIMES = ("first_at", "last_at", "gap")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sequences: list[Sequence] = []
        # those that do not decode yet, in the order in which they came
        self._prefilling: dict[Sequence, None] = {}
        self._numbers = np.zeros((len(self._COLUMNS), _FIRST_SLOTS), np.int64)
        self._seconds = np.zeros((len(self._TIMES), _FIRST_SLOTS))
        self._recent = np.zeros((_FIRST_SLOTS, _RECENT), np.int64)
        self._stop_ids = np.full((_FIRST_SLOTS, 1), _NO_TOKEN, np.int64)
        self._table = np.zeros((_FIRST_SLOTS, _FIRST_BLOCKS), np.int32)
        self._objects = np.empty(_FIRST_SLOTS, object)
        # how many have come so far
        self._entries = 0
        self._name_columns()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def sequences(self) -> Seq[Sequence]:
        """By slot."""
        return self._sequences

    @property
    def prefilling(self) -> list[Sequence]:
        """Those that do not decode yet, by admission."""
        return list(self._prefilling)

    def lengths(self) -> Numbers:
        """Tokens of each, by slot, unknown ones included."""
        count = len(self)
        lengths: Numbers = self._known[:count] + self._unknown[:count]
        return lengths

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence the next slot."""
        slot = len(self._sequences)
        if slot == len(self._objects):
            self._widen()
        self._sequences.append(sequence)
        self._objects[slot] = sequence
        sampling, start = sequence.request.sampling, sequence.prompt_length
        self._numbers[:, slot] = (
            sequence.known, 0, -1, sequence.known, start + sampling.max_new_tokens,
            start + sampling.min_new_tokens, 0, False, sequence.watched, sequence.ruled,
            sequence.request.id.index, self._entries,
        )  # fmt: skip
        self._entries += 1
        self._set_stop_ids(slot, () if sequence.watched else tuple(sampling.stop_ids))
        sequence.slot = slot
        self._prefilling[sequence] = None
        if sequence.decoding:
            self.decode(sequence)

    def decode(self, sequence: Sequence) -> None:
        """Take it that a sequence, all of whose tokens are computed but the last, now decodes."""
        slot = sequence.slot
        assert slot is not None
        del self._prefilling[sequence]
        known = sequence.known
        self._known[slot] = self._holds[slot] = known
        self._recent[slot, (known - 1) % _RECENT] = sequence.tokens[-1]
        self._seconds[:, slot] = (
            math.nan if sequence.first_token_at is None else sequence.first_token_at,
            math.nan if sequence.last_token_at is None else sequence.last_token_at,
            sequence.longest_gap_s,
        )
        self._decodes[slot] = True
        self._room[slot] = len(sequence.blocks) * self._block_size
        self._list_blocks(slot, sequence.blocks)
        sequence.decode_in(self)

    def leave(self, sequence: Sequence) -> None:
        """Free a slot; the last running sequence moves into it."""
        slot = sequence.slot
        assert slot is not None
        if sequence.decoding:
            self.bring(sequence)
            first, last, gap = self._seconds[:, slot].tolist()
            sequence.first_token_at = None if math.isnan(first) else first
            sequence.last_token_at = None if math.isnan(last) else last
            sequence.longest_gap_s = gap
        else:
            del self._prefilling[sequence]
        sequence.leave_slot()
        last_slot = len(self._sequences) - 1
        moved = self._sequences.pop()
        if moved is not sequence:
            self._sequences[slot] = moved
            moved.slot = slot
            columns = (self._numbers, self._seconds)
            for column in columns:
                column[:, slot] = column[:, last_slot]
            for rows in (self._recent, self._stop_ids, self._table, self._objects):
                rows[slot] = rows[last_slot]
        self._objects[last_slot] = None
        self._entry[last_slot] = -1

    def bring(self, sequence: Sequence) -> None:
        """Hand the newest tokens of a text to its sequence."""
        slot = sequence.slot
        held, known = int(self._holds[slot]), int(self._known[slot])
        first = held % _RECENT
        sequence.extend(self._recent[slot, first : first + known - held].tobytes())
        self._holds[slot] = known

    def known(self, slot: int) -> int:
        return int(self._known[slot])

    def unknown(self, slot: int) -> int:
        return int(self._unknown[slot])

    def ready(self) -> Numbers:
        """Slots that decode; not those whose text ends with what is in flight, as is known."""
        count = len(self)
        unfinished = self._known[:count] + self._unknown[:count] < self._end[:count]
        slots: Numbers = (unfinished & (self._decodes[:count] == 1)).nonzero()[0]
        return slots

    def short_of_blocks(self, slots: Numbers) -> Numbers:
        """Those of the slots whose next token has no room."""
        short: Numbers = slots[self._known[slots] + self._unknown[slots] > self._room[slots]]
        return short

    def add_block(self, slots: Numbers, blocks: Seq[int]) -> None:
        """Give each of the slots one more block."""
        places = self._room[slots] // self._block_size
        if len(slots) and int(places.max()) >= self._table.shape[1]:
            self._lengthen(int(places.max()) + 1)
        self._table[slots, places] = blocks
        self._room[slots] += self._block_size
        for sequence, block in zip(self._objects[slots], blocks, strict=True):
            sequence.blocks.append(block)

    def decodes(self, slots: Numbers) -> Decodes:
        """The next tokens of these slots."""
        known = self._known[slots]
        unknown = self._unknown[slots]
        return Decodes(
            sequences=self._objects[slots],
            slots=slots,
            starts=known + unknown - 1,
            tokens=self._recent[slots, (known - 1) % _RECENT],
            follows=np.where(unknown > 0, self._drawn_at[slots], -1),
            rows=self._row[slots],
            ruled=self._ruled[slots],
            table=self._table,
            entries=self._entry[slots],
        )

    def expect(self, decodes: Decodes) -> None:
        """Keep places for the tokens of a launched plan, which draws those of the decodes first."""
        self._unknown[decodes.slots] += 1
        self._drawn_at[decodes.slots] = np.arange(len(decodes))

    def expect_one(self, sequence: Sequence, drawn_at: int) -> None:
        """Keep a place for the token that a launched plan draws as its `drawn_at`-th."""
        self._unknown[sequence.slot] += 1
        self._drawn_at[sequence.slot] = drawn_at

    def slots_of(self, decodes: Decodes) -> Numbers:
        """The slots of decodes as they are now, -1 of those that have left since."""
        changed = (self._entry[decodes.slots] != decodes.entries).nonzero()[0]
        if not len(changed):
            return decodes.slots
        slots = decodes.slots.copy()
        moved = decodes.sequences[changed]
        slots[changed] = [-1 if each.slot is None else each.slot for each in moved]
        return slots

    def land(self, slots: Numbers, tokens: Numbers, now_s: float) -> tuple[list[int], Numbers]:
        """Book the next known token of each slot, once each.

        Return the places of those to be looked at, because a text ends or is watched, and which
        of all end by a stop id.
        """
        known = self._known[slots]
        self._recent[slots, known % _RECENT] = tokens
        known += 1
        self._known[slots] = known
        self._unknown[slots] = np.maximum(self._unknown[slots] - 1, 0)
        # fmin and fmax pass over NaN
        self._first_at[slots] = np.fmin(self._first_at[slots], now_s)
        self._gap[slots] = np.fmax(self._gap[slots], now_s - self._last_at[slots])
        self._last_at[slots] = now_s
        for sequence in self._objects[slots[known % _RECENT == 0]]:
            self.bring(sequence)
        stopped = (self._stop_ids.take(slots, axis=0) == tokens[:, None]).any(axis=1)
        stopped &= known > self._least[slots]
        looked_at = stopped | (known >= self._end[slots]) | (self._watched[slots] == 1)
        return looked_at.nonzero()[0].tolist(), stopped

    def check(self) -> None:
        """Raise AssertionError unless slots, columns and sequences agree."""
        for slot, sequence in enumerate(self._sequences):
            assert sequence.slot == slot, "a sequence does not know its slot"
            assert self._objects[slot] is sequence, "a slot does not know its sequence"
            decodes = bool(self._decodes[slot])
            assert decodes == sequence.decoding, "a slot does not know whether it decodes"
            assert decodes != (sequence in self._prefilling), "a prefill is not known"
            if decodes:
                blocks = self._table[slot, : len(sequence.blocks)].tolist()
                assert blocks == list(sequence.blocks), "a slot has other blocks"
                room = len(sequence.blocks) * self._block_size
                assert self._room[slot] == room, "the room of a slot is wrong"
        assert len(self._prefilling) <= len(self), "somebody prefills without a slot"

    def _name_columns(self) -> None:
        numbers = dict(zip(self._COLUMNS, self._numbers, strict=True))
        self._known, self._unknown = numbers["known"], numbers["unknown"]
        self._drawn_at, self._holds = numbers["drawn_at"], numbers["holds"]
        self._end, self._least = numbers["end"], numbers["least"]
        self._room, self._decodes = numbers["room"], numbers["decodes"]
        self._watched, self._ruled = numbers["watched"], numbers["ruled"]
        self._row, self._entry = numbers["row"], numbers["entry"]
        self._first_at, self._last_at, self._gap = self._seconds

    def _widen(self) -> None:
        """Make twice as many slots."""
        self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._seconds = np.concatenate([self._seconds, np.zeros_like(self._seconds)], axis=1)
        self._recent = np.concatenate([self._recent, self._recent])
        self._stop_ids = np.concatenate([self._stop_ids, self._stop_ids])
        self._table = np.concatenate([self._table, self._table])
        self._objects = np.concatenate([self._objects, np.empty_like(self._objects)])
        self._name_columns()

    def _lengthen(self, blocks: int) -> None:
        """Make the table wide enough for so many blocks."""
        more = max(blocks, 2 * self._table.shape[1]) - self._table.shape[1]
        empty = np.zeros((len(self._table), more), np.int32)
        self._table = np.concatenate([self._table, empty], axis=1)

    def _list_blocks(self, slot: int, blocks: Seq[int]) -> None:
        if len(blocks) > self._table.shape[1]:
            self._lengthen(len(blocks))
        self._table[slot, : len(blocks)] = blocks

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            empty = np.full((len(self._stop_ids), missing), _NO_TOKEN, np.int64)
            self._stop_ids = np.concatenate([self._stop_ids, empty], axis=1)
        self._stop_ids[slot] = _NO_TOKEN
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
