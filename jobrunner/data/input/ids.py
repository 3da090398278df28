"""Check that every row has an id of its own, whatever the number of rows.

Ids go to temporary files by their hash, so that equal ones meet in one file, and only the ids of
one such file are in memory at once. Knows nothing of prompts.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from jobrunner.records import Row, RowId

PARTITIONS = 64
# a file of more bytes than this is divided again
PARTITION_BYTES = 64 * 2**20
_BUFFER_BYTES = 32 * 2**10
_DEEPEST = 4
_HEAD = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class IdProblem:
    """A row without an id, or one whose id an earlier row has."""

    row: RowId
    id: str | None = None
    earlier: RowId | None = None

    def __str__(self) -> str:
        if self.earlier is None:
            return f"{self.row} has no id"
        earlier, row = self.earlier, self.row
        same = "" if earlier.shard == row.shard else f" of `{earlier.shard}`"
        return (
            f"rows {earlier.index:,}{same} and {row.index:,} of `{row.shard}`"
            f" have the same id {self.id}"
        )


@dataclass(frozen=True, slots=True)
class IdReport:
    """How many rows have no id of their own, and the first of them."""

    count: int = 0
    first: tuple[IdProblem, ...] = ()


class UniqueIds:
    """Takes the ids of rows in the order of the input, then tells which are not unique."""

    def __init__(
        self,
        examples: int,
        *,
        partitions: int = PARTITIONS,
        partition_bytes: int = PARTITION_BYTES,
    ) -> None:
        """`examples` is how many problems the report gives in words."""
        self._examples = examples
        self._shards: list[str] = []
        self._nulls: list[IdProblem] = []
        self._null_count = 0
        self._partition_bytes = partition_bytes
        self._files = _Partitions(partitions, depth=0)

    def __enter__(self) -> UniqueIds:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows whose `value` is the id."""
        for row in rows:
            if not self._shards or self._shards[-1] != row.id.shard:
                self._shards.append(row.id.shard)
            if row.value is None:
                self._null_count += 1
                if len(self._nulls) < self._examples:
                    self._nulls.append(IdProblem(row.id))
                continue
            place = (len(self._shards) - 1) << 40 | row.id.index
            self._files.add(spell(row.value).encode("utf-8", "surrogatepass"), place)

    def report(self) -> IdReport:
        """Count the rows whose id is not theirs alone; give the first of them in order."""
        count = self._null_count

        def counted() -> Iterator[tuple[int, int, bytes]]:
            nonlocal count
            for repeat in self._repeats(self._files):
                count += 1
                yield repeat

        repeats = [
            IdProblem(self._row(place), id_.decode("utf-8", "surrogatepass"), self._row(earlier))
            for place, earlier, id_ in heapq.nsmallest(self._examples, counted())
        ]
        order = {shard: number for number, shard in enumerate(self._shards)}
        problems = sorted([*self._nulls, *repeats], key=lambda p: (order[p.row.shard], p.row.index))
        return IdReport(count, tuple(problems[: self._examples]))

    def _row(self, place: int) -> RowId:
        return RowId(self._shards[place >> 40], place & (1 << 40) - 1)

    def _repeats(self, files: _Partitions) -> Iterator[tuple[int, int, bytes]]:
        """The place of each repeated id, that of the first row that has it, and the id."""
        for partition, size in enumerate(files.sizes):
            if size > self._partition_bytes and files.depth < _DEEPEST:
                with _Partitions(len(files.sizes), files.depth + 1) as smaller:
                    for id_, place in files.read(partition):
                        smaller.add(id_, place)
                    yield from self._repeats(smaller)
                continue
            firsts: dict[bytes, int] = {}
            for id_, place in files.read(partition):
                first = firsts.setdefault(id_, place)
                if first != place:
                    yield place, first, id_


class _Partitions:
    """Ids with their places in temporary files, by a hash that differs at every depth."""

    def __init__(self, count: int, depth: int) -> None:
        self.depth = depth
        self.sizes = [0] * count
        self._salt = bytes([depth])
        self._buffers = [bytearray() for _ in range(count)]
        self._files: list[IO[bytes] | None] = [None] * count

    def __enter__(self) -> _Partitions:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self, id_: bytes, place: int) -> None:
        digest = hashlib.blake2b(id_, digest_size=4, salt=self._salt).digest()
        partition = int.from_bytes(digest, "little") % len(self.sizes)
        buffer = self._buffers[partition]
        buffer += _HEAD.pack(len(id_), place)
        buffer += id_
        if len(buffer) >= _BUFFER_BYTES:
            self._write(partition)

    def read(self, partition: int) -> Iterator[tuple[bytes, int]]:
        """The ids of a partition in the order in which they came."""
        if self._buffers[partition]:
            self._write(partition)
        file = self._files[partition]
        if file is None:
            return
        file.seek(0)
        while head := file.read(_HEAD.size):
            length, place = _HEAD.unpack(head)
            yield file.read(length), place

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                file.close()

    def _write(self, partition: int) -> None:
        file = self._files[partition]
        if file is None:
            # it has no name on the disk, so that nothing is left behind
            file = self._files[partition] = tempfile.TemporaryFile()  # noqa: SIM115
        file.seek(0, 2)
        file.write(self._buffers[partition])
        self.sizes[partition] += len(self._buffers[partition])
        self._buffers[partition].clear()


def spell(value: Any) -> str:
    """Spell an id so that different ids differ: 1 is not "1"."""
    return json.dumps(value, ensure_ascii=False, default=repr)
