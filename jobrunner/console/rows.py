"""Tell when a row has ended, and why rows failed. Knows no clock, file or terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jobrunner.records import Completion, RowError, RowId

EXAMPLES = 3  # messages kept of each kind
_EXAMPLE_LENGTH = 200


@dataclass(slots=True)
class EndedRow:
    """A row some or all of whose samples have ended. `tokens` sums over prompt and samples."""

    samples_left: int
    tokens: int = 0
    error: RowError | None = None


class OpenRows:
    """Gathers the samples of rows: it holds as many rows as are in flight with some ended."""

    def __init__(self) -> None:
        self._rows: dict[RowId, EndedRow] = {}

    def add(self, completion: Completion) -> EndedRow | None:
        """Take in the end of one sample; return its row if that has no other left."""
        request = completion.request
        samples = 1 if request is None else request.samples
        row = self._rows.get(completion.id) or EndedRow(samples, completion.prompt_tokens)
        row.samples_left -= 1
        row.tokens += len(completion.tokens)
        row.error = row.error or completion.error
        if row.samples_left > 0:
            self._rows[completion.id] = row
            return None
        self._rows.pop(completion.id, None)
        return row


class Errors:
    """Counts error rows by kind and keeps the first messages of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    @property
    def total(self) -> int:
        return self._counts.total()

    @property
    def by_kind(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))

    @property
    def examples(self) -> dict[str, tuple[str, ...]]:
        """The first messages of each kind, each with its row, cut where they are long."""
        return {kind: tuple(messages) for kind, messages in sorted(self._examples.items())}

    def add(self, error: RowError, row: RowId) -> None:
        """Count one row."""
        self._counts[error.kind] += 1
        examples = self._examples.setdefault(error.kind, [])
        if len(examples) < EXAMPLES:
            examples.append(_cut(_with_row(error.message, row)))


def _with_row(message: str, row: RowId) -> str:
    return message if message.startswith(str(row)) else f"{row}: {message}"


def _cut(message: str) -> str:
    if len(message) <= _EXAMPLE_LENGTH:
        return message
    return message[: _EXAMPLE_LENGTH - 1] + "…"
