"""What every format tells of a file and how its rows are read. Knows no format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from jobrunner.records import RowError

# what a format reads of one record: its columns, or why it cannot be read
Record = Mapping[str, Any] | RowError
# rows of kept columns in one batch
CARRIED_BATCH_ROWS = 256


class Wanted(NamedTuple):
    """Names of the columns that a job reads: for its prompts, and into its results."""

    needed: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


class Place(Protocol):
    """Where a reader stands in one file: `row` is the next row."""

    row: int

    def leads_to(self, row: int) -> bool:
        """Whether going on from here is no more work than opening the file at `row`."""

    def forward_to(self, row: int) -> None:
        """Go to a row that this place leads to."""

    def next_records(self, stop: int) -> Sequence[Record]:
        """Read a few rows from here, at least one, not beyond `stop`."""

    def close(self) -> None:
        """Let go of the file."""


class Content(Protocol):
    """What one look at a file found in it, and the way to its rows.

    `format` is its name. `groups` are the numbers of rows that are best read together; `schema`
    has the columns that every row has, empty where each row has its own.
    """

    @property
    def format(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def groups(self) -> Sequence[int]: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def looked_at(self) -> dict[str, int | str]:
        """What identified the bytes of the file that this tells of, and no others."""

    def identity(self) -> dict[str, int | str]:
        """What identifies the bytes of the file as they are now; never a time."""

    def open(self, columns: Sequence[str], row: int, batch_rows: int) -> Place:
        """Open the file so that some of its columns can be read from `row` or before."""

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Stream the columns of `schema`, in its types, from the first row to the last."""


def batch_without_columns(rows: int) -> pa.RecordBatch:
    """A batch that is only a number of rows."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
