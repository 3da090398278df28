"""What `cbjob check` finds out of a job, as plain records. Knows nothing of how it is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobrunner.data.census import RowsReport
from jobrunner.data.input.ids import IdReport
from jobrunner.errors import ExitCode


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the input: in how many shards it has which type."""

    name: str
    shards_by_type: dict[str, int]


@dataclass(frozen=True, slots=True)
class InputReport:
    """The shards of a job; `size_bytes` are those of their files as they are stored."""

    formats: tuple[str, ...]
    shards: int
    rows: int
    size_bytes: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model that can run here, and how much of it fits.

    `kv_tokens` is the room of the KV memory, estimated from what is free unless `proven` says
    that the model was loaded, and computes the same here as by itself.
    """

    folder: Path
    architecture: str
    layers: int
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    max_model_len: int
    max_batch_size: int
    block_size: int
    kv_bytes_per_token: int
    kv_tokens: int
    proven: bool

    @property
    def longest_sequences(self) -> float:
        """How many sequences of the greatest length fit into the KV memory."""
        return self.kv_tokens / self.max_model_len


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What is known of a job before it runs.

    `changed` are the settings that are not at their default, `effective` all of them as they hold,
    `generation` the parameters of a row that sets none.
    """

    job: str
    changed: dict[str, Any]
    effective: dict[str, Any]
    generation: dict[str, Any]
    input: InputReport
    model: ModelReport
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ids: IdReport | None = None
    rows: RowsReport | None = None

    @property
    def exit_code(self) -> ExitCode:
        if self.ids is not None and self.ids.count:
            return ExitCode.USAGE
        if self.rows is not None and self.rows.error_rows:
            return ExitCode.ROW_ERRORS
        return ExitCode.OK
